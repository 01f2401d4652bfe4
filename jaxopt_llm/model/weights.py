"""The only place where a weight meets computation: `einsum`, `take` and `materialise`.

Blocks hand a weight over as they were given it and never learn what it is. Each operation gathers the weight where it
is used and writes its own backward, so that the gradient is formed and summed over devices in the reduction's dtype
and what is kept in between is said here, whatever the rematerialisation policy.
"""

import functools

import jax
import jax.numpy as jnp

from jaxopt_llm.parallel.sharding import Layout, Placed, gather, reduce_gradient

Weight = Placed


def einsum(subscripts: str, x: jax.Array, weight: Weight, dtype: jnp.dtype | None = None) -> jax.Array:
    """`jnp.einsum(subscripts, x, weight)`, in the weight's compute dtype.

    subscripts: "x's axes,weight's axes->result's axes"; every axis appears in at least two of the three.
    dtype: of the result, accumulated in float32 in any case; x's by default.
    """
    return _einsum(subscripts, weight.layout, dtype or x.dtype, x, weight.array)


def take(table: Weight, ids: jax.Array) -> jax.Array:
    """Rows of a table: weight [V, D], ids [...] -> [..., D]. Ids must be within the table: the host checks them."""
    return _take(table.layout, table.array, ids)


def materialise(weight: Weight) -> jax.Array:
    """The whole weight in compute dtype, for what is neither product nor look-up: norm scales and biases."""
    return _materialise(weight.layout, weight.array)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _einsum(subscripts: str, layout: Layout, dtype: jnp.dtype, x: jax.Array, array: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, gather(array, layout), preferred_element_type=dtype)


def _einsum_forward(subscripts, layout, dtype, x, array):
    weight = gather(array, layout)
    y = jnp.einsum(subscripts, x, weight, preferred_element_type=dtype)
    return y, (x, array, weight if layout.keep else None)


def _einsum_backward(subscripts, layout, dtype, residuals, dy):
    x, array, weight = residuals
    weight = gather(array, layout) if weight is None else weight
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    dy = dy.astype(x.dtype)
    dx = jnp.einsum(f"{result},{right}->{left}", dy, weight, preferred_element_type=x.dtype)
    dw = jnp.einsum(f"{left},{result}->{right}", x, dy, preferred_element_type=layout.reduce_dtype)
    return dx, reduce_gradient(dw, array, layout)


_einsum.defvjp(_einsum_forward, _einsum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(layout: Layout, array: jax.Array, ids: jax.Array) -> jax.Array:
    return gather(array, layout)[ids]


def _take_forward(layout, array, ids):
    return _take(layout, array, ids), (array, ids)


def _take_backward(layout, residuals, dy):
    array, ids = residuals
    # In float32: a frequent token's row sums over thousands of positions.
    gradient = jnp.zeros(array.shape, jnp.float32).at[ids].add(dy.astype(jnp.float32))
    # Whole rows first: asked for divided rows, XLA gathers every device's positions instead of reducing the rows.
    gradient = jax.lax.with_sharding_constraint(gradient, layout.gathered)
    return reduce_gradient(gradient, array, layout), None


_take.defvjp(_take_forward, _take_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _materialise(layout: Layout, array: jax.Array) -> jax.Array:
    return gather(array, layout)


def _materialise_forward(layout, array):
    return gather(array, layout), array


def _materialise_backward(layout, array, dy):
    return (reduce_gradient(dy, array, layout),)


_materialise.defvjp(_materialise_forward, _materialise_backward)
