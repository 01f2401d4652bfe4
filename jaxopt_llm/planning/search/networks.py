"""Search for the fastest settings on each of several networks, with one set of compiled programs.

A program is the same whatever the network between the hosts is: only its time differs.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from jaxopt_llm.config import Config
from jaxopt_llm.planning.search import ranking
from jaxopt_llm.planning.search.ranking import CompiledCandidate, CompiledPlan, SearchResult
from jaxopt_llm.planning.search.roofline import Cluster

CompileForAll = Callable[[Sequence[Config]], Iterable[Sequence[CompiledPlan]]]


def search_networks(
    config: Config,
    clusters: Sequence[Cluster],
    limit: int,
    allowed: tuple[str, ...],
    compile_all: CompileForAll,
    at_once: int = 1,
) -> list[SearchResult]:
    """Find the fastest settings of a recipe on each cluster. Every ranking has all programs that were compiled for any.

    Args:
        clusters: the same GPUs with different links.
        limit: bytes of each GPU that XLA may use.
        allowed: fields that may also change (`fields.SEARCHED`).
        compile_all: compiles up to `at_once` settings in parallel, and returns the plans of each for all clusters.

    Raises:
        InputError: no setting is legal.
    """
    plans: dict[Config, Sequence[CompiledPlan]] = {}

    def compile_for(index: int, some: Sequence[Config]) -> list[CompiledPlan]:
        """Return the plans of settings for one cluster. Compile only the settings that no cluster has needed before."""
        if new := [each for each in some if each not in plans]:
            plans.update(zip(new, compile_all(new), strict=True))
        return [plans[each][index] for each in some]

    illegal, estimated = ranking.estimate_legal(config, clusters[0], allowed)
    results = [
        ranking.rank_settings(
            config,
            cluster,
            limit,
            illegal,
            [replace(each, cluster=cluster) for each in estimated],
            functools.partial(compile_for, index),
            at_once,
        )
        for index, cluster in enumerate(clusters)
    ]
    candidates = {each.config: each.candidate for result in results for each in result.compiled}

    def measure_all(index: int, cluster: Cluster) -> tuple[CompiledCandidate, ...]:
        return ranking.order_compiled(
            ranking.measure(replace(candidate, cluster=cluster), plans[setting][index])
            for setting, candidate in candidates.items()
        )

    return [
        replace(result, compiled=measure_all(index, cluster))
        for index, (cluster, result) in enumerate(zip(clusters, results, strict=True))
    ]
