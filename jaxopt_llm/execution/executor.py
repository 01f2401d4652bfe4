"""Executor: the functions by which the folders above this one run a model, and the sums of gradients that they share.

Gradients are summed over microbatches within a gradient group, then over the groups, once.

Letters: M microbatches, G gradient groups (see zero.gradient_group_axes), B batch, S sequence.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.core import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.model import Model, Params, Sums
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.gathering import reduce_groups
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import GROUP_AXIS, divides_masters, gradient_group_axes, gradient_sharding

# (parameters outside the segments, the last block's output [B, S, D], batch, context) -> [B, S, ...], or without stages
# several such arrays
ReadTokens = Callable[[Params, jax.Array, Batch, Context], Any]


@dataclass(frozen=True)
class Executor:
    """The functions that run a model.

    loss_and_gradients: (model, trainable, frozen, batch, loss_weight, placement) -> (sums, gradients).
    loss: (model, params, batch, placement) -> sums.
    read_tokens: (read, model, params, batch, placement) -> what `read` returns of each token, [M, B, S, ...].
        read: a method of the model that takes what `Model.log_probabilities` takes.

    trainable, frozen: the two halves of a `tree.partition` of the parameters; no gradient is formed for `frozen`.
    batch: fields [M, B, S], M microbatches.
    loss_weight: float32 scalar, 1 / tokens for the gradient of the mean, times the loss scale if there is one.

    All parts of the model add their sums over the batch. OBJECTIVE among them is what `Model.loss` reports,
    summed over `Objective.count` tokens or pairs. The gradients are those of the objective,
    d(loss_weight × (cross-entropy + z-loss + auxiliary losses))/d(trainable). With gradient groups they have the
    sharding of the masters, otherwise `zero.gradient_sharding`.
    """

    loss_and_gradients: Callable[[Model, Params, Params, Batch, jax.Array, Placement], tuple[Sums, Params]]
    loss: Callable[[Model, Params, Batch, Placement], Sums]
    read_tokens: Callable[[ReadTokens, Model, Params, Batch, Placement], jax.Array]


Totals = tuple[Sums, Params]  # what is reported, and gradients, both summed over tokens


def zero_totals(shapes: Totals, specs: Params, inside: Placement) -> Totals:
    """Return zeros in float32 to add microbatches to. inside: the placement within a gradient group."""
    sums, gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    return sums, constrain_gradients(gradients, specs, inside)


def add_totals(total: Totals, added: Totals, specs: Params, inside: Placement) -> Totals:
    return jax.tree.map(jnp.add, total[0], added[0]), add_gradients(total[1], added[1], specs, inside)


def add_gradients(total: Params, added: Params, specs: Params, inside: Placement, chunk: jax.Array | int = 0) -> Params:
    """Add gradients in float32. A leaf with fewer rows than its total is added to the rows of this chunk."""

    def add(total: jax.Array, added: jax.Array) -> jax.Array:
        added = added.astype(jnp.float32)
        if added.shape == total.shape:
            return total + added
        rows = added.shape[0]
        old = jax.lax.dynamic_slice_in_dim(total, chunk * rows, rows)
        return jax.lax.dynamic_update_slice_in_dim(total, old + added, chunk * rows, 0)

    return constrain_gradients(jax.tree.map(add, total, added), specs, inside)


def constrain_gradients(gradients: Params, specs: Params, inside: Placement) -> Params:
    """Pin the sharding that gradients have within a gradient group."""
    return jax.lax.with_sharding_constraint(gradients, gradient_sharding(specs, inside))


def split_periods(specs: Params, leaves: tree.Tree) -> tree.Tree:
    """Return sections of leaves with the list of its periods in place of each segment; the inverse of `join_periods`.

    A sum of gradients in this form is added to by cuBLAS itself (beta = 1), in place, if the layers are unrolled. In a
    stack it would cost a kernel for the sum, or copies of each layer out of the stack and into it.
    """

    def split(section: str) -> tree.Tree:
        periods, part = param.layer_indices(specs[section]), leaves[section]
        if periods is None:
            return part
        return [jax.tree.map(functools.partial(_read_period, row), part) for row in range(len(periods))]

    return {section: split(section) for section in leaves}


def _read_period(row: int, leaf: ParamSpec | jax.Array) -> ParamSpec | jax.Array:
    return leaf.unstack() if isinstance(leaf, ParamSpec) else leaf[row]


def join_periods(leaves: tree.Tree) -> Params:
    """Return the sections with each segment's periods as a stack."""

    def stack(*periods: jax.Array) -> jax.Array:
        return jnp.stack(periods)

    return {name: jax.tree.map(stack, *part) if isinstance(part, list) else part for name, part in leaves.items()}


def sum_of_squares(gradients: Params, specs: Params, by_period: bool = False) -> jax.Array:
    """Return the sum of squares, in float32, over all leaves whose gradient comes from the loss.

    by_period: reduce each period of a stack on its own. If the stack is a concatenation, XLA otherwise fuses it into
        the reduction. The reduction then reads many arrays, at less than a quarter of the memory's rate (H200).
    """

    def split(spec: ParamSpec, leaf: jax.Array) -> list[jax.Array]:
        if spec.sign_rate is not None:
            return []
        return [leaf[period] for period in range(len(leaf))] if by_period and spec.layers is not None else [leaf]

    parts = jax.tree.leaves(jax.tree.map(split, specs, gradients))
    return sum((jnp.sum(jnp.square(part.astype(jnp.float32))) for part in parts), jnp.float32(0))


def split_into_groups(batch: Batch, placement: Placement) -> Batch:
    """Return fields [B, S] as [G, B / G, S], or as they are without groups."""
    groups = gradient_group_axes(placement)
    return jax.tree.map(lambda x: x.reshape(placement.size(*groups), -1, *x.shape[1:]), batch) if groups else batch


def vmap_over_groups(function: Callable[..., Any], placement: Placement, in_axes: int = 0) -> Callable[..., Any]:
    """Return a function of one gradient group mapped over all groups, or the function itself without groups.

    The groups are dimension `in_axes` of the arguments and the first dimension of the results.
    """
    groups = gradient_group_axes(placement)
    return jax.vmap(function, in_axes, axis_name=GROUP_AXIS, spmd_axis_name=groups) if groups else function


def sum_over_groups(one_group: Callable[[Batch], Totals], batch: Batch, specs: Params, placement: Placement) -> Totals:
    """Run a function on every gradient group of a batch, fields [M, B, S], and sum its results.

    one_group: takes the microbatches of one group, fields [M, B / G, S].
    specs: of the parameters whose gradients `one_group` returns. With groups, the sums of the gradients have the
        sharding of the masters; without groups, `gradient_sharding`.
    """
    groups = gradient_group_axes(placement)
    if not groups:
        return one_group(batch)
    count = placement.size(*groups)
    grouped = jax.tree.map(lambda x: x.reshape(x.shape[0], count, -1, *x.shape[2:]), batch)  # [M, G, B / G, S]
    sums, gradients = vmap_over_groups(one_group, placement, in_axes=1)(grouped)
    sums = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
    return sums, {name: _reduce_by_period(specs[name], gradients[name], placement) for name in gradients}


def _reduce_by_period(specs: Params, gradients: Params, placement: Placement) -> Params:
    """Sum gradients [G, ...] of one segment, or of the parameters outside the segments, over their groups."""
    periods = param.layer_indices(specs)
    # All at once where every device keeps everything: a loop would hold both its operand and its result.
    if periods is None or not divides_masters(placement):
        return reduce_groups(specs, gradients, placement)

    # One period at a time where each device keeps a part: XLA would reduce-scatter transposed copies of whole segments.
    def reduce_period(row: jax.Array) -> Params:
        period = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, row, axis=1, keepdims=False), gradients)
        return reduce_groups(param.period_specs(specs), period, placement)

    return jax.lax.map(reduce_period, jnp.arange(periods.size))
