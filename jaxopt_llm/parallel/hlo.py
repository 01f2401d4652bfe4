"""Reads a compiled program: its memory, its FLOPs, and what it moves between devices.

Bytes in memory come from `Compiled.memory_analysis()`, the rest from the HLO text, `Compiled.as_text()`. That is the
program of one device (SPMD), so every number here is per device. XLA's terms are kept: a module has computations, a
computation has instructions. The notations are those that jax 0.10.2 and 0.11.2 print for CPU and GPU.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

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

    Counted are dots, also in fusions, and calls of cuBLAS; every branch of a conditional counts once. Not counted are
    kernels (Pallas, Triton, cuDNN), convolutions, and products with a vector that XLA writes as multiply and reduce.

    Raises:
        ValueError: a matmul is in a loop without a fixed trip count.
    """
    flops: dict[str, int] = {}
    for computation, instruction, run in _walk(text):
        if _is_matmul(instruction):
            operand = computation[instruction.operands[0]].results[0]
            products = math.prod(instruction.results[0].shape) * _contracted(computation, instruction)
            flops[operand.dtype] = flops.get(operand.dtype, 0) + 2 * products * _times(instruction, run)
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
        for computation, instruction, run in _walk(text)
        if instruction.opcode.removesuffix("-start") in COLLECTIVES
    )


def host_traffic(text: str) -> int:
    """Bytes that pass between the device and host memory, both ways together, times the trip counts of the loops
    around.

    Raises:
        ValueError: what moves is in a loop without a fixed trip count.
    """
    return sum(
        moved * _times(instruction, run)
        for computation, instruction, run in _walk(text)
        if (moved := _moved_between_memories(computation, instruction))
    )


def instruction_count(text: str) -> int:
    """Instructions in all computations, however often they run: the size of the program that XLA compiled."""
    return sum(len(computation) for computation in _parse(text).values())


def array_shapes(text: str) -> Iterator[ArrayShape]:
    """Every array that an instruction results in; a result that is a tuple gives each of its arrays.

    The same memory can appear several times, in tuples and under other shapes (`bitcast`): look for sizes rather than
    shapes, and take maxima rather than sums.
    """
    for _, instruction, run in _walk(text):
        for array in instruction.results:
            yield ArrayShape(array.dtype, array.shape, array.bytes, instruction.opcode, run.fused, instruction.source)


# ---- Text to instructions.


@dataclass(frozen=True)
class _Array:
    dtype: str
    shape: tuple[int, ...]
    layout: str = ""  # {1,0}; {1,0:S(5)} in host memory

    @property
    def bytes(self) -> int:
        if self.dtype == "pred":
            return math.prod(self.shape)
        bits = re.search(r"\d+", self.dtype)  # the first number of bf16, s4, f8e4m3fn; token and opaque have none
        return (math.prod(self.shape) * int(bits[0] if bits else 0) + 7) // 8


@dataclass(frozen=True)
class _Instruction:
    name: str
    opcode: str
    results: tuple[_Array, ...]
    operands: tuple[str, ...]  # names in the same computation; of a constant, its value
    attributes: str
    is_root: bool

    def find(self, pattern: str) -> str | None:
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def source(self) -> str:
        return self.find(r'op_name="([^"]*)"') or ""


_Computation = Mapping[str, _Instruction]
_Module = Mapping[str, _Computation]  # in the order of the text, callees before callers; the entry is named ENTRY

_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")  # %name (parameters) -> type {
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")  # %name = type opcode(operands), attributes
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")  # f32[8,<=16]{1,0}


def _parse(text: str) -> _Module:
    module: dict[str, dict[str, _Instruction]] = {}
    computation: dict[str, _Instruction] = {}
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            computation[match[2]] = _parse_instruction(match[2], line[match.end() :], is_root=bool(match[1]))
        elif match := _HEADER.match(line):
            computation = module["ENTRY" if match[1] else match[2]] = {}
    if "ENTRY" not in module:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
    return module


def _parse_instruction(name: str, text: str, is_root: bool) -> _Instruction:
    type_end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opcode_end = text.index("(", type_end)
    operands_end = _closing(text, opcode_end)
    operands = re.sub(r"/\*.*?\*/", "", text[opcode_end:operands_end])  # /*index=5*/
    return _Instruction(
        name=name,
        opcode=text[type_end:opcode_end].strip(),
        results=tuple(
            _Array(dtype, tuple(_integers(shape)), layout) for dtype, shape, layout in _ARRAY.findall(text[:type_end])
        ),
        operands=tuple(re.findall(r"[\w.-]+", operands)),
        attributes=text[operands_end:],
        is_root=is_root,
    )


def _closing(text: str, start: int) -> int:
    """The index past the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced parentheses in the HLO text at {text[start : start + 80]!r}")


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# ---- How often a computation runs.


@dataclass(frozen=True)
class _Run:
    times: int | None = 0  # over all its callers; None where a loop has no fixed trip count
    fused: bool = False
    asynchronous: bool = False


def _walk(text: str) -> Iterator[tuple[_Computation, _Instruction, _Run]]:
    """Every instruction that can run, with the computation that it is in."""
    module = _parse(text)
    runs = _runs(module)
    for name, computation in module.items():
        if runs[name].times != 0:
            yield from ((computation, instruction, runs[name]) for instruction in computation.values())


def _runs(module: _Module) -> Mapping[str, _Run]:
    runs = dict.fromkeys(module, _Run()) | {"ENTRY": _Run(times=1)}
    for name, computation in reversed(list(module.items())):  # callers first
        run = runs[name]
        for instruction in computation.values():
            trips = _trip_count(module, computation, instruction) if instruction.opcode == "while" else 1
            for callee in _called(instruction):
                past = runs[callee]
                times = None
                if past.times is not None and run.times is not None and trips is not None:
                    times = past.times + run.times * trips
                runs[callee] = _Run(
                    times=times,
                    fused=past.fused or run.fused or instruction.opcode.startswith("fusion"),
                    asynchronous=past.asynchronous or run.asynchronous or instruction.opcode.endswith("-start"),
                )
    return runs


def _called(instruction: _Instruction) -> list[str]:
    attributes = instruction.attributes.partition(", metadata=")[0]
    names = re.findall(r"\b(?:calls|to_apply|condition|body|\w+_computations?)=(\{[^}]*\}|[%\w.-]+)", attributes)
    return re.findall(r"[\w.-]+", " ".join(names))


def _trip_count(module: _Module, computation: _Computation, loop: _Instruction) -> int | None:
    """What XLA states in a compiled program; else read off a loop that counts by 1 up to a constant."""
    if known := loop.find(r'"known_trip_count":\{"n":"(\d+)"\}'):
        return int(known)
    condition, body = (module[loop.find(rf"\b{part}=%?([\w.-]+)") or ""] for part in ("condition", "body"))
    initial, update = computation[loop.operands[0]], _root(body)
    test = _scalar(module, condition, _root(condition).name)
    if (initial.opcode, update.opcode) != ("tuple", "tuple") or not isinstance(test, tuple) or test[0] != "LT":
        return None
    _, counter, limit = test
    if not isinstance(counter, tuple) or counter[0] != "element":
        return None
    start, step = (
        _scalar(module, where, each.operands[counter[1]]) for where, each in ((computation, initial), (body, update))
    )
    counts = step in (("add", counter, 1), ("add", 1, counter))
    return limit - start if counts and isinstance(start, int) and isinstance(limit, int) else None


_Scalar = Any  # an integer, ("element", index) of the loop's state, ("add" or "LT", _Scalar, _Scalar), or None


def _scalar(module: _Module, computation: _Computation, name: str, arguments: Sequence[_Scalar] = ()) -> _Scalar:
    """What a loop counts with, through the copies and fusions that XLA wraps it in. arguments: of a fusion."""
    instruction = computation[name]

    def operands() -> list[_Scalar]:
        return [_scalar(module, computation, each, arguments) for each in instruction.operands]

    match instruction.opcode:
        case "constant":
            text = instruction.operands[0]
            return int(text) if text.isdigit() else None
        case "get-tuple-element":
            return "element", int(instruction.find(r"\bindex=(\d+)") or -1)
        case "parameter":
            return arguments[int(instruction.operands[0])] if arguments else None
        case "copy":
            return operands()[0]
        case "fusion":
            callee = module[_called(instruction)[0]]
            return _scalar(module, callee, _root(callee).name, operands())
        case "add":
            return "add", *operands()
        case "compare":
            return (instruction.find(r"direction=(\w+)"), *operands())
    return None


def _root(computation: _Computation) -> _Instruction:
    return next(instruction for instruction in computation.values() if instruction.is_root)


def _times(instruction: _Instruction, run: _Run) -> int:
    if run.times is None:
        raise ValueError(f"{instruction.name} ({instruction.source}) is in a loop without a fixed trip count")
    return run.times


# ---- Matmuls.


def _is_matmul(instruction: _Instruction) -> bool:
    return instruction.opcode == "dot" or bool(instruction.find(r'custom_call_target="(__cublas\$(?:gemm|lt\$matmul))'))


def _contracted(computation: _Computation, matmul: _Instruction) -> int:
    """The product of the contracted sizes: `lhs_contracting_dims={1}` or, in cuBLAS, `…_dimensions":["1"]`."""
    shape = computation[matmul.operands[0]].results[0].shape
    dimensions = matmul.find(r'\blhs_contracting_dim(?:ension)?s(?:=\{|":\[)([^\]}]*)') or ""
    return math.prod(shape[dimension] for dimension in _integers(dimensions))


# ---- Host memory.


def _moved_between_memories(computation: _Computation, instruction: _Instruction) -> int:
    """Bytes; 0 of what stays in one memory."""
    if instruction.opcode not in ("copy", "copy-start", "dynamic-slice", "dynamic-update-slice"):
        return 0
    updates = instruction.opcode == "dynamic-update-slice"
    source, result = computation[instruction.operands[1 if updates else 0]].results[0], instruction.results[0]
    on_host = ("S(5)" in source.layout, "S(5)" in result.layout)
    return (source if updates else result).bytes if on_host[0] != on_host[1] else 0


# ---- Collectives.


def _collective(computation: _Computation, instruction: _Instruction, run: _Run, mesh: jax.sharding.Mesh) -> Collective:
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
        times=_times(instruction, run),
        asynchronous=started and not instruction.find('("is_sync":true)'),  # XLA so marks a start that overlaps nothing
        source=instruction.source,
    )


def _axes(groups: list[list[int]], mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ. Ids are positions in the mesh's flattened devices."""
    positions = [np.stack(np.unravel_index(group, mesh.axis_sizes)) for group in groups]
    return tuple(
        name for axis, name in enumerate(mesh.axis_names) if any(np.ptp(position[axis]) for position in positions)
    )


def _groups(collective: _Instruction, devices: int) -> list[list[int]]:
    """The devices that work together, in any of XLA's notations.

    Listed: `replica_groups={{0,1},{2,3}}`, where `{}` is all, and `source_target_pairs={{0,1},{1,0}}`.
    Computed: `replica_groups=[2,2]<=[2,2]T(1,0)`, the ids 0, 1, … shaped, transposed and reshaped to groups × members.
    Named: `replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}`, the axes along which a group lies, in a
    mesh of XLA's own, with ids in order if none are given. Of `a`, `'a':(1)2` is the major half, `'a':(2)2` the minor.
    """
    if listed := collective.find(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}"):
        return [_integers(group) for group in listed.split("}") if _integers(group)]
    if collective.find(r"(replica_groups=\{\})"):
        return [list(range(devices))]
    if computed := re.search(r"replica_groups=\[(\d+,\d+)\]<=(\S+?)(?:, |$)", collective.attributes):
        return [ids.tolist() for ids in _device_ids(computed[2]).reshape(_integers(computed[1]))]
    if named := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", collective.attributes):
        return _named_groups(*named.groups())
    raise ValueError(f"cannot read the devices of {collective.name}: {collective.attributes[:200]}")


def _device_ids(text: str) -> np.ndarray:
    """Ids, flat, from `[2,4]T(1,0)`, `[8]` or a plain list."""
    if not text.startswith("["):
        return np.array(_integers(text))
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return (ids.transpose(_integers(order)) if order else ids).flatten()


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
