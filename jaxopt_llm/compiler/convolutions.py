"""Work of the convolutions in a compiled program: calls of cuDNN on a GPU, `convolution` elsewhere."""

import math
from collections.abc import Mapping

from jaxopt_llm.compiler.instructions import Array, Computation, Instruction, count_runs, walk_instructions

_CUDNN = r'custom_call_target="__cudnn\$conv(\w+)"'


def count_convolution_products(computation: Computation, instruction: Instruction) -> tuple[str, int] | None:
    """Return the dtype of the first operand and the multiply-adds of one run of a convolution; None for others.

    Each value of the output is a sum over the window and over the input channels of its group. The two backwards have
    the products of the forward. Zeros between the values of a dilated input count like other values.
    """
    kind = instruction.find(_CUDNN) or ("Forward" if instruction.opcode == "convolution" else None)
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


def count_convolution_flops(text: str) -> Mapping[str, int]:
    """Return the FLOPs of all convolutions by the dtype of the first operand; see hlo.count_dot_flops_by_dtype."""
    flops: dict[str, int] = {}
    for computation, instruction, execution in walk_instructions(text):
        if counted := count_convolution_products(computation, instruction):
            dtype, products = counted
            flops[dtype] = flops.get(dtype, 0) + 2 * products * count_runs(instruction, execution)
    return flops


def _read_operand(computation: Computation, instruction: Instruction, index: int) -> Array:
    return computation[instruction.operands[index]].results[0]


def _read_kernel_labels(instruction: Instruction) -> str:
    """Return a label for each dimension of the kernel: `o` output features, `i` input features, 0, 1 the window."""
    labels = instruction.find(r"\bdim_labels=\w+?_(\w+)->")
    assert labels is not None, f"a convolution without dim_labels: {instruction.name}"
    return labels
