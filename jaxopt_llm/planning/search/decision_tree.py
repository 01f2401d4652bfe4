"""Explanation of a search as a tree.

At each decision along the winner's branch the tree shows the other branches: what they save, what they cost, and why
they were not chosen.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from jaxopt_llm.config import Config, fields
from jaxopt_llm.config.fields import SEARCHED
from jaxopt_llm.planning.free_memory import GIB
from jaxopt_llm.planning.search.ranking import Candidate, SearchResult
from jaxopt_llm.planning.search.report import describe_mesh, describe_pipeline, describe_remat, describe_sharding
from jaxopt_llm.planning.search.roofline import LABELS


@dataclass(frozen=True)
class _Level:
    """One decision: its name, the section or the setting that is decided, and its description."""

    name: str
    part: str
    describe: Callable[[Config], str]


LEVELS = (
    _Level("mesh", "mesh", lambda config: describe_mesh(config.mesh)),
    _Level("pipeline", "pipeline", lambda config: describe_pipeline(config.pipeline)),
    _Level("sharding", "sharding", lambda config: ", ".join(describe_sharding(config))),
    _Level(
        "accumulation",
        "training.accumulation",
        lambda config: f"{config.training.accumulation} microbatch{'es' * (config.training.accumulation > 1)}",
    ),
    _Level("remat", "remat", lambda config: describe_remat(config.remat)),
    _Level(
        "optimizer state",
        "offload.optimizer",
        lambda config: "on the host" if config.offload.optimizer else "on the GPU",
    ),
    *(_Level(name, name, lambda config, name=name: str(fields.get_field(config, name))) for name in SEARCHED),  # type: ignore[misc]
)


def format_tree(result: SearchResult) -> str:
    """Return the tree as text. Times and bytes are estimates, for the best setting of each branch."""
    smallest = min(result.candidates, key=lambda candidate: candidate.footprint.peak)
    chosen = result.winner.candidate if result.winner else smallest
    return "\n".join(
        [
            f"decisions, by arithmetic (limit {result.limit / GIB:.1f} GiB; * compiled; time and memory of each "
            "branch's best setting, relative to the chosen one)",
            *_format_branches(result, chosen, result.candidates, LEVELS),
        ]
    )


def _format_branches(
    result: SearchResult, chosen: Candidate, candidates: Sequence[Candidate], levels: Sequence[_Level], depth: int = 0
) -> Iterator[str]:
    if not levels:
        return
    level, *rest = levels
    groups: dict[Hashable, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(fields.get_field(candidate.config, level.part), []).append(candidate)
    branch = groups[fields.get_field(chosen.config, level.part)]
    if len(groups) == 1 and not (depth == 0 and result.illegal):
        yield from _format_branches(result, chosen, branch, rest, depth)
        return
    indent = "  " * depth
    yield f"{indent}{level.name}"
    yield f"{indent}  > {_format_branch(result, level, branch, chosen, chosen)}"
    yield from _format_branches(result, chosen, branch, rest, depth + 2)
    others = [group for group in groups.values() if group is not branch]
    for group in sorted(others, key=lambda group: _find_best(result, group).time.total):
        yield f"{indent}  - {_format_branch(result, level, group, _find_best(result, group), chosen)}"
    if depth == 0:
        for mesh, problems in result.illegal.items():
            yield f"{indent}  - {describe_mesh(mesh)}: illegal: {problems[0]}"


def _find_best(result: SearchResult, group: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate that fits by arithmetic, or the one that needs least memory."""
    smallest = min(group, key=lambda candidate: candidate.footprint.peak)
    return next(filter(result.may_fit, group), smallest)


def _format_branch(
    result: SearchResult, level: _Level, group: Sequence[Candidate], best: Candidate, chosen: Candidate
) -> str:
    compiled = {candidate.config for candidate in result.compiled}
    mark = "*" if any(candidate.config in compiled for candidate in group) else ""
    line = f"{level.describe(best.config)}{mark} ({len(group):,}): "
    peak = best.footprint.peak / GIB
    if best is chosen:
        return line + f"{best.time.total:.3f} s, {peak:.1f} GiB"
    if not result.may_fit(best):
        return line + f"does not fit, needs at least {peak:.1f} GiB"
    slower, larger = best.time.total / chosen.time.total - 1, peak - chosen.footprint.peak / GIB
    return line + f"{slower:+.1%}, {larger:+.1f} GiB{_explain_slowdown(best, chosen)}"


def _explain_slowdown(best: Candidate, chosen: Candidate) -> str:
    """Return the part of the step's time that grew most, or "" if none grew."""
    before = dataclasses.asdict(chosen.time)
    growth = {name: seconds - before[name] for name, seconds in dataclasses.asdict(best.time).items()}
    name = max(growth, key=lambda name: growth[name])
    return f": {LABELS[name]} {growth[name] * 1e3:+,.0f} ms" if growth[name] > 5e-4 else ""
