"""The product of rows sorted by group with each group's matrix. (placeholder of the seam)"""

from typing import Any

import jax
import jax.numpy as jnp


def forward(x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: Any, transposed: bool = False) -> jax.Array:
    @jax.custom_batching.sequential_vmap
    def run(x, w, sizes):
        w = jnp.swapaxes(w, 1, 2) if transposed else w
        y = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
        return jnp.where(jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes), y, 0).astype(dtype)

    return run(x, w, sizes)


def weight_gradient(x: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    @jax.custom_batching.sequential_vmap
    def run(x, dy, sizes):
        return _weight_gradient(x, dy, sizes, dtype)

    return run(x, dy, sizes)


def _weight_gradient(x, dy, sizes, dtype):
    live = jnp.arange(x.shape[0])[:, None] < jnp.sum(sizes)
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    return jax.lax.ragged_dot_general(
        jnp.where(live, x, 0), jnp.where(live, dy, 0), sizes, numbers, preferred_element_type=jnp.float32
    ).astype(dtype)
