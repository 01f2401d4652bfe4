"""The scan executor: each segment's stack is a `lax.scan`, and its gradient is JAX's own.

Letters: M microbatches, G gradient groups, B batch, S sequence.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxopt_llm import tree
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.model import param
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Auxiliary, Params, Parts, Segment
from jaxopt_llm.parallel.sharding import Placement


@dataclass(frozen=True)
class RematConfig:
    policy: Literal["none", "full"] = "full"
    """what the backward recomputes: none keeps all but what is elementwise, full keeps each block's input alone"""


def make_executor(remat: RematConfig) -> Executor:
    return Executor(
        loss_and_gradients=functools.partial(loss_and_gradients, remat=remat),
        loss=functools.partial(loss_sum, remat=remat),
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
    """See executor.py. Sums microbatch by microbatch within each gradient group, then over the groups once: see
    Placement.gradient_groups."""
    groups = placement.gradient_groups
    inside = placement.group()
    specs = tree.restrict(parts.specs, trainable)
    params = tree.merge(trainable, frozen)

    def objective(taps: Params, microbatch: Batch) -> tuple[jax.Array, tuple[jax.Array, Auxiliary]]:
        loss, auxiliary = loss_sum(parts, params, microbatch, inside, remat, taps)
        return cotangent * (loss + auxiliary.loss), (loss, auxiliary)

    def one_microbatch(microbatch: Batch) -> tuple[jax.Array, Auxiliary, Params]:  # fields [B / G, S]
        gradients, (loss, auxiliary) = jax.grad(objective, has_aux=True)(inside.taps(specs), microbatch)
        return loss, auxiliary, gradients

    def one_group(batch: Batch) -> tuple[jax.Array, Auxiliary, Params]:  # fields [M, B / G, S]
        first = jax.tree.map(lambda x: x[0], batch)
        if batch.tokens.shape[0] == 1:
            return one_microbatch(first)  # in the reduction's dtype: a sum of one needs no float32 accumulator

        def accumulate(total: Any, microbatch: Batch) -> tuple[Any, None]:
            added = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, one_microbatch(microbatch))
            return place(added), None

        def place(total: tuple[jax.Array, Auxiliary, Params]) -> tuple[jax.Array, Auxiliary, Params]:
            shardings = jax.tree.map(inside.gradients, specs)
            return (*total[:2], jax.lax.with_sharding_constraint(total[2], shardings))

        shapes = jax.eval_shape(one_microbatch, first)
        zeros = place(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes))
        return jax.lax.scan(accumulate, zeros, batch)[0]

    if not groups:
        loss, auxiliary, gradients = one_group(batch)
    else:
        count = placement.size(*groups)
        grouped = jax.tree.map(lambda x: x.reshape(x.shape[0], count, -1, x.shape[-1]), batch)  # [M, G, B / G, S]
        loss, auxiliary, gradients = jax.vmap(one_group, in_axes=1, spmd_axis_name=groups)(grouped)
        loss, auxiliary = jax.tree.map(lambda x: jnp.sum(x, axis=0), (loss, auxiliary))
        gradients = {section: _sum_groups(specs[section], gradients[section], placement) for section in gradients}
    return loss, jnp.sum(batch.loss_mask), auxiliary, gradients


def _sum_groups(specs: Params, gradients: Params, placement: Placement) -> Params:
    """Gradients [G, ...] of one segment, or of the leaves outside the stacks, summed over their groups."""
    repeats = param.repeats(specs)
    # Whole where every device keeps everything: a loop would hold both its operand and its result.
    if repeats is None or not placement.divides_masters:
        return jax.tree.map(placement.reduce_groups, specs, gradients)
    layer_specs = param.layer_specs(specs)

    # A layer at a time where each device keeps a part: XLA would scatter transposed copies of whole stacks.
    def layer(index: jax.Array) -> Params:
        one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), gradients)
        return jax.tree.map(placement.reduce_groups, layer_specs, one)

    return jax.lax.map(layer, jnp.arange(repeats))


def loss_sum(
    parts: Parts, params: Params, batch: Batch, placement: Placement, remat: RematConfig, taps: Params | None = None
) -> tuple[jax.Array, Auxiliary]:
    """The loss summed over the real tokens of one microbatch, fields [B, S].

    taps: `placement.taps` of the parameters that want a gradient, None at the others; by default at all.
    """
    taps = _no_taps(parts) if taps is None else taps
    context = parts.make_context(batch, placement)
    outer = placement.place(parts.specs["outer"], params["outer"], taps["outer"], keep=True)
    x = parts.embed(outer, batch.tokens, context)
    x, _, auxiliary = _blocks(parts, params, taps, x, context, remat)
    return parts.head_loss(outer, x, batch, context), auxiliary


def forward(
    parts: Parts, params: Params, tokens: jax.Array, context: Context, caches: tree.Tree = None
) -> tuple[jax.Array, tree.Tree]:
    """Logits float32 [B, S, V] of tokens [B, S], and the caches (see `make_caches`) with these tokens written."""
    taps = _no_taps(parts)
    outer = context.placement.place(parts.specs["outer"], params["outer"], taps["outer"], keep=False)
    x = parts.embed(outer, tokens, context)
    x, caches, _ = _blocks(parts, params, taps, x, context, RematConfig("none"), caches)
    return parts.logits(outer, x, context), caches


def make_caches(parts: Parts, batch: int, length: int, dtype: Any) -> tree.Tree:
    """Empty caches of every layer, stacked as the layers are."""

    def stack(segment: Segment, position: int) -> tree.Tree:
        one = parts.make_cache(segment.kinds[position], batch, length, dtype)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (segment.repeats, *x.shape)), one)

    return {
        f"segment_{number}": {f"block_{position}": stack(segment, position) for position in range(len(segment.kinds))}
        for number, segment in enumerate(parts.layout)
    }


def _no_taps(parts: Parts) -> Params:
    return jax.tree.map(lambda spec: None, parts.specs)


def _blocks(
    parts: Parts,
    params: Params,
    taps: Params,
    x: jax.Array,
    context: Context,
    remat: RematConfig,
    caches: tree.Tree = None,
) -> tuple[jax.Array, tree.Tree, Auxiliary]:
    """Runs x [B, S, D] through every segment."""
    auxiliary = parts.zero_auxiliary()
    full = remat.policy == "full"
    new_caches = {}
    for number, segment in enumerate(parts.layout):
        name = f"segment_{number}"
        specs = param.layer_specs(parts.specs[name])

        def period(carry: Any, layer: Any, segment: Segment = segment, specs: Params = specs) -> tuple[Any, Any]:
            weights, taps, per_layer, caches = layer
            x, auxiliary = carry
            written = {}
            for position, kind in enumerate(segment.kinds):
                block = f"block_{position}"

                # The placement is inside the checkpoint: gathered weights are recomputed, not kept.
                def run(x: Any, weights: Any, taps: Any, cache: Any, kind: Any = kind, position: int = position) -> Any:
                    placed = context.placement.place(specs[f"block_{position}"], weights, taps, keep=full)
                    constants = {name: values[position] for name, values in per_layer.items()}
                    return parts.block(kind, placed, x, context, constants, cache)

                if full:
                    run = jax.checkpoint(run, prevent_cse=False)
                x, written[block], added = run(x, weights[block], taps[block], caches[block] if caches else None)
                auxiliary = auxiliary + added
            return (x, auxiliary), written

        stacked = (params[name], taps[name], segment.per_layer, caches[name] if caches else None)
        (x, auxiliary), new_caches[name] = jax.lax.scan(period, (x, auxiliary), stacked)
    return x, new_caches, auxiliary
