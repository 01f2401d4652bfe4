"""Rule that ends the compiling of a search: the next settings differ from the best one only by the estimate's error."""

from collections.abc import Sequence

# Error of the estimate that is possible after one setting was compiled; after n settings an n-th of it is.
PRIOR_ERROR = 0.03
# Share of a step that is worth another compilation. The roofline itself is less accurate than this.
MIN_GAIN = 0.01


def is_settled(next_estimate: float, alike: Sequence[tuple[float, float]], best: float) -> bool:
    """Return whether a remaining setting is unlikely to be faster than the best compiled one by more than MIN_GAIN.

    The ratios of the compiled to the estimated times show the error of the estimate. The ratio of a remaining setting
    may be as low as the lowest of them, and a little lower while only few have been compiled.

    Args:
        next_estimate: estimated time of the remaining setting.
        alike: estimated and compiled times of settings that fit, whose estimates err as this one's may.
        best: shortest compiled time of a setting that fits.
    """
    lowest_ratio = min(compiled / estimated for estimated, compiled in alike) - PRIOR_ERROR / len(alike)
    return next_estimate * lowest_ratio > best * (1 - MIN_GAIN)
