"""Parts that kernels and models share: `vmap` of calls without a rule for it, chunks, and the limits of Pallas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PALLAS_CAPABILITY = (8, 0)  # minimum compute capability


def fold_batches(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of arrays with the leading dimension B: vmap folds the mapped axis into B."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(size: int, is_batched: list[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        whole = (
            x if batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, batched in zip(arrays, is_batched, strict=True)
        )
        outs = fold_batches(function)(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in outs), tuple(True for _ in outs)

    return mapped


def map_chunks(function: Callable[..., Any], size: int, *arrays: jax.Array) -> Any:
    """Return function(*arrays) [B, S, ...], of arrays [B, S, ...], by chunks of at most `size` along S.

    A chunk has all rows, so that it is divided over devices as the batch is.
    """
    batch, length = arrays[0].shape[:2]
    count = -(-length // size)
    size = -(-length // count)

    def split(x: jax.Array) -> jax.Array:  # [B, S, ...] -> [chunks, B, size, ...]
        padded = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, count * size, *x.shape[3:])[:, :length]

    return jax.tree.map(join, jax.lax.map(lambda each: function(*each), tuple(map(split, arrays))))


def find_pallas_problems(dtype: Any, capability: tuple[int, int] = PALLAS_CAPABILITY) -> list[str]:
    """List the properties of a call that Pallas's kernels do not support. capability: compute capability of the GPU."""
    found = []
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        dtype = jnp.dtype(dtype).name
        found.append(f"dtype={dtype}: the pallas kernel supports bfloat16, float16 or float32, xla supports any")
    if capability < PALLAS_CAPABILITY:
        required = f"{PALLAS_CAPABILITY} (Ampere) or later"
        found.append(f"capability={capability}: pallas requires {required}, xla supports any")
    return found
