"""Memory, FLOPs and communication of a compiled program.

Bytes in memory come from `Compiled.memory_analysis()`. Everything else comes from the HLO text, `Compiled.as_text()`.
The text is the program of one device (SPMD), so every number here is per device.
"""

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from jaxopt_llm.compiler.instructions import (
    Array,
    Computation,
    Execution,
    Instruction,
    Module,
    count_runs,
    parse_integers,
    parse_module,
    walk_instructions,
    walk_module,
)
from jaxopt_llm.kernels.attention_cudnn import count_workspace
from jaxopt_llm.kernels.attention_types import ALL_KEYS

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True)
class Memory:
    """Bytes of a program on each device.

    Attributes:
        aliased: outputs that reuse the buffer of a donated argument.
        temporaries: maximum that is alive at once, without arguments and outputs.
        host: bytes in host memory, by the formula of `peak`.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host: int

    @property
    def peak(self) -> int:
        """Bytes that a run needs: arguments + outputs - aliased + temporaries.

        The program's code and the buffers of the runtime are not included.
        """
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True)
class Collective:
    """Instruction that moves data between devices.

    Collectives that XLA combined into one instruction are one Collective, with the sum of their bytes.

    Attributes:
        kind: one of COLLECTIVES.
        dtypes: in XLA's names: "f32", "bf16", "f8e4m3fn".
        array_bytes: size of the array on which a group works: the reduced array, the whole array after a gather or
            before a scatter, or the array that is exchanged or sent. For a ragged all-to-all it is the size of the
            buffer, an upper bound.
        group_size: devices that work together; 2 for a permute.
        axes: mesh axes along which the devices of a group differ.
        times: number of runs: the product of the trip counts of the loops around it.
        source: JAX operation that it comes from; "" if XLA does not name it.
        name: name of the instruction; unique in a program.
        module: the program.
    """

    kind: str
    dtypes: tuple[str, ...]
    array_bytes: int
    group_size: int
    axes: tuple[str, ...]
    times: int
    source: str
    name: str
    module: Module = field(repr=False, compare=False)

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends in one run, on a ring of N devices.

        An all-reduce sends 2(N-1)/N of the array, a permute all of it, every other kind (N-1)/N of it.
        """
        if self.kind == "collective-permute":
            return self.array_bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * (self.group_size - 1) * self.array_bytes // self.group_size


def read_memory(compiled: jax.stages.Compiled) -> Memory:
    """Return the bytes that the compiler assigned on each device.

    A program that was compiled without a GPU lacks the workspaces of cuDNN's attention: see `buffers.find_peak`.

    Raises:
        ValueError: the backend does not report them. CPU and GPU do.
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


def count_dot_flops(text: str) -> int:
    """Return the FLOPs of all matmuls. See `count_dot_flops_by_dtype`."""
    return sum(count_dot_flops_by_dtype(text).values())


def count_dot_flops_by_dtype(text: str) -> Mapping[str, int]:
    """Return the FLOPs of all matmuls by the dtype of the first operand, in XLA's names.

    A multiply-add is 2 FLOPs. FLOPs in a loop are multiplied by the trip counts of the loops around them. Every branch
    of a conditional counts once.

    Counted: dots (also in fusions), calls of cuBLAS, attention by cuDNN, and the kernels of this package for attention
    and for the grouped matmuls of experts (see `count_attention_products`, `grouped_matmul`). Not counted:
    other kernels, convolutions, and products with a vector that XLA writes as multiply and reduce.

    Raises:
        ValueError: a matmul is in a loop without a fixed trip count.
    """
    return _sum_flops(text, lambda *each: count_matmul_products(*each) or count_attention_products(*each))


def count_convolution_flops(text: str) -> Mapping[str, int]:
    """Return the FLOPs of all convolutions by the dtype of the first operand; see `count_dot_flops_by_dtype`."""
    return _sum_flops(text, count_convolution_products)


def _sum_flops(
    text: str, count_products: Callable[[Computation, Instruction], tuple[str, int] | None]
) -> Mapping[str, int]:
    flops: dict[str, int] = {}
    for computation, instruction, execution in walk_instructions(text):
        if counted := count_products(computation, instruction):
            dtype, products = counted
            flops[dtype] = flops.get(dtype, 0) + 2 * products * count_runs(instruction, execution)
    return flops


def list_collectives(text: str, mesh: jax.sharding.Mesh) -> tuple[Collective, ...]:
    """Return the collectives of a program compiled for `mesh`, in the order of the text.

    A start and its done are one collective. The collectives of every branch of a conditional are listed.

    Raises:
        ValueError: the program is for another number of devices, or a collective is in a loop without a fixed trip
            count.
    """
    partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text)
    devices = int(partitions[1]) if partitions else 1
    if devices != mesh.size:
        raise ValueError(f"the program is for {devices} devices, the mesh has {mesh.size}")
    module = parse_module(text)
    return tuple(
        _make_collective(module, computation, instruction, execution, mesh)
        for computation, instruction, execution in walk_module(module)
        if instruction.opcode.removesuffix("-start") in COLLECTIVES
    )


def count_host_bytes(text: str) -> int:
    """Return the bytes that move between device and host memory, in both directions together.

    Bytes in a loop are multiplied by the trip counts of the loops around them.

    Raises:
        ValueError: a move is in a loop without a fixed trip count.
    """
    return sum(
        moved * count_runs(instruction, execution)
        for computation, instruction, execution in walk_instructions(text)
        if (moved := count_moved_bytes(computation, instruction))
    )


# ---- Matmuls.


def count_matmul_products(computation: Computation, instruction: Instruction) -> tuple[str, int] | None:
    """Return the dtype of the first operand and the multiply-adds of one run of a matmul; None for others.

    A matmul is a dot, a call of cuBLAS, or this package's kernel for the grouped matmuls of experts.
    """
    if _is_matmul(instruction):
        dtype = computation[instruction.operands[0]].results[0].dtype
        return dtype, math.prod(instruction.results[0].shape) * _contracted_size(computation, instruction)
    if grouped := grouped_matmul(computation, instruction):
        return grouped.dtype, grouped.products
    return None


def _is_matmul(instruction: Instruction) -> bool:
    return instruction.opcode == "dot" or bool(instruction.find(r'custom_call_target="(__cublas\$(?:gemm|lt\$matmul))'))


def _contracted_size(computation: Computation, matmul: Instruction) -> int:
    """Return the product of the contracted sizes: `lhs_contracting_dims={1}` or, in cuBLAS, `…_dimensions":["1"]`."""
    shape = computation[matmul.operands[0]].results[0].shape
    dimensions = matmul.find(r'\blhs_contracting_dim(?:ension)?s(?:=\{|":\[)([^\]}]*)') or ""
    return math.prod(shape[dimension] for dimension in parse_integers(dimensions))


# ---- Attention kernels.

_CUDNN = r'custom_call_target="__cudnn\$fmhaSoftmax((?:Backward)?)"'
_TRITON = r'custom_call_target="(__gpu\$xla\.gpu\.triton|triton_kernel_call_ffi)"'  # of Pallas; of jax-triton


def attention_kernel(computation: Computation, call: Instruction) -> tuple[str, str] | None:
    """Return the implementation of an attention kernel and its direction, or None for other instructions.

    A kernel of ours is recognized by its arrays. The first are q, k and v: q [..., S, H, K] or [..., S, H × K]; k and v
    have T rows. The forward has these three only.
    """
    if (suffix := call.find(_CUDNN)) is not None:
        return "cudnn", "backward" if suffix else "forward"
    if not (target := call.find(_TRITON)) or (arrays := _count_arrays(computation, call)) < 3:
        return None
    return "triton" if target.startswith("triton") else "pallas", "forward" if arrays == 3 else "backward"


def _count_arrays(computation: Computation, call: Instruction) -> int:
    """Return the number of operands of an attention kernel that are activations."""
    operands = (computation[name].results[0] for name in call.operands)
    return sum(array.dtype in ("bf16", "f16", "f32") and len(array.shape) >= 3 for array in operands)


def list_missing_workspaces(text: str) -> dict[str, int]:
    """Return the calls of cuDNN's attention that lack their workspace, by name, with the bytes of the workspace.

    cuDNN asks for it when it builds a kernel, so a program that was compiled without a GPU lacks it.
    """
    if "__cudnn$fmhaSoftmaxBackward" not in text:
        return {}
    found = {}
    for computation, call, _ in walk_instructions(text):
        if attention_kernel(computation, call) == ("cudnn", "backward") and call.results[-1].shape == (0,):
            head_dim = computation[call.operands[0]].results[0].shape[-1]
            segments, heads, length = computation[call.operands[3]].results[0].shape  # of the log-sum-exp
            found[call.name] = count_workspace(segments, length, heads, head_dim)
    return found


def count_attention_products(computation: Computation, call: Instruction) -> tuple[str, int] | None:
    """Return the dtype and the multiply-adds of an attention kernel, or None for other instructions.

    For each query and each key that it sees, the forward computes 2 products, a backward that returns the gradient of q
    computes 3, and one that returns the gradients of k and v computes 4. The one kernel of cuDNN's backward computes 5.

    A query sees the keys up to its own position, (T + 1) / 2 on average, or the keys of its window, or all keys without
    a causal order (see `attention_scope`). If the keys come in parts, each call with a causal order gets its share of
    these. Document boundaries are ignored. Masked products in the blocks on the diagonal, which a kernel also computes,
    are not counted.
    """
    kernel = attention_kernel(computation, call)
    if not kernel:
        return None
    operands = [computation[name].results[0] for name in call.operands]
    q, k = [array for array in operands if array.dtype in ("bf16", "f16", "f32") and len(array.shape) >= 3][:2]
    gradients = sum(len(array.shape) >= 4 for array in call.results)
    products = 2 if kernel[1] == "forward" else 5 if kernel[0] == "cudnn" else 2 + gradients
    scope = re.search(r"\bwithin_(\w+)_keys_in_(\d+)_parts", call.source)
    window, parts = (scope[1], int(scope[2])) if scope else ("all", 1)
    of_call = k.shape[-3] if len(k.shape) > 3 else k.shape[-2]
    if ALL_KEYS in call.source:
        return q.dtype, products * math.prod(q.shape) * of_call
    keys = parts * of_call
    visible = keys if window == "all" else min(int(window), keys)
    # The first queries see fewer keys than a window: subtract that triangle. Multiply by `keys` before the division, so
    # that nothing is rounded.
    pairs = 2 * visible * keys - visible * (visible - 1)
    return q.dtype, products * math.prod(q.shape) * pairs // (2 * keys * parts)


# ---- Grouped matmul kernels.


def filled_rows_scope(rows: int, capacity: int) -> contextlib.AbstractContextManager[Any]:
    """Return a named scope that records how many rows of a grouped matmul are filled on average.

    A kernel's program does not contain this number. The rows are sorted by group; `rows` of `capacity` are filled.
    """
    return jax.named_scope(f"filled_{rows}_of_{capacity}")


Leg = Literal["forward", "dx", "dw"]


@dataclass(frozen=True)
class GroupedMatmul:
    """Kernel of kernels/grouped_matmul_pallas.py. Letters: T rows, E groups, D and F sizes of a row before and after.

    Attributes:
        leg: the product, the gradient of the rows (by the transposed matrices), or the gradient of the matrices.
        shape: T, D, F.
        filled: rows of all groups together, on average; see `filled_rows_scope`.
    """

    leg: Leg
    dtype: str
    shape: tuple[int, int, int]
    groups: int
    filled: float

    @property
    def products(self) -> int:
        """Average multiply-adds of one run."""
        return int(self.filled * self.shape[1] * self.shape[2])


def grouped_matmul(computation: Computation, call: Instruction) -> GroupedMatmul | None:
    """Return the properties of a kernel for grouped matmuls, or None for other instructions.

    The operands of the kernel are the starts of the groups, the rows [T, D], and the matrices [E, D, F], transposed for
    dx; or, for dw, the rows of the gradient [T, F]. Square matrices count as not transposed.
    """
    if not (call.find(_TRITON) and (name := call.find(r'name = \\?"(_grouped_matmul\w*)'))):
        return None
    rows, weights = (computation[operand].results[0] for operand in call.operands[1:3])
    result = call.results[0].shape
    leg: Leg = "forward" if weights.shape[1] == rows.shape[1] else "dx"
    groups = weights.shape[0]
    if name.endswith("_weight_gradient"):
        leg, groups = "dw", result[0]
    share = re.search(r"\bfilled_(\d+)_of_(\d+)", call.source)
    filled, capacity = map(int, share.groups()) if share else (1, 1)
    (length, depth), columns = rows.shape, result[-1]
    return GroupedMatmul(leg, rows.dtype, (length, depth, columns), groups, length * filled / capacity)


# ---- Convolutions: calls of cuDNN on a GPU, `convolution` elsewhere.

_CUDNN_CONVOLUTION = r'custom_call_target="__cudnn\$conv(\w+)"'


def count_convolution_products(computation: Computation, instruction: Instruction) -> tuple[str, int] | None:
    """Return the dtype of the first operand and the multiply-adds of one run of a convolution; None for others.

    Each value of the output is a sum over the window and over the input channels of its group. The two backwards have
    the products of the forward. Zeros between the values of a dilated input count like other values.
    """
    kind = instruction.find(_CUDNN_CONVOLUTION) or ("Forward" if instruction.opcode == "convolution" else None)
    if kind is None:
        return None
    first, second = (_read_operand(computation, instruction, index) for index in (0, 1))
    result = instruction.results[0]
    if kind == "BackwardFilter":  # (input, gradient of the output) -> gradient of the kernel
        output, kernel = second, result
    elif kind == "BackwardInput":  # (gradient of the output, kernel) -> gradient of the input
        output, kernel = first, second
    else:
        output, kernel = result, second
    features = _read_kernel_labels(instruction).index("o")
    return first.dtype, math.prod(output.shape) * (math.prod(kernel.shape) // kernel.shape[features])


def _read_operand(computation: Computation, instruction: Instruction, index: int) -> Array:
    return computation[instruction.operands[index]].results[0]


def _read_kernel_labels(instruction: Instruction) -> str:
    """Return a label for each dimension of the kernel: `o` output features, `i` input features, 0, 1 the window."""
    labels = instruction.find(r"\bdim_labels=\w+?_(\w+)->")
    assert labels is not None, f"a convolution without dim_labels: {instruction.name}"
    return labels


# ---- Host memory.


def count_moved_bytes(computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that an instruction moves between device and host memory; 0 if they stay in one memory."""
    if instruction.opcode not in ("copy", "copy-start", "dynamic-slice", "dynamic-update-slice"):
        return 0
    updates = instruction.opcode == "dynamic-update-slice"
    source, result = computation[instruction.operands[1 if updates else 0]].results[0], instruction.results[0]
    on_host = ("S(5)" in source.layout, "S(5)" in result.layout)
    return (source if updates else result).bytes if on_host[0] != on_host[1] else 0


# ---- Collectives.


def _make_collective(
    module: Module, computation: Computation, instruction: Instruction, execution: Execution, mesh: jax.sharding.Mesh
) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    # The other operands of a ragged all-to-all are sizes.
    names = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
    arrays = [array for name in names for array in computation[name].results]
    groups = _parse_groups(instruction, mesh.size)
    size = max(len(group) for group in groups)
    return Collective(
        kind=kind,
        dtypes=tuple(dict.fromkeys(array.dtype for array in arrays)),
        array_bytes=sum(array.bytes for array in arrays) * (size if kind == "all-gather" else 1),
        group_size=size,
        axes=_find_axes(groups, mesh),
        times=count_runs(instruction, execution),
        source=instruction.source,
        name=instruction.name,
        module=module,
    )


def _find_axes(groups: list[list[int]], mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which the members of a group differ.

    Device ids are positions in the flattened devices of the mesh.
    """
    positions = [np.stack(np.unravel_index(group, mesh.axis_sizes)) for group in groups]
    return tuple(name for axis, name in enumerate(mesh.axis_names) if any(np.ptp(each[axis]) for each in positions))


def _parse_groups(collective: Instruction, devices: int) -> list[list[int]]:
    """Return the groups of devices that work together, from any of XLA's notations.

    - Listed: `replica_groups={{0,1},{2,3}}` or `source_target_pairs={{0,1},{1,0}}`. `replica_groups={}` means all
      devices.
    - Computed: `replica_groups=[2,2]<=[2,2]T(1,0)`. The ids 0, 1, … are reshaped to the shape after `<=`, transposed,
      and reshaped to [groups, members].
    - Named: `replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`. The last part names the axes of a group
      in a mesh that XLA defines. Without `device_ids` the ids are in order. `'a':(1)2` is the major half of axis `a`,
      `'a':(2)2` the minor half.
    """
    if listed := collective.find(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}"):
        return [parse_integers(group) for group in listed.split("}") if parse_integers(group)]
    if collective.find(r"(replica_groups=\{\})"):
        return [list(range(devices))]
    if computed := re.search(r"replica_groups=\[(\d+,\d+)\]<=(\S+?)(?:, |$)", collective.attributes):
        return [ids.tolist() for ids in _parse_device_ids(computed[2]).reshape(parse_integers(computed[1]))]
    if named := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", collective.attributes):
        return _parse_named_groups(*named.groups())
    raise ValueError(f"cannot read the devices of {collective.name}: {collective.attributes[:200]}")


def _parse_device_ids(text: str) -> np.ndarray:
    """Return a flat array of ids, from `[2,4]T(1,0)`, `[8]` or a plain list."""
    if not text.startswith("["):
        return np.array(parse_integers(text))
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(parse_integers(shape))).reshape(parse_integers(shape))
    return (ids.transpose(parse_integers(order)) if order else ids).flatten()


def _parse_named_groups(axes: str, device_ids: str | None, along: str) -> list[list[int]]:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = _parse_device_ids(device_ids) if device_ids else np.arange(math.prod(sizes.values()))
    # Key of a device's group: the device's position with the grouped parts set to 0.
    group = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), -1), strict=True))
    for name, above, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", along):
        part = int(size or sizes[name])
        below = sizes[name] // (int(above or 1) * part)
        group[name] = group[name] - group[name] // below % part * below
    members: dict[tuple[int, ...], list[int]] = {}
    for device, key in zip(ids.tolist(), zip(*group.values(), strict=True), strict=True):
        members.setdefault(key, []).append(device)
    return list(members.values())
