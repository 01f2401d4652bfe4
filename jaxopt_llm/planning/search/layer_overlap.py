"""Kernels next to which a layer's weights are gathered, and its gradients reduced, by arithmetic.

Layers run in a loop, and a transfer runs next to the kernels of its own trip. XLA therefore leaves the first gather and
the last reduction of a trip next to no kernel. Between them it has little for the reductions: it forms the gradients of
weights at the end of a backward, and takes these matmuls for so long (docs/sharding.md) that a single one of the MLP
seems to hide all reductions. They begin next to the last of the MLP; the gradients of attention's weights follow.

In a layer with experts the gathers of their weights are the longest. XLA begins them first, and the first matmul of the
layer waits until they have ended, because its own weights come after them.
"""

import functools
from dataclasses import dataclass

from jaxopt_llm.compiler.chips import Chip
from jaxopt_llm.config import Config, RematConfig
from jaxopt_llm.planning.search.block_cost import BlockCost, LayerCost
from jaxopt_llm.planning.search.microbatch import count_tokens
from jaxopt_llm.planning.search.passes import Passes
from jaxopt_llm.planning.search.roofline import seconds_of_matmuls


@dataclass(frozen=True)
class LayerOverlap:
    """Overlap of the transfers of layers in a step.

    gathered_alone, reduced_alone: shares of the gathers and of the reductions that move next to no kernel.
    reducing: seconds of the kernels next to which the other reductions move.
    """

    gathered_alone: float
    reduced_alone: float
    reducing: float


def find_layer_overlap(config: Config, chip: Chip, block: BlockCost, passes: Passes) -> LayerOverlap:
    """Return the overlap of the transfers of layers."""
    first, first_of_backward, beside = _count_at_ends(block, config.remat)
    whole = block.count_forward()
    alone = passes.forwards * first + passes.backwards * first_of_backward
    flops = 2 * count_tokens(config) * beside * passes.layers * passes.backwards
    return LayerOverlap(
        gathered_alone=1.0 if config.model.moe.experts else alone / (whole * (passes.forwards + passes.backwards)),
        reduced_alone=first / whole,
        reducing=seconds_of_matmuls(flops, chip, config.precision.compute_dtype),
    )


@functools.cache
def _count_at_ends(block: BlockCost, remat: RematConfig) -> tuple[float, float, float]:
    """Return the sizes of the first weights of a forward, of a backward, and of those next to which reductions run."""

    def runs_again(layer: LayerCost, index: int) -> bool:
        return _is_first(layer, index) and index in layer.follow_backward(remat).products

    first, last = block.count_multiplied(_is_first), block.count_multiplied(_is_last)
    attention = block.count_multiplied(lambda layer, index: layer.trace.products[index].module == "attention")
    # A backward begins with the last weights, unless it first runs the layer again from its beginning.
    first_of_backward = block.count_multiplied(runs_again) or last
    return first, first_of_backward, last + attention


def _is_first(layer: LayerCost, index: int) -> bool:
    """Return whether a product makes the first result of a layer; its gradients are the last of a backward."""
    return _get_result(layer, index) == _get_result(layer, 0)


def _is_last(layer: LayerCost, index: int) -> bool:
    return _get_result(layer, index) == _get_result(layer, -1)


def _get_result(layer: LayerCost, index: int) -> str | None:
    result = layer.trace.products[index].result
    return None if result is None else result.name
