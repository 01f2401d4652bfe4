"""Grouped matmul in XLA's own operation: for any device, and as a reference for the other kernels.

XLA has no kernel for it on CPUs and GPUs. It copies the rows for each group, masks each copy to the group's own rows,
and multiplies the copies by all matrices. The result is right, but it costs E times the FLOPs and the bytes. It is for
tests, small models, and devices without another implementation.

Letters: T rows, E groups, D and F sizes of a row before and after.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def forward(x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: Any, *, transposed: bool = False) -> jax.Array:
    """See grouped_matmul.Implementation."""

    @jax.custom_batching.sequential_vmap  # JAX cannot batch x without w
    def product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        out = lax.ragged_dot_general(x, w, sizes, numbers, preferred_element_type=dtype)
        return _within_groups(out, sizes)

    numbers = lax.RaggedDotDimensionNumbers((((1,), (2 if transposed else 1,)), ((), ())), (0,), (0,))
    return product(x, w, sizes)


def weight_gradient(x: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    """See grouped_matmul.Implementation."""
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    x, dy = _within_groups(x, sizes), _within_groups(dy, sizes)
    return lax.ragged_dot_general(x, dy, sizes, numbers, preferred_element_type=dtype)


def _within_groups(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Set the rows after the last group to 0; XLA does not define them."""
    inside = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    return jnp.where(inside[:, None], rows, jnp.zeros_like(rows))
