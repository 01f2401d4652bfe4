"""Limits that all kernels written in Pallas share."""

from typing import Any

import jax.numpy as jnp

CAPABILITY = (8, 0)  # minimum compute capability


def problems(dtype: Any, capability: tuple[int, int] = CAPABILITY) -> list[str]:
    """List the properties of a call that are not supported. capability: compute capability of the GPU."""
    found = []
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        dtype = jnp.dtype(dtype).name
        found.append(f"dtype={dtype}: the pallas kernel supports bfloat16, float16 or float32, xla supports any")
    if capability < CAPABILITY:
        found.append(f"capability={capability}: pallas requires {CAPABILITY} (Ampere) or later, xla supports any")
    return found
