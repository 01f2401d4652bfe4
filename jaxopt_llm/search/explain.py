"""The decision as a tree: along the winner's branch, at each choice what else was tried, what it saves and what it
costs, and why the other branches were left.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields

from jaxopt_llm import config as configuration
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.search.choose import Candidate, Search
from jaxopt_llm.search.report import mesh_words, pipeline_words, remat_words, sharding_words
from jaxopt_llm.search.roofline import LABELS
from jaxopt_llm.search.walk import ALLOWED
from jaxopt_llm.training.memory import GIB


@dataclass(frozen=True)
class _Level:
    """One choice: its name, the part of a configuration that is chosen, and how that is said."""

    name: str
    of: Callable[[TrainConfig], Hashable]
    words: Callable[[TrainConfig], str]


LEVELS = (
    _Level("mesh", lambda config: config.mesh, lambda config: mesh_words(config.mesh)),
    _Level("pipeline", lambda config: config.pipeline, lambda config: pipeline_words(config.pipeline)),
    _Level(
        "sharding",
        lambda config: config.sharding,
        lambda config: ", ".join(sharding_words(config)),
    ),
    _Level(
        "accumulation",
        lambda config: config.training.accumulation,
        lambda config: f"{config.training.accumulation} microbatch{'es' * (config.training.accumulation > 1)}",
    ),
    _Level("remat", lambda config: config.remat, lambda config: remat_words(config.remat)),
    _Level(
        "optimizer state",
        lambda config: config.offload.optimizer,
        lambda config: "on the host" if config.offload.optimizer else "on the GPU",
    ),
    *(
        _Level(
            name,
            lambda config, name=name: configuration.get(config, name),  # type: ignore[misc]
            lambda config, name=name: str(configuration.get(config, name)),  # type: ignore[misc]
        )
        for name in ALLOWED
    ),
)


def tree(search: Search) -> str:
    """Times and bytes are the arithmetic's, of the best setting of each branch; a * marks those that were compiled."""
    chosen = search.winner.candidate if search.winner else min(search.candidates, key=lambda each: each.footprint.peak)
    return "\n".join(
        [
            f"how it was chosen, by arithmetic (limit {search.limit / GIB:.1f} GiB; * compiled; time and memory of a "
            "branch's best, beside the chosen)",
            *_branches(search, chosen, search.candidates, LEVELS),
        ]
    )


def _branches(
    search: Search, chosen: Candidate, candidates: Sequence[Candidate], levels: Sequence[_Level], depth: int = 0
) -> Iterator[str]:
    if not levels:
        return
    level, *rest = levels
    groups: dict[Hashable, list[Candidate]] = {}
    for each in candidates:
        groups.setdefault(level.of(each.config), []).append(each)
    own = groups[level.of(chosen.config)]
    if len(groups) == 1 and not (depth == 0 and search.illegal):
        yield from _branches(search, chosen, own, rest, depth)
        return
    indent = "  " * depth
    yield f"{indent}{level.name}"
    yield f"{indent}  > {_line(search, level, own, chosen, chosen)}"
    yield from _branches(search, chosen, own, rest, depth + 2)
    others = [group for group in groups.values() if group is not own]
    for group in sorted(others, key=lambda group: _best(search, group).time.total):
        yield f"{indent}  - {_line(search, level, group, _best(search, group), chosen)}"
    if depth == 0:
        for mesh, problems in search.illegal.items():
            yield f"{indent}  - {mesh_words(mesh)}: illegal: {problems[0]}"


def _best(search: Search, group: Sequence[Candidate]) -> Candidate:
    """The fastest that fits by arithmetic, or what needs least."""
    fitting = [each for each in group if search.may_fit(each)]
    if fitting:
        return fitting[0]
    return min(group, key=lambda each: each.footprint.peak)


def _line(search: Search, level: _Level, group: Sequence[Candidate], best: Candidate, chosen: Candidate) -> str:
    compiled = {choice.config for choice in search.choices}
    mark = "*" if any(each.config in compiled for each in group) else ""
    said = f"{level.words(best.config)}{mark} ({len(group):,}): "
    peak = best.footprint.peak / GIB
    if best is chosen:
        return said + f"{best.time.total:.3f} s, {peak:.1f} GiB"
    if not search.may_fit(best):
        return said + f"does not fit, {peak:.1f} GiB at least"
    more, saved = best.time.total / chosen.time.total - 1, peak - chosen.footprint.peak / GIB
    return said + f"{more:+.1%}, {saved:+.1f} GiB{_why(best, chosen)}"


def _why(best: Candidate, chosen: Candidate) -> str:
    """What of the step's time grew most."""
    grown = {
        field.name: getattr(best.time, field.name) - getattr(chosen.time, field.name) for field in fields(best.time)
    }
    name = max(grown, key=lambda name: grown[name])
    return f": {LABELS[name]} {grown[name] * 1e3:+,.0f} ms" if grown[name] > 5e-4 else ""
