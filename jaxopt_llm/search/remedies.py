"""What to change where nothing fits, the cheapest first, each tried out by arithmetic."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.parallel.topology import CHIPS
from jaxopt_llm.search.choose import Candidate, Search, estimate_all
from jaxopt_llm.search.report import flags
from jaxopt_llm.search.roofline import Cluster
from jaxopt_llm.search.walk import ALLOWED
from jaxopt_llm.training.memory import GIB

RANK = 16  # of the adapters that are proposed
SAID = 3  # of them, at most
MOST = 64  # times as many hosts are tried, at most


def remedies(search: Search, allowed: tuple[str, ...], fraction: float) -> list[str]:
    """fraction: of a GPU's memory that XLA may use."""
    found = itertools.chain(
        _narrower(search, allowed), _larger_gpus(search, allowed, fraction), _more_hosts(search, allowed)
    )
    none = f"no number of hosts up to {MOST * search.cluster.hosts} helps: a shorter --training.sequence-length"
    return [*itertools.islice(found, SAID)] or [none]


def _narrower(search: Search, allowed: tuple[str, ...]) -> Iterator[str]:
    """What the user has not allowed, one field at a time, and then adapters alone."""
    recipe = search.recipe
    for name in ALLOWED:
        if name not in allowed and (found := _fits(recipe, search.cluster, search.limit, (*allowed, name))):
            yield f"--allow {name}: {_said(found, recipe)}"
    if recipe.lora.rank == 0:
        adapted = replace(recipe, lora=replace(recipe.lora, rank=RANK))
        if found := _fits(adapted, search.cluster, search.limit, allowed):
            yield f"adapters alone: {_said(found, recipe)}"


def _larger_gpus(search: Search, allowed: tuple[str, ...], fraction: float) -> Iterator[str]:
    own = search.cluster.chip.memory_bytes
    for name, chip in sorted(CHIPS.items(), key=lambda item: item[1].memory_bytes):
        limit = int(fraction * chip.memory_bytes)
        cluster = replace(search.cluster, gpu=name)
        if chip.memory_bytes > own and (found := _fits(search.recipe, cluster, limit, allowed)):
            yield f"--gpu {name}: {_said(found, search.recipe)}"
            return


def _more_hosts(search: Search, allowed: tuple[str, ...]) -> Iterator[str]:
    cluster, times = search.cluster, 2
    while times <= MOST:
        larger = replace(cluster, hosts=times * cluster.hosts)
        if found := _fits(search.recipe, larger, search.limit, allowed):
            yield f"--hosts {larger.hosts}: {_said(found, search.recipe)}"
            return
        times *= 2


def _fits(config: TrainConfig, cluster: Cluster, limit: int, allowed: tuple[str, ...]) -> Candidate | None:
    """The fastest that fits by arithmetic, of those that need least."""
    candidates = estimate_all(config, cluster, allowed, lean=True)
    return next((each for each in candidates if each.footprint.peak <= limit), None)


def _said(found: Candidate, recipe: TrainConfig) -> str:
    figures = f"about {found.footprint.peak / GIB:.1f} GiB and {found.time.total:.2f} s a step"
    return f"{figures} with {flags(found.config, recipe) or 'the recipe as it is'}"
