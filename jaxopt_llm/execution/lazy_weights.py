"""Lazy weights: parameters of a user's loss that no equation has read yet."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import add_p, broadcast_in_dim_p, mul_p, sub_p

from jaxopt_llm.core.jaxpr import bind_equation
from jaxopt_llm.model.linear.leaves import LoraWeight
from jaxopt_llm.model.linear.linear_function import apply_linear
from jaxopt_llm.model.linear.weights import Weight, gather_for_use, shardings_of
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.gathering import PlacedWeight

Value = Any  # an array, or a Lazy weight
MOVES = (broadcast_in_dim_p, jax.lax.reshape_p, jax.lax.transpose_p, jax.lax.squeeze_p)
ELEMENTWISE = (add_p, sub_p, mul_p, jax.lax.div_p, jax.lax.max_p, jax.lax.min_p)


@dataclass(frozen=True, eq=False)
class Move:
    """An equation that only moves or repeats values: one of MOVES."""

    eqn: JaxprEqn


@struct.dataclass
class Lazy:
    """A weight that no equation has read yet.

    leading: number of leading dimensions that loops have not taken yet; the weight's shardings are those of one layer.
    order: the weight's dimensions (without the leading ones) in the order in which the program sees them.
    dtype: dtype in which the program sees it.
    rounded: whether the program rounded it from float32 to `dtype`, in which it is then gathered.
    moves: what the program did to the values so far.
    block: name of the block that the weight belongs to (blocks.py); "" for none.
    """

    weight: Weight
    leading: int = struct.field(pytree_node=False)
    order: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)
    rounded: bool = struct.field(pytree_node=False, default=False)
    moves: tuple[Move, ...] = struct.field(pytree_node=False, default=())
    block: str = struct.field(pytree_node=False, default="")


def read_array(value: Value) -> jax.Array:
    """Return an array as it is, and a weight gathered, in the dtype in which the program sees it."""
    if not isinstance(value, Lazy):
        return value
    gather = _gather
    for _ in range(value.leading):
        gather = jax.vmap(gather)
    array = gather(offload.fetch_to_device(value.weight))
    order = (*range(value.leading), *(value.leading + dim for dim in value.order))
    return move_array(jnp.transpose(array, order), value.moves).astype(value.dtype)


def _gather(weight: Weight) -> jax.Array:
    """Return the gathered weight. Its gradient is formed whole, before the storage axes divide it.

    Otherwise they would divide what the user's code computes from the weight, and XLA's partitioner has faults there:
    of products of batches of matrices, of slices of paddings, and of transposed convolutions whose window they divide.
    """
    array = gather_for_use(weight)
    assert not isinstance(weight, LoraWeight), "an adapter is only multiplied"
    return jax.lax.with_sharding_constraint(array, shardings_of(weight).gathered)


def read_repeated(value: Value, own: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    """Return what `read_array` returns, repeated to a shape. The gradient of a weight is the sum in float32.

    own: shape in which the equation reads the value; a scalar need not be moved to be repeated.
    """
    if not isinstance(value, Lazy) or value.leading or not isinstance(value.weight, PlacedWeight) or own == shape:
        return read_array(value)

    def repeat(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(move_array(jnp.transpose(array, value.order), value.moves), shape)

    return apply_linear(repeat, offload.fetch_to_device(value.weight)).astype(value.dtype)


def move_array(array: jax.Array, moves: Sequence[Move]) -> jax.Array:
    for each in moves:
        (array,) = bind_equation(each.eqn, [array])
    return array


def compute_dtype(weight: Weight) -> Any:
    """Return the dtype in which products with a weight are computed."""
    return jnp.dtype(shardings_of(weight.base if isinstance(weight, LoraWeight) else weight).compute_dtype)


def gather_in(weight: Weight, dtype: Any) -> Weight:
    """Return a weight that is gathered and multiplied in `dtype`."""

    def gather_in(placed: PlacedWeight) -> PlacedWeight:
        return replace(placed, shardings=replace(placed.shardings, compute_dtype=str(dtype)))

    return jax.tree.map(gather_in, weight, is_leaf=lambda leaf: isinstance(leaf, PlacedWeight))
