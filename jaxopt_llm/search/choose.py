"""The search: estimate every setting, compile the best, rank them by the time of a step.

What cannot fit is discarded by arithmetic. Of the rest the fastest by estimate is compiled first, and so on, until the
next cannot beat the best that fits, or a dozen are. Those are ranked by the compiler's own figures in the same
roofline.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.errors import InputError
from jaxopt_llm.kernels.attention import KERNELS
from jaxopt_llm.model.attention import kernel_head_dim
from jaxopt_llm.parallel.mesh import MeshConfig
from jaxopt_llm.search.attention import settled
from jaxopt_llm.search.footprint import Footprint, footprint
from jaxopt_llm.search.resting import Resting, resting
from jaxopt_llm.search.roofline import Cluster, Sent, StepTime, Work, step_time
from jaxopt_llm.search.walk import mesh_problems, meshes, walk
from jaxopt_llm.search.workload import workload
from jaxopt_llm.validation import validate

DOZEN = 12  # settings that are compiled at most
# How far the arithmetic may be off: what is estimated to fit but for the one is compiled, and so is what would win if
# it were faster by the other.
MEMORY_SLACK, TIME_SLACK = 0.05, 0.03
# Of a GPU's memory: where a program needs more, XLA computes things again on its own, at a cost that only compiling
# shows, and takes twice as long to compile. Such settings are taken where there are no others.
RECOMPUTED_FROM = 0.76


class Compiled(Protocol):
    """What the search reads of a compiled program: see plan.py."""

    @property
    def spare(self) -> int: ...
    @property
    def flops(self) -> int: ...
    @property
    def collectives(self) -> Sequence[Sent]: ...
    @property
    def pcie_bytes(self) -> int: ...
    @property
    def memory(self) -> Any: ...
    @property
    def model_flops(self) -> float: ...


CompileAll = Callable[[Sequence[TrainConfig]], Iterable[Compiled]]


@dataclass(frozen=True)
class Candidate:
    """A setting, and what arithmetic says of it."""

    config: TrainConfig
    footprint: Footprint
    work: Work
    time: StepTime


@dataclass(frozen=True)
class Choice:
    """A candidate that was compiled. time: by the compiler's figures."""

    candidate: Candidate
    plan: Compiled
    time: StepTime

    @property
    def config(self) -> TrainConfig:
        return self.candidate.config

    @property
    def fits(self) -> bool:
        return self.plan.spare >= 0


@dataclass(frozen=True)
class Search:
    """illegal: meshes of these GPUs on which no setting is, and why. candidates: all others, fastest first.
    choices: those that were compiled, those that fit before the others, each fastest first; limit: bytes of each GPU
    up to which the arithmetic takes a setting."""

    recipe: TrainConfig
    cluster: Cluster
    limit: int
    illegal: dict[MeshConfig, list[str]]
    candidates: tuple[Candidate, ...]
    choices: tuple[Choice, ...]

    @property
    def winner(self) -> Choice | None:
        return next((choice for choice in self.choices if choice.fits), None)

    def may_fit(self, candidate: Candidate) -> bool:
        return candidate.footprint.peak <= self.limit


def estimate(config: TrainConfig, cluster: Cluster, rests: Resting) -> Candidate:
    known = settled(config, cluster.chip.compute_capability)
    work = workload(known, rests, cluster)
    time = step_time(work, cluster.chip, config.precision.compute_dtype)
    return Candidate(config, footprint(known, rests), work, time)


def estimate_all(
    config: TrainConfig, cluster: Cluster, allowed: tuple[str, ...], lean: bool = False
) -> tuple[Candidate, ...]:
    """What is walked on all meshes, and the recipe itself where it is for as many GPUs; fastest first."""
    known: dict[Any, Resting | None] = {}
    found: dict[TrainConfig, Candidate] = {}

    def add(each: TrainConfig) -> None:
        kinds = (each.optimizer, each.precision.compute_dtype)
        key = (each.mesh, each.pipeline, each.sharding.zero_stage, each.offload, *kinds)
        if key not in known:
            known[key] = resting(each)
        if rests := known[key]:
            found[each] = estimate(each, cluster, rests)

    for mesh in meshes(config, cluster):
        for each in walk(config, mesh, allowed, lean):
            if each.training.attention == config.training.attention or _attends(each, cluster):
                add(each)
    if config.mesh.devices == cluster.devices and config not in found:
        add(config)
    return tuple(sorted(found.values(), key=lambda each: (each.time.total, each.footprint.peak)))


def _attends(config: TrainConfig, cluster: Cluster) -> bool:
    """Whether these GPUs have the kernel."""
    kernel = KERNELS[config.training.attention]
    dtype, capability = config.precision.compute_dtype, cluster.chip.compute_capability
    return not kernel.problems(kernel_head_dim(config.model), dtype, capability)


def search(
    config: TrainConfig,
    cluster: Cluster,
    limit: int,
    allowed: tuple[str, ...],
    compile_all: CompileAll,
    at_once: int = 1,
) -> Search:
    """limit: bytes that XLA may use of each GPU. compile_all: compiles up to `at_once` settings side by side. Raises
    InputError where no setting is legal."""
    illegal = {mesh: found for mesh in meshes(config, cluster) if (found := mesh_problems(config, mesh))}
    candidates = estimate_all(config, cluster, allowed)
    if not candidates:
        raise InputError(
            f"no mesh of {cluster.hosts} × {cluster.gpus_per_host} GPUs is legal for this recipe, for instance "
            f"{next(iter(illegal.values()))[0]}"
        )
    roomy = int(RECOMPUTED_FROM * cluster.chip.memory_bytes)
    if any(each.footprint.peak <= roomy for each in candidates):
        limit = min(limit, roomy)
    choices = _compile_best(config, candidates, cluster, limit, compile_all, at_once)
    ranked = sorted(choices, key=lambda choice: (not choice.fits, choice.time.total))
    return Search(config, cluster, limit, illegal, candidates, tuple(ranked))


def _compile_best(
    recipe: TrainConfig,
    candidates: Sequence[Candidate],
    cluster: Cluster,
    limit: int,
    compile_all: CompileAll,
    at_once: int,
) -> list[Choice]:
    choices: list[Choice] = []

    def is_hopeless(candidate: Candidate) -> bool:
        """Whether one alike, estimated to need no more, turned out not to fit."""
        return any(
            not choice.fits
            and (choice.config.mesh, choice.config.sharding) == (candidate.config.mesh, candidate.config.sharding)
            and choice.candidate.footprint.peak <= candidate.footprint.peak
            for choice in choices
        )

    def promising() -> Iterator[Candidate]:
        """The recipe, to compare with; then what may win by what is known when it is asked for."""
        yield from (each for each in candidates if each.config == recipe)
        for each in candidates:
            best = min((choice.time.total for choice in choices if choice.fits), default=float("inf"))
            if each.time.total * (1 - TIME_SLACK) > best:
                return
            fits = each.footprint.peak <= limit * (1 + MEMORY_SLACK)
            if fits and each.config != recipe and not is_hopeless(each) and _is_valid(each.config):
                yield each

    def try_out(some: Sequence[Candidate]) -> None:
        plans = compile_all([each.config for each in some])
        choices.extend(_measured(each, cluster, plan) for each, plan in zip(some, plans, strict=True))

    following = promising()
    while some := [*itertools.islice(following, min(at_once, DOZEN - len(choices)))]:
        try_out(some)
    if not any(choice.fits for choice in choices):
        by_need = sorted(candidates, key=lambda each: each.footprint.peak)
        least = next(each for each in by_need if _is_valid(each.config))
        if all(choice.candidate is not least for choice in choices):
            try_out([least])
    return choices


def _is_valid(config: TrainConfig) -> bool:
    """Beyond what `walk` looks at: whether `train` would take it."""
    try:
        validate(config)
    except InputError:
        return False
    return True


def _measured(candidate: Candidate, cluster: Cluster, plan: Compiled) -> Choice:
    """With the compiler's products, collectives and copies in place of the arithmetic's."""
    work = candidate.work
    flops = max(plan.flops - work.attention_flops, 0.0)
    beside = min(work.pcie_beside, plan.pcie_bytes)
    work = replace(work, flops=flops, sent=tuple(plan.collectives), pcie_bytes=plan.pcie_bytes, pcie_beside=beside)
    return Choice(candidate, plan, step_time(work, cluster.chip, candidate.config.precision.compute_dtype))
