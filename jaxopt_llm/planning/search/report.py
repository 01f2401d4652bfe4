"""Report of a search: the table of the compiled settings, also as JSON, its explanation as a tree, and remedies.

At each decision along the winner's branch the tree shows the other branches: what they save, what they cost, and why
they were not chosen.

If nothing fits, it suggests changes, cheapest first. Arithmetic confirms that each of them fits.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxopt_llm.compiler.chips import CHIPS, Chip
from jaxopt_llm.config import Config, MeshConfig, PipelineConfig, RematConfig, fields
from jaxopt_llm.config.fields import FIELDS, METADATA, SEARCHED
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.planning.free_memory import FREE, GIB, count_chip_bytes, leave_free
from jaxopt_llm.planning.search.ranking import (
    Candidate,
    CompiledCandidate,
    SearchResult,
    estimate_all,
    order_candidates,
)
from jaxopt_llm.planning.search.roofline import LABELS, Cluster, compute_step_time


def describe_mesh(mesh: MeshConfig) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in mesh.sizes.items() if size > 1) or "one GPU"


def describe_sharding(config: Config) -> list[str]:
    sharding, mesh = config.sharding, config.mesh
    return [
        f"ZeRO-{sharding.zero_stage}",
        *(["optimizer over data"] if sharding.optimizer_over_data and mesh.data > 1 else []),
        *(["sequence parallel"] if sharding.sequence_parallel and mesh.tensor > 1 else []),
        *([sharding.context_exchange.replace("_", "-")] if mesh.context > 1 else []),
    ]


def describe_pipeline(pipeline: PipelineConfig) -> str:
    text = pipeline.schedule + (f" by {pipeline.virtual_stages}" if pipeline.virtual_stages > 1 else "")
    text += f" of {' '.join(map(str, pipeline.split))} layers" if pipeline.split else ""
    return text + (f", {pipeline.residuals}" if pipeline.residuals != AUTO else "")


def describe_remat(remat: RematConfig) -> str:
    text = remat.policy if isinstance(remat.policy, str) else " ".join(remat.policy)
    text += f" every {remat.every}" if remat.every > 1 else ""
    return text + (f", on the host {' '.join(remat.offload)}" if remat.offload else "")


def describe_setting(config: Config, recipe: Config) -> str:
    """Return a setting in one line, including other fields that differ from the recipe's."""
    changes = list_changes(config, recipe)
    parts = [
        describe_mesh(config.mesh),
        *([describe_pipeline(config.pipeline)] if config.mesh.pipeline > 1 else []),
        *describe_sharding(config),
        f"remat {describe_remat(config.remat)}",
        *([f"accumulation {config.training.accumulation}"] if config.training.accumulation > 1 else []),
        *(["optimizer on the host"] if config.offload.optimizer else []),
        *(f"{name} {format_value(changes[name])}" for name in SEARCHED if name in changes),
    ]
    return ", ".join(parts)


def list_changes(config: Config, recipe: Config) -> dict[str, Any]:
    """Return the fields that differ from the recipe's, with their values."""
    values = {name: fields.get_field(config, name) for name in FIELDS}
    return {name: value for name, value in values.items() if value != fields.get_field(recipe, name)}


def format_flags(settings: Mapping[str, Any]) -> str:
    """Return the flags of settings by name."""
    return " ".join(f"--{name.replace('_', '-')} {format_value(value)}" for name, value in settings.items())


def format_value(value: Any) -> str:
    """Return the value of a setting as its flag takes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


COLUMNS = ("params", "grads", "optim", "activ", "gather", "other", "peak", "spare")


def format_table(result: SearchResult, seconds: float) -> str:
    """Return the table of the compiled settings.

    Args:
        seconds: duration of the search.
    """
    recipe, cluster = result.recipe, result.cluster
    lines = [
        _make_heading(result, seconds),
        "",
        f"{'':5}s/step {f'{result.unit}/s':>9} {'days':>8}  MFU  {'bottleneck':16}  "
        f"{' '.join(f'{name:>6}' for name in COLUMNS)}  (GiB of each GPU)",
    ]
    for rank, candidate in enumerate(result.compiled, 1):
        memory, time = candidate.plan.memory, candidate.time
        sizes = (*dataclasses.astuple(memory), memory.peak, candidate.plan.spare)
        columns = " ".join(f"{size / GIB:6.2f}" for size in sizes)
        mark = " (the recipe)" if candidate.config == recipe else ""
        days = compute_days(candidate)
        speed = f"{compute_rate(candidate):9,.0f} {'-' if days is None else f'{days:,.2f}':>8}"
        mfu = f"{compute_mfu(candidate, result):4.0%}"
        fits = (
            ("" if candidate.is_roomy else f", leaves less than {FREE:.0%} free")
            if candidate.fits
            else ": DOES NOT FIT"
        )
        waits = f"; {candidate.network_share:.1%} of the step waits for the network" if cluster.hosts > 1 else ""
        lines += [
            f"{rank:3} {time.total:7.3f} {speed} {mfu}  {time.bottleneck:16}  {columns}",
            f"{'':4}{describe_setting(candidate.config, recipe)}{mark}{fits}{waits}",
        ]
    if result.winner:
        flags = format_flags(list_changes(result.winner.config, recipe)) or "the recipe without changes"
        lines += ["", f"fastest that fits: {flags}"]
    return "\n".join(lines)


def _make_heading(result: SearchResult, seconds: float) -> str:
    cluster, may_fit = result.cluster, sum(map(result.may_fit, result.candidates))
    return (
        f"{len(result.candidates):,} settings on {cluster.hosts} × {cluster.gpus_per_host} {cluster.chip.name}: "
        f"{may_fit:,} fit by arithmetic, {len(result.compiled)} compiled, in {seconds:.0f} s"
    )


def compute_mfu(candidate: CompiledCandidate, result: SearchResult) -> float:
    """Return the model FLOPs divided by the chip's peak FLOPs in the step's time."""
    peak = result.cluster.chip.peak_flops[candidate.config.precision.compute_dtype]
    return candidate.candidate.count_model_flops(candidate.plan) / (peak * candidate.time.total)


def compute_rate(candidate: CompiledCandidate) -> float:
    """Return the tokens or rows of all GPUs in a second, with padding."""
    return candidate.candidate.units / candidate.time.total


def compute_days(candidate: CompiledCandidate) -> float | None:
    """Return the days of all steps of the run; None: epochs determine the steps."""
    steps = candidate.config.training.steps
    return steps * candidate.time.total / 86_400 if steps else None


def to_json(result: SearchResult, seconds: float, plan_json: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the report as JSON values.

    Args:
        seconds: duration of the search.
        plan_json: converts a compiled plan to the values of `plan --json`.
    """
    return {
        "gpu": result.cluster.chip.name,
        "hosts": result.cluster.hosts,
        "gpus_per_host": result.cluster.gpus_per_host,
        "network": result.cluster.links.network,
        "settings": len(result.candidates),
        "fit_by_arithmetic": sum(map(result.may_fit, result.candidates)),
        "seconds": seconds,
        "ranked": [
            {
                "settings": list_changes(candidate.config, result.recipe),
                "is_recipe": candidate.config == result.recipe,
                "step_seconds": candidate.time.total,
                f"{result.unit}_per_second": compute_rate(candidate),
                "days": compute_days(candidate),
                "binds": candidate.time.bottleneck,
                "network_share": candidate.network_share,
                "time": dataclasses.asdict(candidate.time),
                "estimated": {
                    "step_seconds": candidate.candidate.time.total,
                    "peak": round(candidate.candidate.footprint.peak),
                },
                "plan": plan_json(candidate.plan),
            }
            for candidate in result.compiled
        ],
    }


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


ADAPTER_RANK = 16  # rank of the adapters that are suggested
MAX_REMEDIES = 3
LONGER = 1.1  # from this ratio on, a remedy also gives the time of a step without overlap
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
    return f"{figures} with {format_flags(list_changes(found.config, recipe)) or 'the recipe without changes'}"


def _time_without_overlap(found: Candidate, cluster: Cluster) -> float:
    """Return the time of a step if XLA hides no transfer. Only compiling shows what it does hide."""
    exposed = tuple(replace(each, overlapped=0.0) for each in found.work.transfers)
    work = replace(found.work, transfers=exposed)
    return compute_step_time(work, cluster.chip, found.config.precision.compute_dtype).total
