"""Time of a kernel by the roofline: the longer of its products and its memory traffic.

A convolution has the rate of a matmul. One with few input channels in a group is limited by its memory traffic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.chips import PEAK_KEYS, Chip
from jaxopt_llm.compiler.hlo import count_convolution_products
from jaxopt_llm.compiler.instructions import Computation, Instruction, Module
from jaxopt_llm.planning.kernel_bytes import count_kernel_bytes
from jaxopt_llm.planning.search import grouped_rate, roofline


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
