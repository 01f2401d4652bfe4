"""Rule that ends the compiling of a search."""

import pytest

from jaxopt_llm.planning.search.ranking import MIN_GAIN, PRIOR_ERROR, is_settled


@pytest.mark.parametrize("measured", [1, 2, 4, 8])
def test_the_allowed_error_shrinks_with_what_was_compiled(measured: int) -> None:
    """With exact estimates the next setting must be within an n-th of the first error, less the gain that counts."""
    times = [(1.0 + 0.1 * index, 1.0 + 0.1 * index) for index in range(measured)]
    edge = (1 - MIN_GAIN) / (1 - PRIOR_ERROR / measured)
    assert not is_settled(edge - 1e-6, times, 1.0)
    assert is_settled(edge + 1e-6, times, 1.0)


def test_a_setting_that_was_faster_than_estimated_keeps_the_search_going() -> None:
    exact, lucky = [(1.0, 1.0)] * 8, [(1.0, 1.0)] * 7 + [(2.0, 1.8)]
    assert is_settled(1.05, exact, 1.0) and not is_settled(1.05, lucky, 1.0)
    assert is_settled(1.2, lucky, 1.0)


def test_one_bias_of_all_estimates_changes_nothing() -> None:
    """A next setting that is estimated 5% slower stays slower if all settings take 20% longer than estimated."""
    assert is_settled(1.05, [(1.0, 1.0)] * 4, 1.0) and is_settled(1.05, [(1.0, 1.2)] * 4, 1.2)
    assert not is_settled(0.95, [(1.0, 1.2)] * 4, 1.2)
