"""The only place where a weight meets computation: `einsum`, `take` and `materialise`.

Blocks hand a weight over as they were given it and never learn what it is. Each operation gathers the weight where it
is used and writes its own backward, so that the gradient is formed and summed over devices in the reduction's dtype
and what is kept in between is said here, whatever the rematerialisation policy.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxopt_llm.parallel.sharding import Placed, WeightShardings, gather, reduce_gradient

Weight = Placed


def einsum(subscripts: str, x: jax.Array, weight: Weight, dtype: jnp.dtype | None = None) -> jax.Array:
    """`jnp.einsum(subscripts, x, weight)`, in the weight's compute dtype.

    subscripts: "x's axes,weight's axes->result's axes"; every axis appears in at least two of the three.
    dtype: of the result, accumulated in float32 in any case; x's by default.
    """
    return _einsum(subscripts, weight.shardings, dtype or x.dtype, x, weight.array, weight.tap)


def take(table: Weight, ids: jax.Array) -> jax.Array:
    """Rows of a table: weight [V, D], ids [...] -> [..., D]. Ids must be within the table: the host checks them."""
    return _take(table.shardings, table.array, table.tap, ids)


def materialise(weight: Weight) -> jax.Array:
    """The whole weight in compute dtype, for what is neither product nor look-up: norm scales and biases."""
    return _materialise(weight.shardings, weight.array, weight.tap)


# In each of the three the weight itself has no cotangent (None): its gradient is the tap's.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _einsum(subscripts, shardings, dtype, x, array, tap):
    return jnp.einsum(subscripts, x, gather(array, shardings), preferred_element_type=dtype)


def _einsum_forward(subscripts, shardings, dtype, x, array, tap):
    weight = gather(array, shardings)
    y = jnp.einsum(subscripts, x, weight, preferred_element_type=dtype)
    return y, (x, array, weight if shardings.keep else None)


def _einsum_backward(subscripts, shardings: WeightShardings, dtype, residuals, dy):
    x, array, weight = residuals
    weight = gather(array, shardings) if weight is None else weight
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    dy = dy.astype(x.dtype)
    dx = jnp.einsum(f"{result},{right}->{left}", dy, weight, preferred_element_type=x.dtype)
    if not shardings.trainable:
        return dx, None, None
    dw = _weight_gradient(left, result, right, x, dy, shardings)
    return dx, None, reduce_gradient(dw, shardings)


def _weight_gradient(left: str, result: str, right: str, x: jax.Array, dy: jax.Array, shardings: WeightShardings):
    rows = "".join(axis for axis in left if axis not in right)  # what is summed over: batch and sequence
    inputs, outputs = left.removeprefix(rows), result.removeprefix(rows)
    whole_rows = shardings.resting.mesh.shape["context"] == 1  # a split sequence cannot be merged with the batch
    if whole_rows and right in (inputs + outputs, outputs + inputs):
        # As one product of matrices: with more dimensions XLA for CPUs transposes a copy of x or dy.
        shape = [dict(zip(left + result, x.shape + dy.shape, strict=True))[axis] for axis in right]
        x, dy = (array.reshape(math.prod(array.shape[: len(rows)]), -1) for array in (x, dy))
        product = "RI,RO->IO" if right == inputs + outputs else "RI,RO->OI"
        return jnp.einsum(product, x, dy, preferred_element_type=shardings.reduce_dtype).reshape(shape)
    return jnp.einsum(f"{left},{result}->{right}", x, dy, preferred_element_type=shardings.reduce_dtype)


_einsum.defvjp(_einsum_forward, _einsum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(shardings, array, tap, ids):
    return gather(array, shardings)[ids]


def _take_forward(shardings, array, tap, ids):
    return _take(shardings, array, tap, ids), (array, ids)


def _take_backward(shardings: WeightShardings, residuals, dy):
    array, ids = residuals
    if not shardings.trainable:
        return None, None, None
    # In float32: a frequent token's row sums over thousands of positions.
    gradient = jnp.zeros(array.shape, jnp.float32).at[ids].add(dy.astype(jnp.float32))
    # Whole rows first: asked for divided rows, XLA gathers every device's positions instead of reducing the rows.
    gradient = jax.lax.with_sharding_constraint(gradient, shardings.gathered)
    return None, reduce_gradient(gradient, shardings), None


_take.defvjp(_take_forward, _take_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _materialise(shardings, array, tap):
    return gather(array, shardings)


def _materialise_forward(shardings, array, tap):
    return gather(array, shardings), None


def _materialise_backward(shardings: WeightShardings, residuals, dy):
    return None, reduce_gradient(dy, shardings) if shardings.trainable else None


_materialise.defvjp(_materialise_forward, _materialise_backward)
