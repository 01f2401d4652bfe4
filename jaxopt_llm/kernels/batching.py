"""`vmap` of functions that have no rule for it, such as calls of kernels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


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
