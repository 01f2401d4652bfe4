"""Kernels of a compiled program: the bytes that they read and write in GPU memory, and their time.

A kernel is an instruction that runs on its own: a fusion, a library call, a copy. Instructions inside a fusion do not
touch memory; the fusion's operands and results do. A fusion that reads a slice of an operand, such as one layer of a
stack, reads only the slice, and one that writes a layer into a stack writes only the layer.

The time of a kernel is, by the roofline, the longer of its products and its memory traffic. A convolution has the rate
of a matmul. One with few input channels in a group is limited by its memory traffic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.chips import PEAK_KEYS, Chip
from jaxopt_llm.compiler.hlo import count_convolution_products
from jaxopt_llm.compiler.instructions import Computation, Instruction, Module, count_executions, list_callees
from jaxopt_llm.planning.search import grouped_rate, roofline

CONTROL = ("while", "conditional", "call", "async-start")  # they run computations, and are no kernels themselves
_NO_WORK = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "domain", "async-update", "add-dependency"),
)
_SLICES = ("dynamic-slice", "slice", "gather")
# Updates in place, and the operand that holds the new values: a scatter too, if it assigns them.
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
_VIEWS = ("bitcast", "reshape")
_BY_VALUE = ("abs", "convert")  # of each value on its own: a slice of the result needs only that slice of the operand


def walk_kernels(module: Module) -> Iterator[tuple[Computation, Instruction, int]]:
    """Yield every kernel and collective, with its computation and its number of runs.

    A loop without a fixed trip count counts as one run. The end of an asynchronous instruction is not yielded.
    """
    instructions = [each for computation in module.values() for each in computation.values()]
    inside = {name for each in instructions if each.opcode not in CONTROL for name in list_callees(each)}
    for name, execution in count_executions(module).items():
        if name not in inside and execution.times != 0:
            runs = 1 if execution.times is None else execution.times
            yield from ((module[name], each, runs) for each in module[name].values() if is_kernel(each))


def is_kernel(instruction: Instruction) -> bool:
    """Return whether an instruction runs on its own, as a kernel or a collective. The end of a start does not."""
    return instruction.opcode not in (*CONTROL, *_NO_WORK) and not instruction.opcode.endswith("-done")


def list_fused(module: Module, kernel: Instruction) -> list[tuple[Computation, Instruction]]:
    """Return the instructions inside a fusion and inside its nested fusions; none for other instructions."""
    if not kernel.opcode.startswith("fusion"):
        return []
    body = module[list_callees(kernel)[0]]
    inner = [each for instruction in body.values() for each in list_fused(module, instruction)]
    return [*((body, instruction) for instruction in body.values()), *inner]


def count_kernel_bytes(module: Module, computation: Computation, kernel: Instruction) -> int:
    """Return the bytes that one run of a kernel reads and writes."""
    if kernel.opcode.startswith("fusion"):
        body = module[list_callees(kernel)[0]]
        parameters = [instruction for instruction in body.values() if instruction.opcode == "parameter"]
        return sum(_count_read(module, body, each.name) for each in parameters) + _count_written(module, body)
    operands = [array.bytes for name in kernel.operands if name in computation for array in computation[name].results]
    results = [array.bytes for array in kernel.results]
    if kernel.opcode in _SLICES:
        return 2 * sum(results)
    if _updates_in_place(module, kernel):
        return 2 * operands[_IN_PLACE[kernel.opcode]]
    if kernel.opcode == "copy-start":  # its results include the operand
        return 2 * sum(operands)
    if grouped := hlo.grouped_matmul(computation, kernel):  # of the rows, it reads those that are filled
        arrays = 2 if grouped.leg == "dw" else 1
        empty = 1 - grouped.filled / grouped.shape[0]
        return round(sum(operands) - empty * sum(operands[1 : 1 + arrays])) + sum(results)
    if kernel.find(r'custom_call_target="(__cublas)'):  # the other results are workspace
        return sum(operands) + results[0]
    return sum(operands) + sum(results)


def _count_read(module: Module, body: Computation, name: str, is_original: bool = True) -> int:
    """Return the bytes of an array that the instructions of a fusion read.

    is_original: the array is an operand of the fusion or a view of it, which an update may change in place.
    """
    whole, read = body[name].results[0].bytes, 0
    for user in body.values():
        if user.opcode == "constant" or name not in user.operands:
            continue
        if user.opcode in _SLICES and user.operands[0] == name:
            read += user.results[0].bytes
        elif user.is_root and user.opcode in (*_VIEWS, *_BY_VALUE):  # the fusion returns all of it
            return whole
        elif user.opcode in _VIEWS:
            read += _count_read(module, body, user.name, is_original)
        elif user.opcode in _BY_VALUE:  # of a whole stack, although only a slice may be used
            computed = _count_read(module, body, user.name, is_original=False)
            read += computed * whole // max(user.results[0].bytes, 1)
        elif user.opcode == "fusion":
            inner = module[list_callees(user)[0]]
            inputs = [each for each in inner.values() if each.opcode == "parameter"]
            read += sum(
                _count_read(module, inner, each.name) for each in inputs if user.operands[int(each.operands[0])] == name
            )
        elif (
            not _updates_in_place(module, user)
            or not is_original
            or name in user.operands[1:]
            or _is_read_inside(body, user)
        ):
            return whole
    return min(read, whole)


def _updates_in_place(module: Module, instruction: Instruction) -> bool:
    """Return whether an instruction assigns values to a part of its first operand."""
    if instruction.opcode == "scatter":
        combine = module[list_callees(instruction)[0]]
        root = next(each for each in combine.values() if each.is_root)
        return root.opcode == "parameter"
    return instruction.opcode in _IN_PLACE


def _is_read_inside(body: Computation, update: Instruction) -> bool:
    """Return whether a fusion computes with an updated array. If it only returns it, nothing else of it is read."""
    users = (user for user in body.values() if update.name in user.operands)
    return any(user.opcode != "tuple" and user.opcode not in _VIEWS for user in users)


def _count_written(module: Module, body: Computation) -> int:
    root = next(instruction for instruction in body.values() if instruction.is_root)
    outputs = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return sum(_count_output(module, body, output) for output in outputs)


def _count_output(module: Module, body: Computation, output: Instruction) -> int:
    """Return the bytes that a fusion writes for one of its outputs."""
    source = _look_through_views(body, output)
    is_update = _updates_in_place(module, source)
    if is_update and _look_through_views(body, body[source.operands[0]]).opcode == "parameter":
        return body[source.operands[_IN_PLACE[source.opcode]]].results[0].bytes
    return sum(array.bytes for array in output.results)


def _look_through_views(body: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _VIEWS:
        instruction = body[instruction.operands[0]]
    return instruction


@dataclass(frozen=True)
class KernelCost:
    """Work of one run of a kernel.

    Attributes:
        flops: FLOPs of matmuls and convolutions.
        bytes: bytes read and written in GPU memory.
    """

    flops: int
    bytes: int
    seconds: float


def estimate_kernel(
    module: Module,
    computation: Computation,
    kernel: Instruction,
    fused: Sequence[tuple[Computation, Instruction]],
    chip: Chip,
) -> KernelCost:
    """Return the work and the time of one run of a kernel.

    Args:
        fused: the instructions inside it (kernel_bytes.list_fused).

    Raises:
        KeyError: the chip has no matmuls in a dtype of the kernel.
    """
    flops, seconds = 0, 0.0
    for body, each in ((computation, kernel), *fused):
        counted = hlo.count_attention_products(body, each) or hlo.count_matmul_products(body, each)
        if counted := counted or count_convolution_products(body, each):
            dtype, products = counted
            flops += 2 * products
            seconds += roofline.seconds_of_matmuls(2 * products, chip, PEAK_KEYS[dtype], _efficiency(body, each, chip))
    moved = count_kernel_bytes(module, computation, kernel)
    return KernelCost(flops, moved, max(seconds, roofline.seconds_in_memory(moved, chip)))


def _efficiency(body: Computation, matmul: Instruction, chip: Chip) -> float:
    """Return the share of the chip's peak that a matmul, a convolution or an attention kernel attains."""
    if implementation_and_direction := hlo.attention_kernel(body, matmul):
        return roofline.kernel_efficiency(chip, *implementation_and_direction)
    if grouped := hlo.grouped_matmul(body, matmul):
        groups = grouped_rate.Groups(grouped.filled / grouped.groups, *grouped.shape[1:], PEAK_KEYS[grouped.dtype])
        return grouped_rate.find_efficiency(chip, grouped.leg, groups)
    return roofline.MATMUL_EFFICIENCY
