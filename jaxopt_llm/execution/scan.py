"""The scan executor: the whole model on every device, and its gradient JAX's own.

Letters: M microbatches, G gradient groups, B batch, S sequence.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm import tree
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.execution.gradients import Sums, add_sums, sum_over_groups, zero_sums
from jaxopt_llm.execution.stacks import RematConfig, model_stacks, no_taps, run_stacks
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Params, Parts, Segment
from jaxopt_llm.parallel.sharding import Placement


def make_executor(remat: RematConfig) -> Executor:
    return Executor(
        loss_and_gradients=functools.partial(loss_and_gradients, remat=remat),
        loss=functools.partial(loss, remat=remat),
    )


def loss_and_gradients(
    parts: Parts,
    trainable: Params,
    frozen: Params,
    batch: Batch,
    cotangent: jax.Array,
    placement: Placement,
    remat: RematConfig,
) -> tuple[jax.Array, jax.Array, Auxiliary, Params]:
    """See executor.py."""
    inside = placement.group()
    specs = tree.restrict(parts.specs, trainable)
    params = tree.merge(trainable, frozen)

    def objective(taps: Params, microbatch: Batch) -> tuple[jax.Array, tuple[jax.Array, Auxiliary]]:
        value, loss, auxiliary = microbatch_loss(parts, params, microbatch, cotangent, inside, remat, taps)
        return value + cotangent * auxiliary.loss, (loss, auxiliary)

    def one_microbatch(microbatch: Batch) -> Sums:  # fields [B / G, S]
        gradients, (loss, auxiliary) = jax.grad(objective, has_aux=True)(inside.taps(specs), microbatch)
        return loss, auxiliary, gradients

    def one_group(batch: Batch) -> Sums:  # fields [M, B / G, S]
        first = jax.tree.map(lambda x: x[0], batch)
        if batch.tokens.shape[0] == 1:
            return one_microbatch(first)  # in the reduction's dtype: a sum of one needs no float32 accumulator

        def accumulate(total: Sums, microbatch: Batch) -> tuple[Sums, None]:
            return add_sums(total, one_microbatch(microbatch), specs, inside), None

        return jax.lax.scan(accumulate, zero_sums(jax.eval_shape(one_microbatch, first), specs, inside), batch)[0]

    loss, auxiliary, gradients = sum_over_groups(one_group, batch, specs, placement)
    return loss, jnp.sum(batch.loss_mask), auxiliary, gradients


def loss(
    parts: Parts, params: Params, batch: Batch, placement: Placement, remat: RematConfig
) -> tuple[jax.Array, Auxiliary]:
    """See executor.py."""

    def one_microbatch(batch: Batch) -> tuple[jax.Array, Auxiliary]:
        return microbatch_loss(parts, params, batch, jnp.float32(1), placement, remat)[1:]

    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(one_microbatch, batch))


def microbatch_loss(
    parts: Parts,
    params: Params,
    batch: Batch,
    cotangent: jax.Array,
    placement: Placement,
    remat: RematConfig,
    taps: Params | None = None,
) -> tuple[jax.Array, jax.Array, Auxiliary]:
    """The head's objective and loss (see Parts) and the auxiliary sums of one microbatch, fields [B, S].

    taps: `placement.taps` of the parameters that want a gradient, None at the others; by default at all.
    """
    taps = no_taps(parts.specs) if taps is None else taps
    context = parts.make_context(batch, placement)
    outer = placement.place(parts.specs["outer"], params["outer"], taps["outer"], keep=True)
    x = parts.embed(outer, batch.tokens, context)
    x, _, auxiliary = run_stacks(parts, model_stacks(parts), params, taps, x, context, remat)
    return *parts.head_loss(outer, x, batch, context, cotangent), auxiliary


def forward(
    parts: Parts,
    params: Params,
    tokens: jax.Array,
    context: Context,
    caches: tree.Tree = None,
    only: jax.Array | None = None,
) -> tuple[jax.Array, tree.Tree]:
    """Logits float32 [B, S, V] of tokens [B, S], and the caches (see `make_caches`) with these tokens written.

    only: index of the token whose logits alone are wanted, [B, 1, V].
    """
    assert not context.placement.deals, "logits would come in the order in which a ring deals tokens"
    taps = no_taps(parts.specs)
    outer = context.placement.place(parts.specs["outer"], params["outer"], taps["outer"], keep=False)
    x = parts.embed(outer, tokens, context)
    x, caches, _ = run_stacks(parts, model_stacks(parts), params, taps, x, context, RematConfig("none"), caches)
    if only is not None:
        x = jax.lax.dynamic_slice_in_dim(x, only, 1, axis=1)
    return parts.logits(outer, x, context), caches


def make_caches(parts: Parts, batch: int, length: int, dtype: Any, placement: Placement) -> tree.Tree:
    """Empty caches of every layer, stacked as the layers are."""

    def stack(segment: Segment, position: int) -> tree.Tree:
        return parts.make_cache(segment.kinds[position], segment.repeats, batch, length, dtype, placement)

    return {
        f"segment_{number}": {f"block_{position}": stack(segment, position) for position in range(len(segment.kinds))}
        for number, segment in enumerate(parts.layout)
    }
