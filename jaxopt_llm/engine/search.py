"""Search for the fastest settings of an engine on GPUs that need not exist.

The search is `plan --search`'s (planning/search/ranking.py): arithmetic discards and orders settings, and the
compiler decides. What differs is where the arithmetic comes from: the trace of the user's loss gives the
FLOPs, and the bytes that grow with the rows; the shardings give all that concerns parameters. Compiled settings are
ranked by the time that `Engine.plan` prints.

`LossCost` has the FLOPs of a user's loss and its gradients, and the bytes that kernels move and hold. What rows add to
a value is found by a second trace with twice as many rows. Weights and their gradients do not grow, so that they cost
nothing here: ZeRO decides where they are (`count_state`).

An array is in memory if a product, a reduction or a loop makes it, or if one of these reads it. XLA fuses everything
else into the kernels that read it, which compute it from the arrays before it; only where several equations read a
value and it is smaller than these arrays, it is kept itself. The most that these arrays hold at any moment is less than
XLA holds, which schedules for time. So the figure may discard no setting that fits.
"""

import collections
import functools
import itertools
import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxopt_llm.config import Config, MeshConfig
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.unread import find_unread
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.jaxpr import follow_values, split_scan, typeof
from jaxopt_llm.engine.checks import NOT_READ, READ
from jaxopt_llm.engine.microbatches import Microbatches, with_rows
from jaxopt_llm.engine.plan import EnginePlan, change_rows, plan_job
from jaxopt_llm.engine.program import (
    EngineProgram,
    Job,
    differentiate_user_model,
    is_open,
    make_engine_program,
    make_placement,
)
from jaxopt_llm.engine.row_coupling import check_loss_over
from jaxopt_llm.execution.trace import PRODUCTS, VIEWS, list_contracted
from jaxopt_llm.execution.weight_uses import drop_results
from jaxopt_llm.kernels.attention import SCOPE
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.mesh import make_abstract_mesh
from jaxopt_llm.planning.breakdown import sum_by_cause
from jaxopt_llm.planning.free_memory import count_chip_bytes
from jaxopt_llm.planning.search import report
from jaxopt_llm.planning.search.footprint import Footprint
from jaxopt_llm.planning.search.microbatch import BYTES
from jaxopt_llm.planning.search.ranking import Candidate, SearchResult, rank_settings
from jaxopt_llm.planning.search.roofline import Cluster, StepTime, Transfer, Work
from jaxopt_llm.planning.search.setting_space import enumerate_meshes, list_divisors, list_variants, list_zero_stages
from jaxopt_llm.planning.search.state_sizes import StateSizes, count_state
from jaxopt_llm.planning.search.transfers import list_transfer
from jaxopt_llm.step.program import take_share
from jaxopt_llm.step.state import TrainState
from jaxopt_llm.step.update import has_shares

# Operations, as prefixes of their names, that make an array of their own.
MAKERS = (
    *("reduce_", "argm", "cum", "sort", "top_k", "fft"),
    *("dynamic_update_slice", "select_and_", "random_", "threefry", "pallas_call", "custom_call"),
    *("cholesky", "triangular_solve", "eigh", "svd", "qr", "lu"),
)
CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr", "body_jaxpr")


@dataclass(frozen=True)
class LossCost:
    """Cost of the loss and its gradients of a whole batch on one device.

    flops: of products and convolutions.
    moved: bytes that the kernels between them read and write.
    held: bytes of the arrays at the moment when most are alive.
    summed: bytes of the products that contract a dimension which `tensor` divides: it sums them over its devices.
    """

    flops: float
    moved: float
    held: float
    summed: float


def count_cost(closed: ClosedJaxpr, doubled: ClosedJaxpr, divided: Sequence[frozenset[int]]) -> LossCost:
    """Return the cost of a function of a batch.

    Args:
        closed: its jaxpr.
        doubled: that for twice as many rows. If its equations are others, nothing is known of the bytes.
        divided: the dimensions of each argument that `tensor` divides.
    """
    growth = dict(_pair_sizes(closed.jaxpr, doubled.jaxpr)) if _are_alike(closed.jaxpr, doubled.jaxpr) else {}
    walk = _Walk(growth)
    arguments = [
        replace(walk.make(growth.get(var, 0)), divided=dims)
        for var, dims in zip(closed.jaxpr.invars, divided, strict=True)
    ]
    for value in walk.run(closed.jaxpr, arguments):
        walk.read(value)
    return LossCost(walk.flops, walk.moved, walk.find_most_held(), walk.summed)


def _list_inner(eqn: JaxprEqn) -> list[Jaxpr]:
    found = [value for name in CALLS if (value := eqn.params.get(name)) is not None] or eqn.params.get("branches", ())
    return [each.jaxpr if isinstance(each, ClosedJaxpr) else each for each in found]


def _are_alike(one: Jaxpr, other: Jaxpr) -> bool:
    """Return whether two jaxprs have the same equations, whatever their shapes."""
    pairs = [*zip(one.eqns, other.eqns, strict=False)]
    return (len(one.eqns), len(one.invars)) == (len(other.eqns), len(other.invars)) and all(
        first.primitive.name == second.primitive.name
        and len(first.outvars) == len(second.outvars)
        and all(map(_are_alike, _list_inner(first), _list_inner(second)))
        for first, second in pairs
    )


def _pair_sizes(one: Jaxpr, other: Jaxpr) -> Iterator[tuple[Any, int]]:
    """Yield the variables of a jaxpr, and how many bytes larger each is in a second jaxpr of the same form."""
    yield from zip(one.invars, map(_count_growth, one.invars, other.invars), strict=True)
    for first, second in zip(one.eqns, other.eqns, strict=True):
        yield from zip(first.outvars, map(_count_growth, first.outvars, second.outvars), strict=True)
        for inner, larger in zip(_list_inner(first), _list_inner(second), strict=True):
            yield from _pair_sizes(inner, larger)


def _count_growth(var: Any, larger: Any) -> int:
    return max(_count_bytes(larger) - _count_bytes(var), 0)


def _count_bytes(atom: Any) -> int:
    aval = typeof(atom)
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


@dataclass(eq=False)
class _Array:
    """An array in memory. born, read: the moments when it is made, and when it is read last. held: its bytes then."""

    bytes: float
    held: float
    born: int
    last: int


@dataclass(frozen=True)
class _Value:
    """A value: the arrays that it is computed from.

    is_array: whether it is one of them, in some form.
    divided: its dimensions that `tensor` divides, if it is a parameter.
    """

    arrays: frozenset[_Array] = frozenset()
    is_array: bool = True
    divided: frozenset[int] = frozenset()

    @property
    def bytes(self) -> float:
        return sum(each.bytes for each in self.arrays)


@dataclass
class _Walk:
    """Walks the equations of a jaxpr in order, those of inner calls in place of the calls.

    growth: bytes of each variable that count.
    times: how often the current equation runs.
    """

    growth: Mapping[Any, float]
    flops: float = 0.0
    moved: float = 0.0
    summed: float = 0.0
    now: int = 0
    times: int = 1
    arrays: list[_Array] = field(default_factory=list)

    def make(self, size: float, held: float | None = None) -> _Value:
        """Return a new array."""
        self.arrays.append(_Array(size, size if held is None else held, self.now, self.now))
        return _Value(frozenset(self.arrays[-1:]) if size else frozenset())

    def read(self, value: _Value) -> None:
        for each in value.arrays:
            each.last = max(each.last, self.now)

    def write(self, value: _Value, size: float) -> _Value:
        """Return a value as an array, which a kernel writes if it is not in memory."""
        self.read(value)
        if value.is_array or not size:
            return value
        self.moved += self.times * (size + value.bytes)
        return self.make(size)

    def find_most_held(self) -> float:
        changes: dict[int, float] = collections.defaultdict(float)
        for each in self.arrays:
            changes[each.born] += each.held
            changes[each.last + 1] -= each.held
        alive = most = 0.0
        for moment in sorted(changes):
            alive += changes[moment]
            most = max(most, alive)
        return most

    def run(self, jaxpr: Jaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        """Return the results of a jaxpr."""
        readers = collections.Counter(
            atom for eqn in jaxpr.eqns for atom in {*map(_as_key, eqn.invars)} if atom is not None
        )

        def apply(eqn: JaxprEqn, inputs: list[_Value]) -> Iterator[_Value]:
            self.now += 1
            for var, value in zip(eqn.outvars, self._apply(eqn, inputs), strict=True):
                size = self.growth.get(var, 0)
                is_shared = readers[var] > 1 and value.bytes > size
                yield self.write(value, size) if is_shared else value

        return follow_values(jaxpr, arguments, apply, _Value())

    def _apply(self, eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        sizes = [self.growth.get(var, 0) for var in eqn.outvars]
        if name == "scan":
            return self._scan(eqn, inputs, sizes)
        inner = _list_inner(eqn)
        if inner and len(inner[-1].outvars) == len(sizes) and len(inner[-1].invars) <= len(inputs):
            return self.run(inner[-1], inputs[len(inputs) - len(inner[-1].invars) :])  # a condition comes first
        if name in (*PRODUCTS, "conv_general_dilated"):
            self.flops += self.times * _count_flops(eqn)
            contracted = zip(inputs, list_contracted(eqn), strict=False)
            self.summed += self.times * sum(sizes) * any(value.divided & {*dims} for value, dims in contracted)
            inputs = [
                self.write(value, self.growth.get(_as_key(atom), 0))
                for atom, value in zip(eqn.invars, inputs, strict=True)
            ]
        elif name.startswith(MAKERS) and name != "reduce_precision":
            self.moved += self.times * (sum(sizes) + sum(value.bytes for value in inputs))
        else:
            arrays = frozenset[_Array]().union(*(value.arrays for value in inputs))
            is_array = name in VIEWS and all(value.is_array for value in inputs) and len(arrays) == 1
            divided = _follow_dimensions(eqn, inputs[0].divided) if inputs else frozenset()
            return [_Value(arrays if size else frozenset(), is_array, divided) for size in sizes]
        for value in inputs:
            self.read(value)
        in_kernel = SCOPE in str(eqn.source_info.name_stack).split("/")
        return [self.make(0 if in_kernel else size) for size in sizes]

    def _scan(self, eqn: JaxprEqn, inputs: list[_Value], sizes: list[float]) -> list[_Value]:
        """Run the body of a loop once. What it carries and stacks is in memory while the loop runs."""
        (body,), (constants, carried) = _list_inner(eqn), split_scan(eqn)
        inputs = [
            self.write(value, self.growth.get(_as_key(atom), 0)) for atom, value in zip(eqn.invars, inputs, strict=True)
        ]
        results = [self.make(size) for size in sizes]
        slices = [
            replace(self.make(self.growth.get(var, 0), held=0), divided=frozenset(dim - 1 for dim in stack.divided))
            for var, stack in zip(body.invars[constants + carried :], inputs[constants + carried :], strict=True)
        ]
        self.times *= eqn.params["length"]
        made = self.run(body, [*inputs[:constants], *results[:carried], *slices])
        for var, value in zip(body.outvars, made, strict=True):  # written to where they are carried and stacked
            self.read(value)
            self.moved += self.times * (not value.is_array) * (self.growth.get(_as_key(var), 0) + value.bytes)
        self.times //= eqn.params["length"]
        for value in (*inputs, *results):
            self.read(value)
        return results


def _as_key(atom: Any) -> Any:
    return None if isinstance(atom, Literal) else atom


def _count_flops(eqn: JaxprEqn) -> float:
    """Return the FLOPs of a product or a convolution; zeros between the values of a dilated input do not count."""
    right, result = typeof(eqn.invars[1]).shape, math.prod(typeof(eqn.outvars[0]).shape)
    zeros = math.prod(eqn.params.get("lhs_dilation", ()))
    return 2 * result * math.prod(right[dim] for dim in list_contracted(eqn)[1]) / zeros


def _follow_dimensions(eqn: JaxprEqn, dims: frozenset[int]) -> frozenset[int]:
    """Return where dimensions of the first operand are in the result; nothing if the equation changes the shape."""
    if dims and eqn.primitive.name == "transpose":
        return frozenset(position for position, dim in enumerate(eqn.params["permutation"]) if dim in dims)
    is_same = dims and typeof(eqn.invars[0]).shape == typeof(eqn.outvars[0]).shape
    return dims if is_same else frozenset()


@dataclass(frozen=True)
class EngineSearch:
    """The settings that a search compiled. `print(found)` shows them as a table, the fastest that fits first.

    Attributes:
        config: the fastest that fits, for `initialize`; None if nothing fits.
        plan: its plan, or that of the compiled setting that lacks least memory.
    """

    result: SearchResult
    seconds: float

    @property
    def config(self) -> Config | None:
        return self.result.winner.config if self.result.winner else None

    @property
    def plan(self) -> EnginePlan:
        if self.result.winner:
            plan = self.result.winner.plan
        else:
            plan = max((each.plan for each in self.result.compiled), key=lambda plan: plan.spare)
        assert isinstance(plan, EnginePlan)
        return plan

    def __str__(self) -> str:
        return report.format_table(self.result, self.seconds)


@dataclass(frozen=True)
class EngineCandidate(Candidate):
    """Setting of an engine.

    cost: of its loss, with the policy of the setting. needed: of the loss as it is written.
    """

    unit: ClassVar[str] = "rows"
    job: Job
    cost: LossCost
    needed: LossCost

    @property
    def units(self) -> int:
        return self.config.training.batch_size

    @property
    def kind(self) -> Hashable:
        """Settings whose estimates err alike: what is kept, and when weights move, decide what XLA fuses and hides."""
        return self.config.sharding.zero_stage, self.config.remat.policy, self.config.mesh.tensor > 1

    @property
    def is_valid(self) -> bool:
        return not _find_problem(self.job)

    def count_model_flops(self, plan: Any) -> float:
        return self.needed.flops / self.config.mesh.devices

    def compute_compiled_time(self, plan: EnginePlan) -> StepTime:
        return sum_by_cause(plan.breakdown)

    @property
    def work(self) -> Work:
        state, accumulation = self.state, self.config.training.accumulation
        weights, gradients = state.layers + state.non_layer, _count_gradient_bytes(self.config, state)
        # Weights are cast and written whole forward and backward; gradients are written, and read for their reduction.
        streamed = self.cost.moved / self.config.mesh.devices
        streamed += 4 * accumulation * BYTES[self.config.precision.compute_dtype] * weights.weights
        streamed += 2 * accumulation * BYTES[self.config.precision.reduce_dtype] * weights.trained
        streamed += (accumulation > 1) * 2 * accumulation * gradients
        # The update reads and writes the train state, and reads the gradients twice: first for their norm.
        streamed += 2 * (state.parameters + state.optimizer + state.host) + 8 * weights.masters
        return Work(
            flops=self.cost.flops / self.config.mesh.devices,
            repeated_flops=(self.cost.flops - self.needed.flops) / self.config.mesh.devices,
            bytes=streamed,
            transfers=tuple(_list_transfers(self.config, self.state, self.cluster, self.cost)),
            pcie_bytes=2 * state.host,
        )


def search_engine(job: Job, cluster: Cluster, rows: int | None, allowed: Sequence[str] = ()) -> EngineSearch:
    """Compile the best settings of a job for these GPUs; see Engine.search.

    Raises:
        InputError: no setting is legal, or a field of `allowed` changes nothing.
    """
    clock = time.perf_counter()
    job = change_rows(job, rows)
    _check_allowed(job, allowed)
    space = _Space(job, cluster, tuple(allowed))
    candidates = space.list_candidates()

    def compile_all(configs: Sequence[Config]) -> Iterator[EnginePlan]:
        return (plan_job(replace(job, config=config), cluster) for config in configs)

    limit = count_chip_bytes(cluster.chip)
    result = rank_settings(job.config, cluster, limit, space.illegal, candidates, compile_all)
    return EngineSearch(result, time.perf_counter() - clock)


@dataclass(eq=False)
class _Space:
    """The legal settings of a job.

    illegal: meshes without any, with the reasons.
    """

    job: Job
    cluster: Cluster
    allowed: tuple[str, ...]
    illegal: dict[MeshConfig, list[str]] = field(default_factory=dict)

    @functools.cached_property
    def meshes(self) -> list[MeshConfig]:
        """The meshes of the axes that an engine has, on which its loss can be divided."""
        found = []
        for mesh in enumerate_meshes(self.job.config, self.cluster):
            divides = mesh.tensor == 1 or any(self.job.rules.values())
            if divides and mesh.pipeline == mesh.context == mesh.expert == 1:
                if problem := _find_problem(_with(self.job, mesh=mesh, accumulation=1), division_only=mesh.tensor == 1):
                    self.illegal[mesh] = [problem]
                else:
                    found.append(mesh)
        if not found:
            gpus = f"{self.cluster.hosts} × {self.cluster.gpus_per_host} GPUs"
            raise InputError(f"search: no mesh of {gpus} is legal: {next(iter(self.illegal.values()))[0]}")
        return found

    @functools.cached_property
    def policies(self) -> list[str]:
        """The policies that change something; without any, the one of the job."""
        job = _with(self.job, policy=AUTO)
        program = _make_alone(job)
        if not is_open(program, job):
            return [str(self.job.config.remat.policy)]
        return ["none", *(["save_attention"] if program.model.attention.choices else []), "full"]

    @functools.cached_property
    def may_accumulate(self) -> bool:
        """True if microbatches give the loss of the batch, or if the user accepts that they do not."""
        program = _make_alone(_with(self.job, policy=self.policies[0]))
        try:
            check_loss_over(self.job.loss_over, 2, program.model, self.job.have_rows)
        except InputError:
            return False
        return not self.job.in_one_piece

    def list_candidates(self) -> list[EngineCandidate]:
        """Return all settings with their estimates, and the job's own, if it is for as many GPUs."""
        found = [candidate for mesh in self.meshes for candidate in self.estimate(mesh)]
        config, is_known = self.job.config, any(candidate.config == self.job.config for candidate in found)
        if config.mesh.devices == self.cluster.devices and not is_known and not _find_problem(self.job):
            found.append(self._estimate(self.job, self._count_state(config)))
        return found

    def estimate(self, mesh: MeshConfig) -> Iterator[EngineCandidate]:
        """Yield the settings on a mesh, with their estimates."""
        most = self.job.config.training.batch_size // mesh.batch_shards
        accumulations = list_divisors(most) if self.may_accumulate else [1]
        for variant in list_variants(_with(self.job, mesh=mesh).config, self.allowed):
            for config in _list_divisions(variant):
                divided, state = replace(self.job, config=config), self._count_state(config)
                for policy, accumulation in itertools.product(self.policies, accumulations):
                    job = _with(divided, policy=policy, accumulation=accumulation)
                    if _is_read(job.config):
                        yield self._estimate(job, state)

    def _estimate(self, job: Job, state: StateSizes) -> EngineCandidate:
        config, cost = job.config, self._count_cost(job.config)
        footprint = Footprint(
            parameters=state.parameters,
            optimizer=state.optimizer,
            gradients=_count_gradient_bytes(config, state),
            activations=cost.held / (config.training.accumulation * config.mesh.devices),
            host=state.host,
        )
        needed = self._count_cost(_with(job, policy=self.policies[0]).config)
        return EngineCandidate(config, config, self.cluster, state, footprint, job, cost, needed)

    def _count_state(self, config: Config) -> StateSizes:
        program = self._make_program(config.optimizer, config.precision)
        placement = make_placement(config, make_abstract_mesh(config.mesh))
        return count_state(program.specs, placement, _find_trained(program, self.job))

    def _count_cost(self, config: Config) -> LossCost:
        return self._trace(config.remat.policy, config.precision)

    @functools.cache  # noqa: B019
    def _make_program(self, optimizer: Any, precision: Any) -> EngineProgram:
        config = replace(self.job.config, optimizer=optimizer, precision=precision)
        return _make_alone(_with(replace(self.job, config=config), policy=self.policies[0]))

    @functools.cache  # noqa: B019
    def _trace(self, policy: str, precision: Any) -> LossCost:
        """Return the cost of the loss of all rows on one device."""
        job = _with(replace(self.job, config=replace(self.job.config, precision=precision)), policy=policy)

        def trace(program: EngineProgram) -> Any:
            differentiate = differentiate_user_model(program.model, program.placement)

            def compute_gradients(state: TrainState, batch: Microbatches) -> Any:
                if (trained := _find_trained(program, job)) is not None:
                    state = take_share(state, job.loss_name, trained)
                return differentiate(state, batch, 1.0).gradients

            closed = jax.make_jaxpr(compute_gradients)(program.state, program.batch)
            return drop_results(closed, [True] * len(closed.jaxpr.outvars))  # without what no gradient needs

        rows = 2 * job.config.training.batch_size
        doubled = job.example if job.in_one_piece else with_rows(job.example, rows, job.replicated)
        program = _make_alone(job)
        state, specs = program.state, program.specs
        parameters = jax.tree.leaves((state.masters, state.frozen)), jax.tree.leaves((specs.masters, specs.frozen))
        divided = {id(leaf): _list_divided(spec) for leaf, spec in zip(*parameters, strict=True)}
        dims = [divided.get(id(leaf), frozenset()) for leaf in jax.tree.leaves((state, program.batch))]
        closed = trace(program)
        try:
            larger = trace(_make_alone(replace(job, example=doubled)))
        except Exception:  # the user's loss takes no other number of rows, and nothing is known of its bytes
            larger = closed
        return count_cost(closed, larger, dims)


def _find_trained(program: EngineProgram, job: Job) -> Params | None:
    """Return the specs of the parameters that one of several losses trains; None if there is only one."""
    return program.optimizers[job.loss_name].trained if has_shares(program.optimizers) else None


def _list_divisions(config: Config) -> Iterator[Config]:
    """Yield the configuration with each way to divide and to offload the state on its mesh.

    Ways with which XLA compiles what it does with others are left out: stage 2 divides what stage 1 does, and so does
    `optimizer_over_data`, on another mesh, in stages 0 and 1.
    """
    sharding, over_data = config.sharding, config.mesh.data > 1
    for offloads in (False, True):
        for stage in sorted({*list_zero_stages(config.mesh, offloads, config.sharding.zero_stage)} - {2}):
            differs = stage == 3 or sharding.data_gradients != "exact"
            for divides in (False, True) if over_data and differs else (False,):
                yield replace(
                    config,
                    sharding=replace(sharding, zero_stage=stage, optimizer_over_data=divides),
                    offload=replace(config.offload, optimizer=offloads),
                )


def _list_divided(spec: ParamSpec) -> frozenset[int]:
    """Return the dimensions of a parameter that `tensor` divides."""
    return frozenset(dim for dim, axis in enumerate(spec.axes) if axis == "tensor")


def _with(job: Job, **changes: Any) -> Job:
    """Return a job with another mesh, remat policy or accumulation."""
    config = job.config
    if "mesh" in changes:
        config = replace(config, mesh=changes["mesh"])
    if "policy" in changes:
        config = replace(config, remat=replace(config.remat, policy=changes["policy"]))
    if "accumulation" in changes:
        config = replace(config, training=replace(config.training, accumulation=changes["accumulation"]))
    return replace(job, config=config)


def _make_alone(job: Job) -> EngineProgram:
    """Make the program of a job on one device, without any division."""
    config = _with(job, mesh=MeshConfig(), accumulation=1).config
    sharding = replace(config.sharding, zero_stage=0, optimizer_over_data=False)
    return make_engine_program(
        replace(job, config=replace(config, sharding=sharding)), make_abstract_mesh(MeshConfig())
    )


def _find_problem(job: Job, division_only: bool = False) -> str:
    """Return why a job cannot run; "" if it can. A user's loss may raise anything at another number of rows.

    Args:
        division_only: ask only whether the devices divide the batch.
    """
    mesh = make_abstract_mesh(job.config.mesh)
    try:
        job.check_division(make_placement(job.config, mesh))
        if not division_only:
            make_engine_program(job, mesh)
    except InputError as error:
        return str(error)
    except Exception as error:
        return f"loss: it fails with {job.config.training.accumulation} microbatches: {error}"
    return ""


def _is_read(config: Config) -> bool:
    """Return whether the settings that a search changes can be combined, and have an effect."""
    return not config.problems() and not any(name.startswith("sharding.") for name in find_unread(config))


def _check_allowed(job: Job, allowed: Sequence[str]) -> None:
    for name in allowed:
        hidden = job.transformation is not None and name.startswith("optimizer.")
        if hidden or not tree.first_match(name, READ) or tree.first_match(name, NOT_READ):
            reason = "an optax transformation is the whole optimizer" if hidden else "an engine does not read it"
            raise InputError(f"search: {name} changes nothing, because {reason}; leave it out of what is allowed")


def _count_gradient_bytes(config: Config, state: StateSizes) -> float:
    """Return the bytes of the gradients of a microbatch, and of their sum over several."""
    several = config.training.accumulation > 1
    return (BYTES[config.precision.reduce_dtype] + 4 * several) * (state.layers + state.non_layer).gradients


def _list_transfers(config: Config, state: StateSizes, cluster: Cluster, cost: LossCost) -> Iterator[Transfer]:
    """Yield the collectives of a step.

    Every microbatch sums its gradients over all devices (`Placement.reduces_microbatches`). What happens in a
    microbatch counts as if kernels ran next to it; only a compiled program shows how many do.
    """
    mesh, sharding, accumulation = config.mesh, config.sharding, config.training.accumulation
    weights = state.layers + state.non_layer
    compute, reduced = BYTES[config.precision.compute_dtype], BYTES[config.precision.reduce_dtype]

    transfer = functools.partial(list_transfer, mesh, cluster)
    yield from transfer(("tensor",), "all-reduce", cost.summed / mesh.batch_shards, 2)
    summed = reduced * accumulation * weights.trained
    if sharding.zero_stage == 0 and not sharding.optimizer_over_data:
        yield from transfer(("data", "fsdp"), "all-reduce", summed, 2)
        return
    divided = ("fsdp",) if sharding.zero_stage else ()
    yield from transfer(divided, "reduce-scatter", summed)
    shares = mesh.size("fsdp") if divided else 1
    if sharding.optimizer_over_data:
        yield from transfer(("data",), "reduce-scatter", summed / shares)
        yield from transfer(("data",), "all-gather", compute * weights.trained / shares, alone=1.0)
    else:
        yield from transfer(("data",), "all-reduce", summed / shares, 2)
    if sharding.zero_stage == 3:  # forward and backward
        yield from transfer(divided, "all-gather", 2 * accumulation * compute * weights.weights)
    else:  # the compute copy
        yield from transfer(divided, "all-gather", compute * weights.weights, alone=1.0)
