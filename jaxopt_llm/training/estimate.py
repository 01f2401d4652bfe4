"""The peak of a step on each device, by arithmetic on specs and shapes alone: to tell settings apart in milliseconds.

What rests is exact. Temporaries are those of the moments at which a step can hold most: while the loss is formed, in
the backward of one layer, and where gradients are summed over devices. What XLA does beyond (copies, what it computes
early) is left out: a difference of two estimates says more than either.
"""

import math
from dataclasses import dataclass

import jax
import numpy as np

from jaxopt_llm import tree
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model import param
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import padded_vocabulary
from jaxopt_llm.parallel.mesh import gathers_ahead
from jaxopt_llm.parallel.offload import HOST, resting_bytes
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training.activations import Activations
from jaxopt_llm.training.program import Program
from jaxopt_llm.training.step import TrainingConfig


@dataclass(frozen=True)
class Estimate:
    """Bytes on each device; host: of host memory for it. kept: activations between forward and backward; at_loss,
    in_backward, in_reduction: what there is beside what rests, at these moments, and beside `kept` at the first two."""

    resting: int
    host: int
    kept: int
    at_loss: int
    in_backward: int
    in_reduction: int

    @property
    def peak(self) -> int:
        return self.resting + max(self.kept + max(self.at_loss, self.in_backward), self.in_reduction)


def estimate(
    program: Program, model: ModelConfig, training: TrainingConfig, remat: RematConfig, placement: Placement
) -> Estimate:
    """Of a program that need not be compiled; the placement's mesh may be abstract."""
    precision, stage = placement.precision, placement.sharding.zero_stage
    compute, reduced = (np.dtype(each).itemsize for each in (precision.compute_dtype, precision.reduce_dtype))
    specs, trained, state = program.parts.specs, program.specs.masters, program.state
    activations = Activations(model, training, placement)

    def values(specs: tree.Tree, place: str = "gathered") -> int:
        return sum(
            math.prod(getattr(placement, place)(spec).shard_shape(spec.shape)) for spec in jax.tree.leaves(specs)
        )

    def of_layer(specs: tree.Tree) -> int:
        """Of the largest block, while it is used."""
        return max(values(param.layer_specs(block)) for blocks in _stacks(specs) for block in blocks.values())

    gradients = values(trained, "gradients")
    # Of several microbatches the sum is in float32, beside what one of them adds.
    summed = 4 * gradients if training.accumulation > 1 else 0
    cast = compute if stage in (0, 3) else 0  # in the others the copy that rests is used as it is
    # See parallel/mesh.py: one layer's weights more, and masks that XLA then keeps.
    ahead = stage == 3 and placement.size("fsdp") > 1 and gathers_ahead(placement.mesh, training.accumulation)
    tokens = activations.tokens
    chunk = min(training.loss_chunk or tokens, tokens)
    logits = chunk * padded_vocabulary(model.vocabulary_size)

    at_rest = (state.masters, state.compute, state.frozen, state.moments)
    layers = sum(_slots(blocks) * len(blocks) for blocks in _stacks(specs))  # on one device
    group = min(remat.every, layers)
    kept = compute * sum(map(activations.values, activations.kept(remat)))
    inputs = compute * activations.values("block_input")
    stages = placement.size("pipeline")
    again = group * (kept + reduced * gradients // layers) if group > 1 else 0
    return Estimate(
        resting=resting_bytes(at_rest),
        host=resting_bytes(at_rest, HOST) + layers * compute * sum(map(activations.values, remat.offload)),
        kept=(layers // group * inputs if group > 1 else layers * kept)
        + (2 * stages - 1 if stages > 1 else 0) * inputs,
        at_loss=summed
        # In float32, and their gradients as the products read them.
        + (4 + compute) * logits // placement.size("tensor")
        + cast * values(_head(specs))
        # Of several chunks the sum, beside what one of them adds.
        + (8 if chunk < tokens else 4) * values(_head(trained)),
        in_backward=summed
        + reduced * gradients
        + again
        + (1 + ahead) * cast * of_layer(specs)
        + (activations.masks if ahead else 0)
        + (reduced * of_layer(trained) if stage >= 2 else 0)  # whole, before it is divided
        + activations.in_layer(compute),
        in_reduction=summed + reduced * gradients + (4 * values(trained, "masters") if stage == 1 else 0),
    )


def _stacks(specs: tree.Tree) -> list[tree.Tree]:
    return [blocks for name, blocks in specs.items() if name != "outer"]


def _slots(blocks: tree.Tree) -> int:
    """Of a segment on one device: those of its stage, where there is a pipeline."""
    numbers = param.layers(blocks)
    return 0 if numbers is None else numbers.shape[-1]


def _head(specs: tree.Tree) -> tree.Tree:
    return specs["outer"].get("head") or specs["outer"]["embedding"]
