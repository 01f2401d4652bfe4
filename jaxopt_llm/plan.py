"""python -m jaxopt_llm.plan --config FILE [--gpu CHIP --hosts N --gpus-per-host N] [--json] [--section.field VALUE ...]

Compiles a recipe's step for GPUs that need not be there, and says what each would hold and move.
"""

import argparse
import collections
import dataclasses
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from jaxopt_llm import config as configuration
from jaxopt_llm import errors, tree
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.errors import InputError
from jaxopt_llm.model import flops, leaves
from jaxopt_llm.model.weights import GRADIENT
from jaxopt_llm.parallel import hlo, topology
from jaxopt_llm.parallel.buffers import Buffer, compile_and_list
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.runtime import MEMORY_FRACTION
from jaxopt_llm.parallel.sharding import GATHER, Placement
from jaxopt_llm.parallel.topology import CHIPS, Chip
from jaxopt_llm.training.program import Program, make_program
from jaxopt_llm.training.update import UPDATE

PROGRAM = "python -m jaxopt_llm.plan"
GIB = 2**30
REDUCED = ("f32", "bf16")  # what gradients are summed in, in XLA's names


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU, by kind; together they are the compiler's own peak, `hlo.Memory.peak`.

    What rests is counted from the shardings: masters, compute copy and frozen parameters as `parameters`, moments as
    `optimizer`. Temporaries are those that XLA has alive when it holds most, told apart by the scope that they come
    from, gradients that are summed up by their shape. `activations` are what else the forward and the backward hold,
    the gradients of activations among it. `other` is the batch, and what none of this explains: copies without a
    source, and space that lies unused between temporaries.
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
class Traffic:
    """Collectives of one kind over the same mesh axes.

    bytes: sent by each GPU in a step, on a ring. seconds: that by the rate of the slowest link, without latency; what
        overlaps with computation is not taken off. overlapped: the share of the bytes whose collectives have other work
        scheduled between their start and their end.
    """

    axes: tuple[str, ...]
    link: str  # "nvlink", or "network" where the axes cross hosts
    kind: str
    dtypes: tuple[str, ...]
    times: int
    bytes: int
    seconds: float
    overlapped: float


@dataclass(frozen=True)
class Plan:
    gpu: str
    hosts: int
    gpus_per_host: int
    jax: str
    parameters: int
    compile_seconds: float
    memory: Memory
    limit: int  # bytes of a GPU that XLA may use
    collectives: tuple[Traffic, ...]
    flops: int  # of each GPU's matmuls in a step, as compiled
    flops_seconds: float  # at the chip's peak
    model_flops: float  # of each GPU in a step, that the model needs: nothing recomputed, causal attention

    @property
    def spare(self) -> int:
        """Negative where it does not fit."""
        return self.limit - self.memory.peak


def make_plan(config: TrainConfig, gpu: str, hosts: int, gpus_per_host: int) -> Plan:
    """Raises InputError for a mesh of another size, an unknown GPU, and where JAX cannot compile for GPUs."""
    devices = topology.gpu_topology(gpu, hosts, gpus_per_host)
    if len(devices) != config.mesh.devices:
        raise InputError(
            f"--hosts {hosts} × --gpus-per-host {gpus_per_host} are {len(devices)} GPUs, the mesh has "
            f"{config.mesh.devices} (--mesh.* of the recipe): change one of the two"
        )
    chip = CHIPS[gpu]
    mesh = make_mesh(config.mesh, devices)
    placement = Placement(mesh, config.sharding, config.precision)
    program = make_program(
        config.model, config.training, config.optimizer, config.schedule, config.remat, config.lora, placement
    )
    lowered = program.step.lower(program.state, program.batch)
    clock = time.perf_counter()
    compiled, temporaries = compile_and_list(lowered, {})
    compile_seconds = time.perf_counter() - clock
    text = str(compiled.as_text())
    tokens = config.training.batch_size * config.training.sequence_length
    needed = flops.per_token(config.model, program.specs.masters, program.specs.frozen, config.training.sequence_length)
    computed = hlo.dot_flops(text)
    return Plan(
        gpu=chip.name,
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        jax=jax.__version__,
        parameters=leaves.count(program.parts.specs),
        compile_seconds=compile_seconds,
        memory=_memory(program, placement, hlo.memory(compiled), temporaries),
        limit=int(chip.memory_bytes * float(MEMORY_FRACTION)),
        collectives=tuple(_traffic(hlo.collectives(text, mesh), mesh, chip, gpus_per_host)),
        flops=computed,
        flops_seconds=computed / chip.peak_flops[config.precision.compute_dtype],
        model_flops=needed.causal * tokens / len(devices),
    )


# ---- Memory.


def _memory(program: Program, placement: Placement, total: hlo.Memory, temporaries: Sequence[Buffer]) -> Memory:
    state = program.state
    kinds = dict.fromkeys((field.name for field in dataclasses.fields(Memory)), 0)
    kinds["parameters"] = _resting_bytes((state.masters, state.compute, state.frozen))
    kinds["optimizer"] = _resting_bytes(state.moments)
    summed = _gradient_shapes(program, placement)
    for buffer in temporaries:
        kinds[_kind(buffer, summed)] += buffer.bytes
    kinds["other"] += total.peak - sum(kinds.values())
    return Memory(**kinds)


def _resting_bytes(trees: tree.Tree) -> int:
    """On each device, of ShapeDtypeStructs with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees)
    )


def _gradient_shapes(program: Program, placement: Placement) -> set[tuple[int, ...]]:
    """Of the gradients of all layers and of what lies outside the stacks on each device, in one group and summed."""
    places = (placement.gradients, placement.masters)
    specs = jax.tree.leaves(program.specs.masters)
    return {_squeezed(place(spec).shard_shape(spec.shape)) for spec in specs for place in places}


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without dimensions of size 1, which groups of gradients add."""
    return tuple(size for size in shape if size > 1)


def _kind(buffer: Buffer, gradient_shapes: set[tuple[int, ...]]) -> str:
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
    if _squeezed(buffer.shape) in gradient_shapes and buffer.dtype in REDUCED:
        return "gradients"
    if "jvp(" in buffer.source:
        return "activations"
    return "other"


# ---- What is moved.


def _traffic(collectives: Sequence[hlo.Collective], mesh: Mesh, chip: Chip, gpus_per_host: int) -> Iterator[Traffic]:
    groups = collections.defaultdict(list)
    for each in collectives:
        groups[each.axes, each.kind, each.dtypes].append(each)
    for (axes, kind, dtypes), alike in groups.items():
        link, rate = _link(axes, kind, mesh, chip, gpus_per_host)
        sent = sum(each.wire_bytes * each.times for each in alike)
        overlapped = sum(each.wire_bytes * each.times for each in alike if each.asynchronous)
        yield Traffic(
            axes=axes,
            link=link,
            kind=kind,
            dtypes=dtypes,
            times=sum(each.times for each in alike),
            bytes=sent,
            seconds=sent / rate,
            overlapped=overlapped / sent if sent else 0.0,
        )


def _link(axes: tuple[str, ...], kind: str, mesh: Mesh, chip: Chip, gpus_per_host: int) -> tuple[str, float]:
    """The slowest link between the devices along these axes, and bytes per second over it for each device.

    Where a group has several GPUs in a host, as many rings leave it, each through a network card of its own (so NCCL),
    and each carries its part of what a GPU sends. A permute has one neighbour and one card.
    """
    hosts = np.arange(mesh.size).reshape(mesh.axis_sizes) // gpus_per_host
    along = [mesh.axis_names.index(axis) for axis in axes]
    groups = np.moveaxis(hosts, along, range(-len(along), 0)).reshape(-1, math.prod(mesh.shape[axis] for axis in axes))
    if np.all(groups == groups[:, :1]):
        return "nvlink", chip.nvlink_bytes_per_second
    fewest = min(np.unique(group, return_counts=True)[1].min() for group in groups)
    rings = 1 if kind == "collective-permute" else int(fewest)
    return "network", min(rings * chip.network_bytes_per_second, chip.nvlink_bytes_per_second)


# ---- What is said.


def show(plan: Plan) -> str:
    lines = [
        f"{plan.parameters:,} parameters on {plan.hosts} × {plan.gpus_per_host} {plan.gpu}; compiled in "
        f"{plan.compile_seconds:.1f} s with jax {plan.jax}",
        "",
        "memory of each GPU         GiB",
        *(f"  {name.replace('_', ' '):18} {size / GIB:9.2f}" for name, size in dataclasses.asdict(plan.memory).items()),
        f"  {'peak':18} {plan.memory.peak / GIB:9.2f}",
        f"  {'XLA may use':18} {plan.limit / GIB:9.2f}   {float(MEMORY_FRACTION):.0%} of the GPU's",
        f"  {'fits, spare' if plan.spare >= 0 else 'DOES NOT FIT, lacks':18} {abs(plan.spare) / GIB:8.2f}",
        "",
        f"{'collectives of a step':44} {'times':>7} {'GiB sent':>9} {'ms':>9} {'overlapped':>10}",
    ]
    for each in sorted(plan.collectives, key=lambda each: -each.seconds):
        what = f"{' × '.join(each.axes)} ({each.link}): {each.kind} {' '.join(each.dtypes)}"
        lines.append(
            f"  {what:42} {each.times:7,} {each.bytes / GIB:9.3f} {each.seconds * 1e3:9.2f} {each.overlapped:10.0%}"
        )
    seconds = sum(each.seconds for each in plan.collectives)
    lines += [
        f"  {'all':42} {'':7} {sum(each.bytes for each in plan.collectives) / GIB:9.3f} {seconds * 1e3:9.2f}",
        "",
        f"matmuls of each GPU: {plan.flops / 1e12:,.1f} TFLOP, {plan.flops_seconds * 1e3:,.1f} ms at the chip's peak; "
        f"the model needs {plan.model_flops / 1e12:,.1f} (nothing recomputed, causal attention)",
    ]
    return "\n".join(lines)


def to_json(plan: Plan) -> str:
    """With what follows from the fields: memory.peak, spare, fits."""
    told = dataclasses.asdict(plan)
    told["memory"]["peak"] = plan.memory.peak
    return json.dumps(told | {"spare": plan.spare, "fits": plan.spare >= 0}, indent=2)


def main() -> int:
    parser = errors.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--gpu", default="h200", choices=sorted(CHIPS), help="to compile for (default: h200)")
    add("--hosts", type=int, default=1, metavar="N", help="machines (default: 1)")
    add("--gpus-per-host", type=int, default=8, metavar="N", help="of each machine (default: 8)")
    add("--json", action="store_true", help="print JSON: bytes, seconds and FLOPs, of each GPU")
    own, arguments = parser.parse_known_args()
    config = configuration.parse(arguments, PROGRAM)
    configuration.validate(config)
    jax.config.update("jax_platforms", "cpu")  # where there are GPUs, too: none is touched
    jax.config.update("jax_enable_compilation_cache", False)  # what comes out of it dumps no buffers
    plan = make_plan(config, own.gpu, own.hosts, own.gpus_per_host)
    print(to_json(plan) if own.json else show(plan))
    return 0


if __name__ == "__main__":
    errors.run(main)
