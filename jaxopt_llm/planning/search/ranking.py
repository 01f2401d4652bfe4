"""Search for the fastest settings: estimate all, compile the best, and rank them by the time of a step.

Arithmetic discards the settings that cannot fit. The others are compiled in the order of their estimated time, until
the next ones differ from the best that fits only by the estimate's error (`is_settled`), or MAX_COMPILED have been
compiled. They are then ranked by the time that `plan` reads off the compiled program.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from jaxopt_llm.config import Config, MeshConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.kernels.attention import find_unsupported
from jaxopt_llm.planning.breakdown import sum_by_cause
from jaxopt_llm.planning.exchanges import resolve_expert_exchange
from jaxopt_llm.planning.free_memory import add_slack, leave_free
from jaxopt_llm.planning.search.attention_cost import resolve_attention
from jaxopt_llm.planning.search.footprint import Footprint, compute_footprint
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.planning.search.roofline import (
    Cluster,
    StepTime,
    Transfer,
    Work,
    compute_link_time,
    compute_step_time,
)
from jaxopt_llm.planning.search.setting_space import enumerate_meshes, enumerate_settings, list_mesh_problems
from jaxopt_llm.planning.search.state_sizes import StateSizes, compute_state_sizes
from jaxopt_llm.planning.search.workload import estimate_work
from jaxopt_llm.step.local_steps import has_groups
from jaxopt_llm.step.program import describe_attention
from jaxopt_llm.step.validation import validate

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


MAX_COMPILED = 12  # settings
# Share of a GPU's memory that an optimizer on the host must free. A setting that needs less of it fits with a smaller
# microbatch, and moves nothing between host and device.
MIN_FREED_SHARE = 1 / 16
MAX_HOSTS_TRIED = 32  # numbers of hosts that are tried if no mesh of the given ones is legal


class CompiledPlan(Protocol):
    """Figures of a compiled program that the search of any model reads (step_plan.Plan, engine.plan.EnginePlan)."""

    @property
    def limit(self) -> int: ...
    @property
    def spare(self) -> int: ...
    @property
    def collectives(self) -> Sequence[Transfer]: ...
    @property
    def memory(self) -> Any: ...


CompileAll = Callable[[Sequence[Config]], Iterable[CompiledPlan]]


@dataclass(frozen=True)
class Candidate:
    """Setting with its estimated memory, work and time.

    Work and time are computed when they are read: a search needs them only of settings that may fit. Only the time is
    kept, because the work of all settings would take a gigabyte.

    resolved: the setting with the attention and the experts' exchange of these GPUs.
    unit: what a step trains on: tokens of the decoder, rows of a user's model (engine/search.py).
    """

    unit: ClassVar[str] = "tokens"

    config: Config
    resolved: Config
    cluster: Cluster
    state: StateSizes
    footprint: Footprint

    @property
    def has_buffers(self) -> bool:
        """True if experts exchange tokens in buffers, whose size `sharding.expert_room` sets."""
        is_exchanged = bool(self.config.model.moe.experts) and self.config.mesh.expert > 1
        return is_exchanged and self.resolved.sharding.expert_exchange != "gather"

    @property
    def work(self) -> Work:
        return estimate_work(self.resolved, self.state, self.cluster)

    @functools.cached_property
    def time(self) -> StepTime:
        return compute_step_time(self.work, self.cluster.chip, self.config.precision.compute_dtype)

    @property
    def units(self) -> int:
        """Tokens, or rows, of a step over all GPUs, with padding."""
        return self.config.training.batch_size * self.config.training.sequence_length

    @property
    def kind(self) -> Hashable:
        """Settings whose estimates err alike: the error with pipeline stages differs from the error without."""
        return self.config.mesh.pipeline > 1

    @property
    def is_valid(self) -> bool:
        return is_valid(self.config)

    def count_model_flops(self, plan: Any) -> float:
        """Return the FLOPs that each GPU needs in a step. plan: of the compiled program."""
        return float(plan.model_flops)

    def compute_compiled_time(self, plan: Any) -> StepTime:
        """Return the time by the parts of the compiled program."""
        return sum_by_cause(plan.speed.breakdown, plan.idle)


@dataclass(frozen=True)
class CompiledCandidate:
    """Candidate that was compiled, with the time that its program takes."""

    candidate: Candidate
    plan: CompiledPlan
    time: StepTime

    @property
    def config(self) -> Config:
        return self.candidate.config

    @property
    def fits(self) -> bool:
        return self.plan.spare >= 0

    @property
    def is_roomy(self) -> bool:
        """True if it leaves as much memory free as a run demands of the settings that it chooses."""
        return self.plan.spare >= self.plan.limit - leave_free(self.plan.limit)

    @property
    def network_share(self) -> float:
        """Share of the step in which the GPUs wait for the network between hosts."""
        between_hosts = [each for each in self.plan.collectives if each.link == "network"]
        return compute_link_time(between_hosts, math.inf, math.inf).exposed / self.time.total


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    limit: largest estimate of bytes of each GPU with which a setting is kept.
    illegal: meshes of these GPUs without any legal setting, with the reasons.
    candidates: all legal settings: those that may fit, fastest first, then the others, smallest first.
    compiled: the candidates that were compiled. First come those that leave memory free, then the others that fit;
        each group is ordered by time.
    """

    recipe: Config
    cluster: Cluster
    limit: int
    illegal: dict[MeshConfig, list[str]]
    candidates: tuple[Candidate, ...]
    compiled: tuple[CompiledCandidate, ...]

    @property
    def unit(self) -> str:
        return self.compiled[0].candidate.unit

    @property
    def winner(self) -> CompiledCandidate | None:
        return next((candidate for candidate in self.compiled if candidate.fits), None)

    def may_fit(self, candidate: Candidate) -> bool:
        return candidate.footprint.peak <= self.limit


def estimate(config: Config, cluster: Cluster, state: StateSizes) -> Candidate:
    """Estimate memory, work and time of a setting."""
    resolved = resolve_expert_exchange(resolve_attention(config, cluster.chip.compute_capability), cluster)
    return Candidate(config, resolved, cluster, state, compute_footprint(resolved, state))


def estimate_all(
    config: Config, cluster: Cluster, allowed: tuple[str, ...], lean: bool = False
) -> tuple[Candidate, ...]:
    """Estimate the settings of all meshes, and the recipe itself if it is for as many GPUs."""
    states: dict[Any, StateSizes | None] = {}
    found: list[Candidate] = []

    def add(setting: Config) -> None:
        passes = Passes.from_config(setting)  # stages that hold as many layers have the same sizes, however they run
        layers = tuple((kind, number * passes.chunks) for kind, number in passes.kinds)
        kinds = (setting.optimizer, setting.precision.compute_dtype)
        divided = setting.sharding.zero_stage, setting.sharding.optimizer_over_data, has_groups(setting)
        key = (setting.mesh, layers, *divided, setting.offload, *kinds)
        if key not in states:
            states[key] = compute_state_sizes(setting)
        state = states[key]
        offloads = setting.offload.optimizer and not (config.offload.optimizer or lean)
        if state and not (offloads and state.host < MIN_FREED_SHARE * cluster.chip.memory_bytes):
            candidate = estimate(setting, cluster, state)
            if candidate.has_buffers or setting.sharding.expert_room == config.sharding.expert_room:
                found.append(candidate)

    for mesh in enumerate_meshes(config, cluster):
        for setting in enumerate_settings(config, mesh, allowed, lean):
            if setting.training.attention == config.training.attention or _has_kernel(setting, cluster):
                add(setting)
    if config.mesh.devices == cluster.devices and all(candidate.config != config for candidate in found):
        add(config)
    return tuple(found)


def order_candidates(candidates: Sequence[Candidate], limit: float) -> tuple[Candidate, ...]:
    """Return the candidates that need at most `limit` bytes, fastest first, then the others, smallest first."""
    fitting = [candidate for candidate in candidates if candidate.footprint.peak <= limit]
    others = [candidate for candidate in candidates if candidate.footprint.peak > limit]
    fitting.sort(key=lambda candidate: (candidate.time.total, candidate.footprint.peak))
    others.sort(key=lambda candidate: candidate.footprint.peak)
    return (*fitting, *others)


def _has_kernel(config: Config, cluster: Cluster) -> bool:
    """Return whether the setting's attention kernel supports these GPUs."""
    unsupported = find_unsupported(describe_attention(config), cluster.chip.compute_capability)
    return not unsupported[config.training.attention]


def estimate_legal(
    config: Config, cluster: Cluster, allowed: tuple[str, ...]
) -> tuple[dict[MeshConfig, list[str]], tuple[Candidate, ...]]:
    """Return the meshes without a legal setting, with the reasons, and the estimates of all legal settings.

    Raises:
        InputError: no setting is legal.
    """
    illegal = {mesh: found for mesh in enumerate_meshes(config, cluster) if (found := list_mesh_problems(config, mesh))}
    candidates = estimate_all(config, cluster, allowed)
    if not candidates:
        hosts = _find_legal_hosts(config, cluster)
        raise InputError(
            f"no mesh of {cluster.hosts} × {cluster.gpus_per_host} GPUs is legal for this recipe, for example "
            f"{next(iter(illegal.values()))[0]}" + (f"; --hosts {hosts} works" if hosts else "")
        )
    return illegal, candidates


def search_settings(
    config: Config,
    cluster: Cluster,
    limit: int,
    allowed: tuple[str, ...],
    compile_all: CompileAll,
    at_once: int = 1,
) -> SearchResult:
    """Find the fastest settings of a recipe on a cluster.

    Args:
        limit: bytes of each GPU that XLA may use.
        allowed: fields that may also change (`fields.SEARCHED`).
        compile_all: compiles up to `at_once` settings in parallel.

    Raises:
        InputError: no setting is legal.
    """
    illegal, candidates = estimate_legal(config, cluster, allowed)
    return rank_settings(config, cluster, limit, illegal, candidates, compile_all, at_once)


def rank_settings(
    config: Config,
    cluster: Cluster,
    limit: int,
    illegal: dict[MeshConfig, list[str]],
    candidates: Sequence[Candidate],
    compile_all: CompileAll,
    at_once: int = 1,
) -> SearchResult:
    """Compile the best of the estimated settings, and rank them.

    Args:
        limit: bytes of each GPU that XLA may use.
        illegal, candidates: of `estimate_legal`.
        compile_all: compiles up to `at_once` settings in parallel.
    """
    roomy = leave_free(limit)
    if any(candidate.footprint.peak <= roomy for candidate in candidates):
        limit = min(limit, roomy)
    candidates = order_candidates(candidates, add_slack(limit))
    compiled = _compile_best(config, candidates, limit, compile_all, at_once)
    return SearchResult(config, cluster, limit, illegal, candidates, order_compiled(compiled))


def order_compiled(compiled: Iterable[CompiledCandidate]) -> tuple[CompiledCandidate, ...]:
    """Return the compiled settings that leave memory free, then those that fit, then the others, each fastest first."""
    return tuple(sorted(compiled, key=lambda each: (not each.is_roomy, not each.fits, each.time.total)))


def _find_legal_hosts(config: Config, cluster: Cluster) -> int | None:
    """Return the nearest number of hosts on which a mesh is legal for the recipe; None: there is none near."""
    others = [hosts for hosts in range(1, 2 * cluster.hosts + 1) if hosts != cluster.hosts]
    for hosts in sorted(others, key=lambda hosts: abs(hosts - cluster.hosts))[:MAX_HOSTS_TRIED]:
        meshes = enumerate_meshes(config, replace(cluster, hosts=hosts))
        if any(not list_mesh_problems(config, mesh) for mesh in meshes):
            return hosts
    return None


def _compile_best(
    recipe: Config, candidates: Sequence[Candidate], limit: int, compile_all: CompileAll, at_once: int
) -> list[CompiledCandidate]:
    compiled: list[CompiledCandidate] = []

    def suffices(candidate: CompiledCandidate) -> bool:
        return candidate.plan.spare >= candidate.plan.limit - limit

    def is_hopeless(candidate: Candidate) -> bool:
        """Return whether a similar setting, estimated to need no more memory, needed too much."""
        return any(
            not suffices(other)
            and (other.config.mesh, other.config.sharding) == (candidate.config.mesh, candidate.config.sharding)
            and other.candidate.footprint.peak <= candidate.footprint.peak
            for other in compiled
        )

    def is_slower(candidate: Candidate) -> bool:
        """Return whether what has been compiled shows that the candidate is hardly faster than the best."""
        measured = [other for other in compiled if suffices(other)]
        alike = [other for other in measured if other.candidate.kind == candidate.kind]
        times = [(other.candidate.time.total, other.time.total) for other in alike or measured]
        if times and not alike:  # others tell little of its error: its estimate may be right, too
            times.append((1.0, 1.0))
        return bool(times) and is_settled(candidate.time.total, times, min(other.time.total for other in measured))

    def list_promising() -> Iterator[Candidate]:
        """Yield the recipe for comparison, then the candidates that may win by what has been compiled so far."""
        yield from (candidate for candidate in candidates if candidate.config == recipe)
        fitting = (candidate for candidate in candidates if candidate.footprint.peak <= add_slack(limit))
        for candidate in fitting:
            rejected = candidate.config == recipe or is_slower(candidate) or is_hopeless(candidate)
            if not rejected and candidate.is_valid:
                yield candidate

    def compile_some(some: Sequence[Candidate]) -> None:
        plans = compile_all([candidate.config for candidate in some])
        compiled.extend(measure(candidate, plan) for candidate, plan in zip(some, plans, strict=True))

    promising = list_promising()
    while some := [*itertools.islice(promising, min(at_once, MAX_COMPILED - len(compiled)))]:
        compile_some(some)
    if not any(candidate.fits for candidate in compiled):
        by_memory = order_candidates(candidates, 0)
        least = next(candidate for candidate in by_memory if candidate.is_valid)
        if all(other.candidate is not least for other in compiled):
            compile_some([least])
    return compiled


def is_valid(config: Config) -> bool:
    """Return whether `train` accepts a setting; `enumerate_settings` does not check everything."""
    try:
        validate(config)
    except InputError:
        return False
    return True


def measure(candidate: Candidate, plan: CompiledPlan) -> CompiledCandidate:
    """Return a candidate with the time of its compiled program."""
    return CompiledCandidate(candidate, plan, candidate.compute_compiled_time(plan))
