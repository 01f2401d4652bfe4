"""Parts that several kernels share: `vmap` of calls that have no rule for it, and the limits of Pallas kernels."""

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
