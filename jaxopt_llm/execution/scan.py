"""The scan executor: one program runs all layers, without pipeline stages, and JAX differentiates it.

Letters: M microbatches, G gradient groups, B batch, S sequence, V vocabulary (padded).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.config import RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.execution.gradients import (
    Sums,
    add_sums,
    join_periods,
    split_periods,
    sum_over_groups,
    zero_sums,
)
from jaxopt_llm.execution.segments import LocalSegment, attach_non_layer, model_segments, no_perturbations, run_segments
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.gathering import make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.sequence import uses_zigzag
from jaxopt_llm.parallel.zero import inside_gradient_group


def make_executor(remat: RematConfig, unrolled: bool = False) -> Executor:
    """Return the executor. unrolled: without loops over the layers; the loss alone always has them."""
    return Executor(
        loss_and_gradients=functools.partial(loss_and_gradients, remat=remat, unrolled=unrolled),
        loss=functools.partial(loss, remat=remat),
    )


def loss_and_gradients(
    model: Model,
    trainable: Params,
    frozen: Params,
    batch: Batch,
    loss_weight: jax.Array,
    placement: Placement,
    remat: RematConfig,
    unrolled: bool = False,
) -> tuple[jax.Array, jax.Array, Auxiliary, Params]:
    """Return loss, number of tokens, auxiliary sums and gradients; see executor.py."""
    inside = inside_gradient_group(placement)
    specs = tree.restrict(model.specs, trainable)
    params = tree.merge(trainable, frozen)

    def objective(perturbations: Params, microbatch: Batch) -> tuple[jax.Array, tuple[jax.Array, Auxiliary]]:
        value, loss, auxiliary = microbatch_loss(
            model, params, microbatch, loss_weight, inside, remat, perturbations, unrolled
        )
        return value + loss_weight * auxiliary.loss, (loss, auxiliary)

    def one_microbatch(microbatch: Batch) -> Sums:  # fields [B / G, S]
        gradients, (loss, auxiliary) = jax.grad(objective, has_aux=True)(make_perturbations(specs, inside), microbatch)
        return loss, auxiliary, gradients

    def one_group(batch: Batch) -> Sums:  # fields [M, B / G, S]
        first = jax.tree.map(lambda x: x[0], batch)
        if batch.tokens.shape[0] == 1:
            return one_microbatch(first)  # in the reduction's dtype: a sum of one needs no float32 accumulator

        split = functools.partial(split_periods, specs) if unrolled else lambda leaves: leaves
        summed_specs = split(specs)

        def to_add(microbatch: Batch) -> Sums:
            loss, auxiliary, gradients = one_microbatch(microbatch)
            return loss, auxiliary, split(gradients)

        def accumulate(total: Sums, microbatch: Batch) -> tuple[Sums, None]:
            return add_sums(total, to_add(microbatch), summed_specs, inside), None

        zeros = zero_sums(jax.eval_shape(to_add, first), summed_specs, inside)
        loss, auxiliary, gradients = jax.lax.scan(accumulate, zeros, batch)[0]
        return loss, auxiliary, join_periods(gradients)

    loss, auxiliary, gradients = sum_over_groups(one_group, batch, specs, placement)
    return loss, jnp.sum(batch.loss_mask), auxiliary, gradients


def loss(
    model: Model, params: Params, batch: Batch, placement: Placement, remat: RematConfig
) -> tuple[jax.Array, Auxiliary]:
    """Return the loss and the auxiliary sums; see executor.py."""

    def one_microbatch(batch: Batch) -> tuple[jax.Array, Auxiliary]:
        return microbatch_loss(model, params, batch, jnp.float32(1), placement, remat)[1:]

    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(one_microbatch, batch))


def microbatch_loss(
    model: Model,
    params: Params,
    batch: Batch,
    loss_weight: jax.Array,
    placement: Placement,
    remat: RematConfig,
    perturbations: Params | None = None,
    unrolled: bool = False,
) -> tuple[jax.Array, jax.Array, Auxiliary]:
    """Return the head's objective and loss and the auxiliary sums of one microbatch, fields [B, S].

    The objective is differentiated: the loss with the z-loss, times `loss_weight`. The loss is reported: the sum of the
    cross-entropy.

    perturbations: `make_perturbations` of the parameters with a gradient, and None for the others; by default for all.
    """
    perturbations = no_perturbations(model.specs) if perturbations is None else perturbations
    context = model.make_context(batch, placement)
    non_layer = attach_non_layer(model.specs, params, perturbations, placement)
    x = model.embed(non_layer, batch.tokens, context)
    x, _, auxiliary = run_segments(model, model_segments(model, unrolled), params, perturbations, x, context, remat)
    return *model.loss(non_layer, x, batch, context, loss_weight), auxiliary


def forward(
    model: Model,
    params: Params,
    tokens: jax.Array,
    context: Context,
    caches: tree.Tree = None,
    only: jax.Array | None = None,
) -> tuple[jax.Array, tree.Tree]:
    """Return the logits of tokens [B, S], float32 [B, S, V], and the caches with these tokens written.

    caches: see `make_caches`. only: index of a position; the logits are then those of this position, [B, 1, V].
    """
    assert not uses_zigzag(context.placement), "logits would be in zigzag order"
    perturbations = no_perturbations(model.specs)
    non_layer = attach_non_layer(model.specs, params, perturbations, context.placement)
    x = model.embed(non_layer, tokens, context)
    x, caches, _ = run_segments(
        model, model_segments(model), params, perturbations, x, context, RematConfig("none"), caches
    )
    if only is not None:
        x = jax.lax.dynamic_slice_in_dim(x, only, 1, axis=1)
    return model.logits(non_layer, x, context), caches


def make_caches(model: Model, batch: int, length: int, dtype: Any, placement: Placement) -> tree.Tree:
    """Return the empty caches of every layer for `batch` sequences of `length` tokens, stacked as the layers are."""

    def make_cache(segment: LocalSegment, position: int) -> tree.Tree:
        return model.make_cache(segment.kinds[position], segment.periods, batch, length, dtype, placement)

    return {
        name: {f"block_{position}": make_cache(segment, position) for position in range(len(segment.kinds))}
        for name, segment in model_segments(model).items()
    }
