"""Kernels next to which a layer's weights are gathered, and its gradients reduced, by arithmetic.

Layers run in a loop, and a transfer runs next to the kernels of its own trip. XLA therefore leaves the first gather and
the last reduction of a trip next to no kernel. Between them it has little for the reductions: it forms the gradients of
weights at the end of a backward, and takes these matmuls for so long (docs/sharding.md) that a single one of the MLP
seems to hide all reductions. They begin next to the last of the MLP; the gradients of attention's weights follow.

In a layer with experts the gathers of their weights are the longest. XLA begins them first, and the first matmul of the
layer waits until they have ended, because its own weights come after them.
"""

from collections.abc import Set
from dataclasses import dataclass

from jaxopt_llm.compiler.chips import Chip
from jaxopt_llm.config import Config
from jaxopt_llm.execution.segments import QKV
from jaxopt_llm.planning.search.block_cost import BlockCost, Result
from jaxopt_llm.planning.search.microbatch import count_tokens
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.planning.search.roofline import seconds_of_matmuls

ATTENTION: frozenset[Result] = frozenset({*QKV, "attention_output"})
FIRST: Result = "query"  # the first large weights of a forward; their gradients are the last of a backward
LAST: Result = "mlp_output"


@dataclass(frozen=True)
class LayerOverlap:
    """Overlap of the transfers of layers in a step.

    gathered_alone, reduced_alone: shares of the gathers and of the reductions that move next to no kernel.
    reducing: seconds of the kernels next to which the other reductions move.
    """

    gathered_alone: float
    reduced_alone: float
    reducing: float


def find_layer_overlap(
    config: Config, chip: Chip, block: BlockCost, passes: Passes, recomputed: Set[Result]
) -> LayerOverlap:
    """Return the overlap of the transfers of layers.

    Args:
        recomputed: results that a backward computes again.
    """
    weights, whole = block.weights, sum(block.weights.values())
    # A backward begins with the last weights, unless it first runs the layer again from its beginning.
    first_of_backward = FIRST if FIRST in recomputed else LAST
    first = passes.forwards * weights[FIRST] + passes.backwards * weights[first_of_backward]
    beside = weights[LAST] + sum(number for name, number in weights.items() if name in ATTENTION)
    flops = 2 * count_tokens(config) * beside * passes.layers * passes.backwards
    return LayerOverlap(
        gathered_alone=1.0 if config.model.moe.experts else first / (whole * (passes.forwards + passes.backwards)),
        reduced_alone=weights[FIRST] / whole,
        reducing=seconds_of_matmuls(flops, chip, config.precision.compute_dtype),
    )
