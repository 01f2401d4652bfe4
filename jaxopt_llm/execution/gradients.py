"""How gradients are summed: over microbatches within a gradient group, then over the groups once.

Letters: M microbatches, G gradient groups, B batch, S sequence. See Placement.gradient_groups.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.model import param
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Params
from jaxopt_llm.parallel.sharding import GROUPS, Placement

Sums = tuple[jax.Array, Auxiliary, Params]  # loss, auxiliary sums and gradients, each summed over real tokens


def zero_sums(shapes: Sums, specs: Params, inside: Placement) -> Sums:
    """What to add microbatches to, in float32."""
    loss, auxiliary, gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    return loss, auxiliary, place(gradients, specs, inside)


def add_sums(total: Sums, added: Sums, specs: Params, inside: Placement) -> Sums:
    return total[0] + added[0], total[1] + added[1], add_gradients(total[2], added[2], specs, inside)


def add_gradients(total: Params, added: Params, specs: Params, inside: Placement, part: jax.Array | int = 0) -> Params:
    """part: which part of a leaf is added to, counted in those of the size that is added; all may be one."""

    def add(total: jax.Array, added: jax.Array) -> jax.Array:
        added = added.astype(jnp.float32)
        rows = added.shape[0]
        if rows == total.shape[0]:
            return total + added
        own = jax.lax.dynamic_slice_in_dim(total, part * rows, rows)
        return jax.lax.dynamic_update_slice_in_dim(total, own + added, part * rows, 0)

    return place(jax.tree.map(add, total, added), specs, inside)


def place(gradients: Params, specs: Params, inside: Placement) -> Params:
    """As they are within a gradient group."""
    return jax.lax.with_sharding_constraint(gradients, jax.tree.map(inside.gradients, specs))


def sum_of_squares(gradients: Params, specs: Params) -> jax.Array:
    """Over all leaves that the loss teaches, float32."""
    learned = jax.tree.leaves(param.learned(specs, gradients))
    return sum((jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in learned), jnp.float32(0))


def in_groups(batch: Batch, placement: Placement) -> Batch:
    """Fields [B, S] -> [G, B / G, S]; as they are where there are no groups."""
    groups = placement.gradient_groups
    return jax.tree.map(lambda x: x.reshape(placement.size(*groups), -1, x.shape[-1]), batch) if groups else batch


def each_group(function: Callable[..., Any], placement: Placement, in_axes: int = 0) -> Callable[..., Any]:
    """A function of one gradient group as one of all, [G, ...], which are the arguments' dimension `in_axes`; itself
    where there are no groups."""
    groups = placement.gradient_groups
    return jax.vmap(function, in_axes, axis_name=GROUPS, spmd_axis_name=groups) if groups else function


def sum_over_groups(one_group: Callable[[Batch], Sums], batch: Batch, specs: Params, placement: Placement) -> Sums:
    """Runs `one_group` (fields [M, B / G, S]) on every gradient group of a batch (fields [M, B, S]).

    specs: of the parameters whose gradients it gives. Gradients come back placed as the masters are.
    """
    groups = placement.gradient_groups
    if not groups:
        return one_group(batch)
    count = placement.size(*groups)
    grouped = jax.tree.map(lambda x: x.reshape(x.shape[0], count, -1, x.shape[-1]), batch)  # [M, G, B / G, S]
    loss, auxiliary, gradients = each_group(one_group, placement, in_axes=1)(grouped)
    loss, auxiliary = jax.tree.map(lambda x: jnp.sum(x, axis=0), (loss, auxiliary))
    return loss, auxiliary, {name: _sum_section(specs[name], gradients[name], placement) for name in gradients}


def _sum_section(specs: Params, gradients: Params, placement: Placement) -> Params:
    """Gradients [G, ...] of one segment, or of the leaves outside the stacks, summed over their groups."""
    layers = param.layers(specs)
    # Whole where every device keeps everything: a loop would hold both its operand and its result.
    if layers is None or not placement.divides_masters:
        return jax.tree.map(placement.reduce_groups, specs, gradients)
    layer_specs = param.layer_specs(specs)

    # A layer at a time where each device keeps a part: XLA would scatter transposed copies of whole stacks.
    def layer(index: jax.Array) -> Any:
        one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False), gradients)
        return jax.tree.map(placement.reduce_groups, layer_specs, one)

    return jax.lax.map(layer, jnp.arange(layers.size))
