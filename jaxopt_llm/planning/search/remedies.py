"""Changes to suggest if nothing fits, cheapest first. Arithmetic confirms that each of them fits."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from jaxopt_llm.compiler.chips import CHIPS, Chip
from jaxopt_llm.config import Config
from jaxopt_llm.config.fields import METADATA, SEARCHED
from jaxopt_llm.planning.free_memory import GIB, count_chip_bytes, leave_free
from jaxopt_llm.planning.search.ranking import Candidate, SearchResult, estimate_all, order_candidates
from jaxopt_llm.planning.search.report import format_flags
from jaxopt_llm.planning.search.roofline import Cluster, compute_step_time

ADAPTER_RANK = 16  # rank of the adapters that are suggested
MAX_REMEDIES = 3
LONGER = 1.1  # ratio from which on a remedy gives the time of a step without overlap, too
HOST_FACTORS = (2, 4, 8, 16, 32, 64)  # numbers of hosts that are tried, as multiples of the given hosts


def find_remedies(result: SearchResult, allowed: tuple[str, ...]) -> list[str]:
    """Return up to MAX_REMEDIES changes that make a setting fit.

    Args:
        allowed: fields that the search was allowed to change.
    """
    found = itertools.chain(
        _try_narrower(result, allowed), _try_larger_gpus(result, allowed), _try_more_hosts(result, allowed)
    )
    most = HOST_FACTORS[-1] * result.cluster.hosts
    none = f"shorten --training.sequence-length, because up to {most} hosts do not help"
    return [*itertools.islice(found, MAX_REMEDIES)] or [none]


def _try_narrower(result: SearchResult, allowed: tuple[str, ...]) -> Iterator[str]:
    """Try each field that the user has not allowed, and then training only adapters."""
    recipe = result.recipe
    for name in SEARCHED:
        if name not in allowed and (found := _find_fitting(recipe, result.cluster, result.limit, (*allowed, name))):
            yield f"--allow {name} (price: {METADATA[name].price}): {_describe(found, result.cluster, recipe)}"
    if recipe.lora.rank == 0:
        adapted = replace(recipe, lora=replace(recipe.lora, rank=ADAPTER_RANK))
        if found := _find_fitting(adapted, result.cluster, result.limit, allowed):
            yield f"train only adapters: {_describe(found, result.cluster, recipe)}"


def _try_larger_gpus(result: SearchResult, allowed: tuple[str, ...]) -> Iterator[str]:
    """Try the chips that have more memory and are slower in nothing, smallest first."""
    given = result.cluster.chip

    def figures(chip: Chip) -> tuple[float, ...]:
        rates = (chip.memory_bytes_per_second, chip.peer_bytes_per_second, chip.network_bytes_per_second)
        return chip.peak_flops["bfloat16"], *rates

    for name, chip in sorted(CHIPS.items(), key=lambda item: item[1].memory_bytes):
        limit = leave_free(count_chip_bytes(chip))
        cluster = replace(result.cluster, gpu=name)
        slower = any(new < old for new, old in zip(figures(chip), figures(given), strict=True))
        if chip.memory_bytes <= given.memory_bytes or slower:
            continue
        if found := _find_fitting(result.recipe, cluster, limit, allowed):
            yield f"--gpu {name}: {_describe(found, cluster, result.recipe)}"
            return


def _try_more_hosts(result: SearchResult, allowed: tuple[str, ...]) -> Iterator[str]:
    for factor in HOST_FACTORS:
        larger = replace(result.cluster, hosts=factor * result.cluster.hosts)
        if found := _find_fitting(result.recipe, larger, result.limit, allowed):
            yield f"--hosts {larger.hosts}: {_describe(found, larger, result.recipe)}"
            return


def _find_fitting(config: Config, cluster: Cluster, limit: int, allowed: tuple[str, ...]) -> Candidate | None:
    """Return the fastest setting that fits by arithmetic, of those that need least memory."""
    fastest, *_ = order_candidates(estimate_all(config, cluster, allowed, lean=True), limit) or (None,)
    return fastest if fastest and fastest.footprint.peak <= limit else None


def _describe(found: Candidate, cluster: Cluster, recipe: Config) -> str:
    figures = f"about {found.footprint.peak / GIB:.1f} GiB and {found.time.total:.2f} s per step"
    exposed = _time_without_overlap(found, cluster)
    if exposed > LONGER * found.time.total:
        figures += f" ({exposed:.2f} s if XLA hides no transfer)"
    return f"{figures} with {format_flags(found.config, recipe) or 'the recipe without changes'}"


def _time_without_overlap(found: Candidate, cluster: Cluster) -> float:
    """Return the time of a step if XLA hides no transfer. Only compiling shows what it does hide."""
    exposed = tuple(replace(each, overlapped=0.0) for each in found.work.transfers)  # type: ignore[type-var]
    work = replace(found.work, transfers=exposed)
    return compute_step_time(work, cluster.chip, found.config.precision.compute_dtype).total
