"""What a compiled step holds on each device at its peak: bytes by kind, and the largest arrays by name."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import jax

from jaxopt_llm import tree
from jaxopt_llm.execution.in_backward import FORWARD
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model import param
from jaxopt_llm.model.weights import GRADIENT
from jaxopt_llm.parallel import hlo
from jaxopt_llm.parallel.buffers import Buffer
from jaxopt_llm.parallel.gathering import GATHER
from jaxopt_llm.parallel.offload import HOST, resting_bytes
from jaxopt_llm.training.activations import Activations
from jaxopt_llm.training.program import Program
from jaxopt_llm.training.update import UPDATE

GIB = 2**30
LARGEST = 6  # arrays that are named
REDUCED = ("f32", "bf16")  # what gradients are summed in, in XLA's names
# Of an operation's path, what JAX puts around scopes and loops.
_MACHINERY = ("while", "body", "closed_call", "checkpoint", "rematted_computation", "cond", "branch_1_fun", "pjit")


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU, by kind; together they are the compiler's own peak, `hlo.Memory.peak`.

    What rests is counted from the shardings: masters, compute copy and frozen parameters as `parameters`, moments as
    `optimizer`. Temporaries are those that XLA has alive when it holds most, told apart by the scope that they come
    from, gradients that are summed up by their shape. `activations` are what else the forward and the backward hold,
    the gradients of activations among it. `other` is the batch, and what none of this explains: copies without a
    source, and space that lies unused between temporaries. `gathered_weights` are those brought in from the host, too.
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
class Held:
    """An array on each device at the peak. name: the path of what rests, of a temporary the operation that made it."""

    bytes: int
    array: str  # as in float32[32,512,4096], the device's part
    kind: str  # a field of Memory
    name: str


@dataclass(frozen=True)
class Known:
    """What is known of temporaries by shape, without dimensions of size 1, which groups of gradients add; and how
    each is called.

    gradients: of all layers and of what lies outside the stacks on each device: whole but for `tensor`, in one group,
        and summed; where layers are run again together, also by groups, and of one group; of an interleaved stage,
        chunk after chunk, and of one chunk.
    kept: what all layers keep for the backward, and the inputs that wait for one on a stage, by its sizes in order.
    fetched: a layer's weights that come from the host, each device's part.
    """

    gradients: Mapping[tuple[int, ...], str]
    kept: Mapping[tuple[int, ...], str]
    fetched: Set[tuple[int, ...]]

    @classmethod
    def of(cls, program: Program, activations: Activations, remat: RematConfig, waiting: int) -> "Known":
        """waiting: inputs of a stage, 0 without a pipeline."""
        placement = activations.placement
        gradients: dict[tuple[int, ...], dict[str, None]] = {}
        kept: dict[tuple[int, ...], dict[str, None]] = {}
        for section, blocks in program.specs.masters.items():
            for path, spec in tree.leaves_with_path(blocks):
                # Of a stack, from stage 2 on each layer's are divided before they join the others.
                divided = spec.leading and placement.sharding.zero_stage >= 2
                for place in (placement.gradients, placement.masters, *(() if divided else (placement.gathered,))):
                    whole = place(spec).shard_shape(spec.shape)
                    shapes = [whole]
                    if remat.every > 1 and spec.leading == 1:
                        layers, *of_layer = whole
                        size = remat.group(len(blocks), layers)
                        shapes += [(layers // size, size, *of_layer), (size, *of_layer)]
                    if spec.leading == 3:
                        chunks, _, slots, *of_layer = whole
                        shapes += [(chunks * slots, *of_layer), (slots, *of_layer)]
                    for shape in map(_squeezed, shapes):
                        gradients.setdefault(shape, {})[f"{section}/{path}"] = None
        for section, blocks in program.parts.specs.items():
            numbers = param.layers(blocks)
            if section != "outer" and numbers is not None:
                for name, shape in activations.kept(remat):
                    kept.setdefault(_unordered((numbers.shape[-1], *shape)), {})[name] = None
        if waiting:
            kept[_unordered((waiting, *activations.sent))] = {"inputs of runs of them": None}
        stacked = (
            [spec for spec in jax.tree.leaves((program.specs.masters, program.specs.frozen)) if spec.leading]
            if placement.offload.parameters
            else []
        )
        fetched = {_squeezed(placement.parameters(spec).shard_shape(spec.shape)[spec.leading :]) for spec in stacked}
        named = [{shape: ", ".join(names) for shape, names in each.items()} for each in (gradients, kept)]
        return cls(named[0], named[1], fetched)


def by_kind(program: Program, known: Known, total: hlo.Memory, temporaries: Sequence[Buffer]) -> Memory:
    state = program.state
    kinds = dict.fromkeys((field.name for field in dataclasses.fields(Memory)), 0)
    kinds["parameters"] = resting_bytes((state.masters, state.compute, state.frozen))
    kinds["optimizer"] = resting_bytes(state.moments)
    for buffer in temporaries:
        kinds[kind(buffer, known)] += buffer.bytes
    kinds["other"] += total.peak - sum(kinds.values())
    return Memory(**kinds)


def largest(program: Program, known: Known, temporaries: Sequence[Buffer]) -> tuple[Held, ...]:
    """The largest of what rests and of the temporaries; those of the same name and type as one."""
    state = program.state
    trees = {
        "masters of": (state.masters, "parameters"),
        "compute copy of": (state.compute, "parameters"),
        "frozen": (state.frozen, "parameters"),
        "moments": (state.moments, "optimizer"),
    }
    found = [
        Held(_bytes(leaf), _array(leaf.dtype.name, leaf.sharding.shard_shape(leaf.shape)), of_kind, f"{name} {path}")
        for name, (leaves, of_kind) in trees.items()
        for path, leaf in tree.leaves_with_path(leaves)
        if leaf.sharding.memory_kind != HOST
    ]
    for each in temporaries:
        held = Held(each.bytes, _array(each.dtype, each.shape), kind(each, known), source_name(each, known))
        found.append(held)
    together = collections.Counter(found)
    several = (
        dataclasses.replace(
            held, bytes=times * held.bytes, array=f"{times} × {held.array}" if times > 1 else held.array
        )
        for held, times in together.items()
    )
    return tuple(sorted(several, key=lambda held: -held.bytes)[:LARGEST])


def source_name(buffer: Buffer, known: Known) -> str:
    """What a temporary is of, or else the last scopes of where it comes from, without the machinery around them."""
    of_kind, shape = kind(buffer, known), _squeezed(buffer.shape)
    if of_kind == "gradients" and shape in known.gradients:
        return f"of {known.gradients[shape]}"
    if of_kind == "activations" and _unordered(buffer.shape) in known.kept:
        return f"of all layers, {known.kept[_unordered(buffer.shape)]}"
    passes = "backward " if "transpose(" in buffer.source else "forward " if "jvp(" in buffer.source else ""
    scopes = buffer.source.split(":")[0].split("/")  # of what XLA made of several, the first
    scopes = [scope for scope in scopes[1:] if scope not in _MACHINERY and "(" not in scope]
    return passes + ("/".join(scopes[-3:]) or buffer.opcode)


def kind(buffer: Buffer, known: Known) -> str:
    """What a temporary is. The first that holds: one scope may lie in another."""
    scopes = buffer.source.split("/")
    if any(GATHER in scope for scope in scopes):
        return "gathered_weights"
    # XLA names no source for what it made of several: those are gradients, as nothing else is reduced and scattered so.
    of_gradients = buffer.opcode.startswith("reduce-scatter") and not buffer.source
    if of_gradients or any(GRADIENT in scope for scope in scopes):
        return "gradients"
    if any(UPDATE in scope.split("(") for scope in scopes):
        return "optimizer"
    if _squeezed(buffer.shape) in known.fetched and scopes[-1] == "dynamic_slice":
        return "gathered_weights"
    # What the forward keeps of all layers can have a weight's shape: where a sequence is as long as the model is wide.
    forward = "jvp(" in buffer.source and "transpose(" not in buffer.source
    if _squeezed(buffer.shape) in known.gradients and buffer.dtype in REDUCED and not forward:
        return "gradients"
    if "jvp(" in buffer.source or FORWARD in scopes or _unordered(buffer.shape) in known.kept:
        return "activations"
    return "other"


def kind_lines(memory: Memory) -> list[str]:
    """As a user reads it."""
    kinds = dataclasses.asdict(memory).items()
    return [
        "memory of each GPU         GiB",
        *(f"  {name.replace('_', ' '):18} {size / GIB:9.2f}" for name, size in kinds),
        f"  {'peak':18} {memory.peak / GIB:9.2f}",
    ]


def largest_lines(largest: Sequence[Held]) -> list[str]:
    return [
        "the largest arrays",
        *(
            f"  {held.kind.replace('_', ' '):18} {held.bytes / GIB:9.2f}   {held.name}: {held.array}"
            for held in largest
        ),
    ]


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return int(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)


def _array(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without dimensions of size 1, which groups of gradients add."""
    return tuple(size for size in shape if size > 1)


def _unordered(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same in order of size: XLA lays some activations out by head."""
    return tuple(sorted(_squeezed(shape)))
