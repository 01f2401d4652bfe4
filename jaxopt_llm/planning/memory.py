"""Memory of a compiled step on each device at its peak: bytes by kind, and the largest arrays by name.

`Activations` gives the shapes of those that a layer saves for the backward, by name.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.buffers import Buffer
from jaxopt_llm.config import Config, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.files import replace_durably
from jaxopt_llm.execution.in_backward import FORWARD_SCOPE
from jaxopt_llm.execution.trace import Mark
from jaxopt_llm.model import param
from jaxopt_llm.model.linear.weights import GRADIENT
from jaxopt_llm.model.moe import exchange
from jaxopt_llm.parallel.activations import sent_sharding
from jaxopt_llm.parallel.gathering import GATHER_SCOPE
from jaxopt_llm.parallel.offload import HOST, count_resting_bytes
from jaxopt_llm.parallel.placement import Placement, Spec
from jaxopt_llm.parallel.zero import gathered_sharding, gradient_sharding, master_sharding, parameter_sharding
from jaxopt_llm.planning.free_memory import GIB, choose_unit
from jaxopt_llm.planning.search.block_cost import follow_backward, trace_layers
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import StateSpecs, TrainState
from jaxopt_llm.step.update import UPDATE


@dataclass(frozen=True)
class Activations:
    """Activations of one microbatch on each device."""

    config: Config
    placement: Placement

    def local_shape(self, mark: Mark) -> tuple[int, ...]:
        """Return the shape of each device's part of an intermediate."""
        rows, sequence = self._global_shape
        sizes = {"batch": rows, "sequence": sequence, "residual_sequence": sequence, "expert_rows": self._expert_rows}
        whole = [sizes.get(axis or "", size) for axis, size in zip(mark.name.axes, mark.shape, strict=True)]
        return tuple(
            1 if axis == "devices" else size // self.placement.count_parts(axis, size)
            for axis, size in zip(mark.name.axes, whole, strict=True)
        )

    @property
    def _global_shape(self) -> tuple[int, int]:
        training = self.config.training
        return training.batch_size // training.accumulation, training.sequence_length

    @property
    def _expert_rows(self) -> int:
        rows, sequence = self._global_shape
        tokens = math.prod(self.placement.activation("batch", "sequence").shard_shape((rows, sequence)))
        return (
            exchange.count_rows(self.config.model.moe, self.placement, tokens) if self.config.model.moe.experts else 0
        )

    @property
    def stage_input_shape(self) -> tuple[int, ...]:
        """Shape of each device's part of the activation that pipeline stages send to each other."""
        rows, sequence = self._global_shape
        sent = sent_sharding(sequence, self.placement)
        return tuple(sent.shard_shape((rows, sequence, self.config.model.width)))

    def list_saved(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return name and shape of what a layer saves on the device from its forward to its backward."""
        remat = self.config.remat
        marks = (mark for trace, _ in trace_layers(self.config) for mark in follow_backward(trace, remat).saved)
        return [(mark.name, self.local_shape(mark)) for mark in marks if mark.name not in remat.offload]


MAX_ARRAYS = 6  # arrays that are listed by name
GRADIENT_DTYPES = ("f32", "bf16")  # dtypes in which gradients are summed, in XLA's names
# Components of an operation's path that JAX adds around scopes and loops.
_JAX_SCOPES = ("while", "body", "closed_call", "checkpoint", "rematted_computation", "cond", "branch_1_fun", "pjit")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU, by kind. Their sum is the compiler's own peak, `hlo.Memory.peak`.

    The shardings give the bytes of the train state: `parameters` are the master weights, the compute copy, the frozen
    parameters and those of a teacher, `optimizer` are the moments and the average. Temporaries are those that are alive
    when XLA holds most. The scope that a temporary comes from tells its kind; for accumulated gradients its shape does.
    `activations` are everything else that the forward and the backward hold, the gradients of activations included.
    `gathered_weights` include weights that are brought from the host. `other` is the batch, copies without a source,
    and unused space between temporaries.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered_weights: int
    other: int

    @property
    def peak(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class LiveArray:
    """Array on each device at the peak.

    The name is a parameter's path for the train state, and the operation that made it for a temporary.
    """

    bytes: int
    array: str  # dtype and shape of the device's part, for example float32[32,512,4096]
    kind: str  # a field of Memory
    name: str


@dataclass(frozen=True)
class KnownShapes:
    """Shapes that identify temporaries, with a name for each.

    Shapes have no dimensions of size 1, because groups of gradients add some.

    gradients: gradients of all layers and of the parameters outside the stacks, on each device. They occur whole
        except for `tensor`, in one group, and summed. With `remat.every` they also occur split into groups of layers,
        and for one group; on an interleaved stage chunk after chunk, and for one chunk.
    saved: activations that all layers save for the backward, and inputs that wait on a pipeline stage for their
        backward. Sizes are sorted.
    fetched: each device's part of a layer's weights that come from the host.
    """

    gradients: Mapping[Shape, str]
    saved: Mapping[Shape, str]
    fetched: Set[Shape]

    @classmethod
    def from_program(cls, program: Program, config: Config, placement: Placement) -> "KnownShapes":
        """Collect the shapes of the program of a configuration on a placement."""
        activations = Activations(config, placement)
        saved: dict[Shape, dict[str, None]] = {}
        for section, blocks in program.model.specs.items():
            numbers = param.layer_indices(blocks)
            if section != "non_layer" and numbers is not None:
                for name, shape in activations.list_saved():
                    saved.setdefault(_sorted((numbers.shape[-1], *shape)), {})[name] = None
        passes = Passes.from_config(config)
        if passes.waiting_chunks:
            saved |= {_sorted((passes.waiting_chunks, *shape)): names for shape, names in saved.items()}
        if passes.waiting_streams:
            name = "chunk outputs" if passes.waiting_chunks else "chunk inputs"
            saved[_sorted((passes.waiting_streams, *activations.stage_input_shape))] = {name: None}
        return dataclasses.replace(cls.from_specs(program.specs, placement, config.remat), saved=_join_names(saved))

    @classmethod
    def from_specs(cls, specs: StateSpecs, placement: Placement, remat: RematConfig) -> "KnownShapes":
        """Collect the shapes of a state's gradients. Nothing is known of the activations."""
        gradients: dict[Shape, dict[str, None]] = {}
        for section, blocks in specs.masters.items():
            for path, spec in tree.leaves_with_path(blocks):
                for shape in _gradient_shapes(spec, placement, remat, len(blocks)):
                    gradients.setdefault(_squeezed(shape), {})[f"{section}/{path}"] = None
        fetched = {
            _squeezed(parameter_sharding(spec, placement).shard_shape(spec.shape)[spec.leading :])
            for spec in jax.tree.leaves((specs.masters, specs.frozen, specs.teacher))
            if placement.offload.parameters and spec.leading
        }
        return cls(_join_names(gradients), {}, fetched)


def _join_names(shapes: Mapping[Shape, Mapping[str, None]]) -> dict[Shape, str]:
    return {shape: ", ".join(names) for shape, names in shapes.items()}


def _gradient_shapes(spec: Spec, placement: Placement, remat: RematConfig, blocks: int) -> Iterator[Shape]:
    """Yield the shapes in which the gradient of a parameter can occur on each device.

    Args:
        blocks: number of blocks in one period of the stack.
    """
    # From ZeRO stage 2 on, the gradient of each layer of a stack is divided before it joins those of the others.
    divided = spec.leading and placement.sharding.zero_stage >= 2
    for sharding in (gradient_sharding, master_sharding, *(() if divided else (gathered_sharding,))):
        whole = sharding(spec, placement).shard_shape(spec.shape)
        yield whole
        if remat.every > 1 and spec.leading == 1:
            layers, *of_layer = whole
            size = remat.group_size(blocks, layers)
            yield (layers // size, size, *of_layer)
            yield (size, *of_layer)
        if spec.leading == 3:
            chunks, _, slots, *of_layer = whole
            yield (chunks * slots, *of_layer)
            yield (slots, *of_layer)


def sum_by_kind(state: TrainState, known: KnownShapes, total: hlo.Memory, temporaries: Sequence[Buffer]) -> Memory:
    """Return the bytes of each kind at the peak; they add up to `total.peak`."""
    kinds = dict.fromkeys((field.name for field in dataclasses.fields(Memory)), 0)
    kinds["parameters"] = count_resting_bytes(state.all_parameters)
    kinds["optimizer"] = count_resting_bytes(state.optimizer_state)
    for buffer in temporaries:
        kinds[classify(buffer, known)] += buffer.bytes
    kinds["other"] += total.peak - sum(kinds.values())
    return Memory(**kinds)


def write_memory(path: Path, state: TrainState, step: jax.stages.Compiled) -> None:
    """Write the bytes of the compiled step of a run on each device as JSON, for `report`.

    `kinds` add up to `peak`. They are those that need no second compile: `temporaries` are gradients, activations and
    gathered weights together. `host` are the bytes in host memory, `limit` those that XLA may use, if it says so.
    """
    total = hlo.read_memory(step)
    kinds = {
        "parameters": count_resting_bytes(state.all_parameters),
        "optimizer": count_resting_bytes(state.optimizer_state),
        "temporaries": total.temporaries,
    }
    kinds["other"] = total.peak - sum(kinds.values())
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    description = {"kinds": kinds, "peak": total.peak, "host": total.host, "limit": limit}
    replace_durably(path, json.dumps(description))


def find_largest(state: TrainState, known: KnownShapes, temporaries: Sequence[Buffer]) -> tuple[LiveArray, ...]:
    """Return the largest arrays of the train state and of the temporaries.

    Arrays of the same name, dtype and shape count as one.
    """
    trees = {
        "master weights of": (state.masters, "parameters"),
        "compute copy of": (state.compute, "parameters"),
        "frozen": (state.frozen, "parameters"),
        "teacher's": (state.teacher, "parameters"),
        "moments": (state.moments, "optimizer"),
        "average of": (state.average, "optimizer"),
        "master weights of a group of": (state.groups.get("masters"), "parameters"),
        "moments of a group": (state.groups.get("moments"), "optimizer"),
    }
    arrays = []
    for name, (leaves, kind) in trees.items():
        for path, leaf in tree.leaves_with_path(leaves):
            if leaf.sharding.memory_kind != HOST:
                array = _describe(leaf.dtype.name, leaf.sharding.shard_shape(leaf.shape))
                arrays.append(LiveArray(count_resting_bytes(leaf), array, kind, f"{name} {path}"))
    for each in temporaries:
        array = _describe(each.dtype, each.shape)
        arrays.append(LiveArray(each.bytes, array, classify(each, known), name_buffer(each, known)))
    combined = (
        dataclasses.replace(one, bytes=count * one.bytes, array=f"{count} × {one.array}" if count > 1 else one.array)
        for one, count in collections.Counter(arrays).items()
    )
    return tuple(sorted(combined, key=lambda live: -live.bytes)[:MAX_ARRAYS])


def name_buffer(buffer: Buffer, known: KnownShapes) -> str:
    """Return the name of a temporary.

    A gradient or a saved activation is named by its shape. Any other temporary has the last scopes of the operation
    that made it, without those that JAX adds.
    """
    kind, shape = classify(buffer, known), _squeezed(buffer.shape)
    if kind == "gradients" and shape in known.gradients:
        return f"gradient of {known.gradients[shape]}"
    if kind == "activations" and _sorted(buffer.shape) in known.saved:
        return f"{known.saved[_sorted(buffer.shape)]} of all layers"
    half = "backward " if "transpose(" in buffer.source else "forward " if "jvp(" in buffer.source else ""
    scopes = buffer.source.split(":")[0].split("/")  # the first source, if XLA made the buffer from several operations
    scopes = [scope for scope in scopes[1:] if scope not in _JAX_SCOPES and "(" not in scope]
    return half + ("/".join(scopes[-3:]) or buffer.opcode)


def classify(buffer: Buffer, known: KnownShapes) -> str:
    """Return the kind of a temporary, a field of Memory.

    The order of the tests matters, because one scope may lie within another.
    """
    scopes = buffer.source.split("/")
    if any(GATHER_SCOPE in scope for scope in scopes):
        return "gathered_weights"
    # XLA gives no source to what it made from several operations. A reduce-scatter without a source is a gradient,
    # because nothing else is reduced and scattered in this way.
    unnamed_gradient = buffer.opcode.startswith("reduce-scatter") and not buffer.source
    if unnamed_gradient or any(GRADIENT in scope for scope in scopes):
        return "gradients"
    if any(UPDATE in scope.split("(") for scope in scopes):
        return "optimizer"
    if _squeezed(buffer.shape) in known.fetched and scopes[-1] == "dynamic_slice":
        return "gathered_weights"
    # Activations that the forward saves for all layers can have a weight's shape, namely if the sequence is as long as
    # the model is wide.
    forward = "jvp(" in buffer.source and "transpose(" not in buffer.source
    if _squeezed(buffer.shape) in known.gradients and buffer.dtype in GRADIENT_DTYPES and not forward:
        return "gradients"
    if "jvp(" in buffer.source or FORWARD_SCOPE in scopes or _sorted(buffer.shape) in known.saved:
        return "activations"
    return "other"


def format_kinds(memory: Memory) -> list[str]:
    """Return the lines of the table of memory by kind, in the unit for its peak."""
    kinds = dataclasses.asdict(memory).items()
    name, unit = choose_unit(memory.peak)
    return [
        f"memory of each GPU         {name}",
        *(f"  {kind.replace('_', ' '):18} {size / unit:9,.2f}" for kind, size in kinds),
        f"  {'peak':18} {memory.peak / unit:9,.2f}",
    ]


def format_largest(largest: Sequence[LiveArray]) -> list[str]:
    """Return the lines of the table of the largest arrays."""
    rows = ((live.kind.replace("_", " "), live.bytes / GIB, live) for live in largest)
    return ["largest arrays", *(f"  {kind:18} {size:9.2f}   {live.name}: {live.array}" for kind, size, live in rows)]


def _describe(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _squeezed(shape: Shape) -> Shape:
    """Drop dimensions of size 1, which groups of gradients add."""
    return tuple(size for size in shape if size > 1)


def _sorted(shape: Shape) -> Shape:
    """Drop dimensions of size 1 and sort the others, because XLA lays some activations out by head."""
    return tuple(sorted(_squeezed(shape)))
