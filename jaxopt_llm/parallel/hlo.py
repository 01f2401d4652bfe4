"""Reads a compiled program: its memory, its FLOPs, and what it moves between devices.

Bytes in memory come from `Compiled.memory_analysis()`, the rest from the HLO text, `Compiled.as_text()`. That is the
program of one device (SPMD), so every number here is per device.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxopt_llm.parallel.instructions import Computation, Instruction, Run, integers, parse, times, walk

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True)
class Memory:
    """Bytes on each device; `host` is what the program keeps in host memory, by the formula of `peak`."""

    arguments: int
    outputs: int
    aliased: int  # outputs that reuse the buffer of a donated argument
    temporaries: int  # the most that is alive at once, arguments and outputs apart
    host: int

    @property
    def peak(self) -> int:
        """arguments + outputs - aliased + temporaries: what a run needs, its code and the runtime's buffers apart."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True)
class Collective:
    """One instruction that moves data between devices; what XLA combined into one is one, with the sum of the bytes.

    `array_bytes` is the size of what a group works on: the array that is reduced, gathered (when whole), scattered
    (when whole), exchanged or sent. Of a ragged all-to-all it is the buffer, an upper bound.
    """

    kind: str  # one of COLLECTIVES
    dtypes: tuple[str, ...]  # in XLA's names: "f32", "bf16", "f8e4m3fn"
    array_bytes: int
    group_size: int  # devices that work together; 2 for a permute
    axes: tuple[str, ...]  # the mesh axes along which those differ
    times: int  # how often it runs: the product of the trip counts of the loops around it
    asynchronous: bool  # other work is scheduled between its start and its end
    source: str  # the JAX operation that it comes from; "" where XLA does not say

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends in one run, on a ring of N devices.

        2(N-1)/N of the array in an all-reduce, all of it in a permute, (N-1)/N of it in the others.
        """
        if self.kind == "collective-permute":
            return self.array_bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * (self.group_size - 1) * self.array_bytes // self.group_size


@dataclass(frozen=True)
class ArrayShape:
    """An array that an instruction results in. Inside a fusion (`fused`) it need not exist in memory."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    opcode: str
    fused: bool
    source: str


def memory(compiled: jax.stages.Compiled) -> Memory:
    """The bytes that the compiler assigned on each device.

    Raises:
        ValueError: the backend does not report them (CPU and GPU do).
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this backend's compiler does not report memory")
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
    )


def dot_flops(text: str) -> int:
    """FLOPs of all matmuls: see `dot_flops_by_dtype`."""
    return sum(dot_flops_by_dtype(text).values())


def dot_flops_by_dtype(text: str) -> Mapping[str, int]:
    """FLOPs of all matmuls by their first operand's dtype, in XLA's names: 2 per multiply-add, times the trip counts of
    the loops around them.

    Counted are dots, also in fusions, calls of cuBLAS, and our kernels of attention and of experts' products (see
    `_attention_products`, `_grouped_products`); every branch of a conditional counts once. Not counted are other
    kernels (cuDNN's among them), convolutions, and products with a vector that XLA writes as multiply and reduce.

    Raises:
        ValueError: a matmul is in a loop without a fixed trip count.
    """
    flops: dict[str, int] = {}
    for computation, instruction, run in walk(text):
        if _is_matmul(instruction):
            operand = computation[instruction.operands[0]].results[0]
            products = math.prod(instruction.results[0].shape) * _contracted(computation, instruction)
            flops[operand.dtype] = flops.get(operand.dtype, 0) + 2 * products * times(instruction, run)
        elif formed := _grouped_products(computation, instruction) or _attention_products(computation, instruction):
            dtype, products = formed
            flops[dtype] = flops.get(dtype, 0) + 2 * products * times(instruction, run)
    return flops


def collectives(text: str, mesh: jax.sharding.Mesh) -> tuple[Collective, ...]:
    """The collectives of a program compiled for `mesh`, in the order of the text; a start and its done are one.

    Those in every branch of a conditional are listed.

    Raises:
        ValueError: the program is for another number of devices; a collective is in a loop without a fixed trip count.
    """
    partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text)
    devices = int(partitions[1]) if partitions else 1
    if devices != mesh.size:
        raise ValueError(f"the program is for {devices} devices, the mesh has {mesh.size}")
    return tuple(
        _collective(computation, instruction, run, mesh)
        for computation, instruction, run in walk(text)
        if instruction.opcode.removesuffix("-start") in COLLECTIVES
    )


def host_traffic(text: str) -> int:
    """Bytes that pass between the device and host memory, both ways together, times the trip counts of the loops
    around.

    Raises:
        ValueError: what moves is in a loop without a fixed trip count.
    """
    return sum(
        moved * times(instruction, run)
        for computation, instruction, run in walk(text)
        if (moved := _moved_between_memories(computation, instruction))
    )


def instruction_count(text: str) -> int:
    """Instructions in all computations, however often they run: the size of the program that XLA compiled."""
    return sum(len(computation) for computation in parse(text).values())


def array_shapes(text: str) -> Iterator[ArrayShape]:
    """Every array that an instruction results in; a result that is a tuple gives each of its arrays.

    The same memory can appear several times, in tuples and under other shapes (`bitcast`): look for sizes rather than
    shapes, and take maxima rather than sums.
    """
    for _, instruction, run in walk(text):
        for array in instruction.results:
            yield ArrayShape(array.dtype, array.shape, array.bytes, instruction.opcode, run.fused, instruction.source)


# ---- Matmuls.


def _is_matmul(instruction: Instruction) -> bool:
    return instruction.opcode == "dot" or bool(instruction.find(r'custom_call_target="(__cublas\$(?:gemm|lt\$matmul))'))


def _contracted(computation: Computation, matmul: Instruction) -> int:
    """The product of the contracted sizes: `lhs_contracting_dims={1}` or, in cuBLAS, `…_dimensions":["1"]`."""
    shape = computation[matmul.operands[0]].results[0].shape
    dimensions = matmul.find(r'\blhs_contracting_dim(?:ension)?s(?:=\{|":\[)([^\]}]*)') or ""
    return math.prod(shape[dimension] for dimension in integers(dimensions))


# ---- Kernels of attention.

_TRITON = r'custom_call_target="(__gpu\$xla\.gpu\.triton|triton_kernel_call_ffi)"'  # Pallas's; jax-triton's


def within(window: int | None, parts: int = 1) -> contextlib.AbstractContextManager[Any]:
    """A scope for attention in which a query sees its last `window` keys, all if None, and a kernel is given the keys
    in so many parts, one in each of as many calls: what a kernel's program does not tell."""
    if window is None and parts == 1:
        return contextlib.nullcontext()
    return jax.named_scope(f"within_{window or 'all'}_keys_in_{parts}_parts")


def _attention_products(computation: Computation, call: Instruction) -> tuple[str, int] | None:
    """The dtype and the multiply-adds of a kernel that attends, None of other instructions.

    It is known by its arrays, of which q, k and v come first: q [..., S, H, K] or [..., S, H × K], the others with rows
    T. The forward, from these three, multiplies twice for each query and each key that it sees; a backward that gives
    the gradient of q, three times; one that gives those of k and v, four times. Counted are the keys up to a query's
    own, (T + 1) / 2 on average, or those of its window; of keys that come in parts, each call's share of that (see
    `within`). Documents are not told apart, and what is masked in blocks on the diagonal, which a kernel multiplies all
    the same, is not counted.
    """
    if not call.find(_TRITON):
        return None
    operands = [computation[name].results[0] for name in call.operands]
    arrays = [each for each in operands if each.dtype in ("bf16", "f16", "f32") and len(each.shape) >= 3]
    if len(arrays) < 3:
        return None
    (q, k), gradients = arrays[:2], [each for each in call.results if len(each.shape) >= 4]
    formed = 2 if len(arrays) == 3 else 2 + len(gradients)
    scope = re.search(r"\bwithin_(\w+)_keys_in_(\d+)_parts", call.source)
    window, parts = (scope[1], int(scope[2])) if scope else ("all", 1)
    keys = parts * (k.shape[-3] if len(k.shape) > 3 else k.shape[-2])
    seen = keys if window == "all" else min(int(window), keys)
    # The triangle before a whole window is there; times the keys, so that nothing is rounded.
    return q.dtype, formed * math.prod(q.shape) * (2 * seen * keys - seen * (seen - 1)) // (2 * keys * parts)


# ---- Kernels of experts' products.


def filled(rows: int, room: int) -> contextlib.AbstractContextManager[Any]:
    """A scope for products of rows sorted by group, of which so many are filled on average: what a kernel's program
    does not tell."""
    return jax.named_scope(f"filled_{rows}_of_{room}")


def _grouped_products(computation: Computation, call: Instruction) -> tuple[str, int] | None:
    """The dtype and the multiply-adds of a kernel of kernels/grouped_matmul_pallas.py, on average (see `filled`), None
    of other instructions. Its operands are where groups begin, rows [T, D], and what they are multiplied with."""
    if not (call.find(_TRITON) and call.find(r'name = \\?"(_grouped_matmul)')):
        return None
    rows = computation[call.operands[1]].results[0]
    share = re.search(r"\bfilled_(\d+)_of_(\d+)", call.source)
    count, room = map(int, share.groups()) if share else (1, 1)
    return rows.dtype, math.prod(rows.shape) * call.results[0].shape[-1] * count // room


# ---- Host memory.


def _moved_between_memories(computation: Computation, instruction: Instruction) -> int:
    """Bytes; 0 of what stays in one memory."""
    if instruction.opcode not in ("copy", "copy-start", "dynamic-slice", "dynamic-update-slice"):
        return 0
    updates = instruction.opcode == "dynamic-update-slice"
    source, result = computation[instruction.operands[1 if updates else 0]].results[0], instruction.results[0]
    on_host = ("S(5)" in source.layout, "S(5)" in result.layout)
    return (source if updates else result).bytes if on_host[0] != on_host[1] else 0


# ---- Collectives.


def _collective(computation: Computation, instruction: Instruction, run: Run, mesh: jax.sharding.Mesh) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    names = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands  # its others are sizes
    arrays = [array for name in names for array in computation[name].results]
    groups = _groups(instruction, mesh.size)
    size = max(len(group) for group in groups)
    started = run.asynchronous or instruction.opcode.endswith("-start")
    return Collective(
        kind=kind,
        dtypes=tuple(dict.fromkeys(array.dtype for array in arrays)),
        array_bytes=sum(array.bytes for array in arrays) * (size if kind == "all-gather" else 1),
        group_size=size,
        axes=_axes(groups, mesh),
        times=times(instruction, run),
        asynchronous=started and not instruction.find('("is_sync":true)'),  # XLA so marks a start that overlaps nothing
        source=instruction.source,
    )


def _axes(groups: list[list[int]], mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ. Ids are positions in the mesh's flattened devices."""
    positions = [np.stack(np.unravel_index(group, mesh.axis_sizes)) for group in groups]
    return tuple(
        name for axis, name in enumerate(mesh.axis_names) if any(np.ptp(position[axis]) for position in positions)
    )


def _groups(collective: Instruction, devices: int) -> list[list[int]]:
    """The devices that work together, in any of XLA's notations.

    Listed: `replica_groups={{0,1},{2,3}}`, where `{}` is all, and `source_target_pairs={{0,1},{1,0}}`.
    Computed: `replica_groups=[2,2]<=[2,2]T(1,0)`, the ids 0, 1, … shaped, transposed and reshaped to groups × members.
    Named: `replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`, the axes along which a group lies, in a
    mesh of XLA's own, with ids in order if none are given. Of `a`, `'a':(1)2` is the major half, `'a':(2)2` the minor.
    """
    if listed := collective.find(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}"):
        return [integers(group) for group in listed.split("}") if integers(group)]
    if collective.find(r"(replica_groups=\{\})"):
        return [list(range(devices))]
    if computed := re.search(r"replica_groups=\[(\d+,\d+)\]<=(\S+?)(?:, |$)", collective.attributes):
        return [ids.tolist() for ids in _device_ids(computed[2]).reshape(integers(computed[1]))]
    if named := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", collective.attributes):
        return _named_groups(*named.groups())
    raise ValueError(f"cannot read the devices of {collective.name}: {collective.attributes[:200]}")


def _device_ids(text: str) -> np.ndarray:
    """Ids, flat, from `[2,4]T(1,0)`, `[8]` or a plain list."""
    if not text.startswith("["):
        return np.array(integers(text))
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(integers(shape))).reshape(integers(shape))
    return (ids.transpose(integers(order)) if order else ids).flatten()


def _named_groups(axes: str, device_ids: str | None, along: str) -> list[list[int]]:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = _device_ids(device_ids) if device_ids else np.arange(math.prod(sizes.values()))
    # A device's group is its position with the grouped parts set to 0.
    group = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), -1), strict=True))
    for name, above, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", along):
        part = int(size or sizes[name])
        below = sizes[name] // (int(above or 1) * part)
        group[name] = group[name] - group[name] // below % part * below
    members: dict[tuple[int, ...], list[int]] = {}
    for device, key in zip(ids.tolist(), zip(*group.values(), strict=True), strict=True):
        members.setdefault(key, []).append(device)
    return list(members.values())
