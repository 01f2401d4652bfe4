"""Attention by NVIDIA's cuDNN, through jax.nn: for `attention` called by hand, and to compare kernels with.

It is not an attention.Implementation. An implementation takes the visible keys as data (attention_mask.py), as packed
documents and parts of a sequence require. cuDNN takes them as constants: a causal mask and a window of it. JAX passes
documents to cuDNN only through internal functions, for a number of documents that is fixed at compile time, and at the
cost of a log-sum-exp of every query for each document. The rows of training always have documents.
"""

from typing import Any

import jax
import jax.numpy as jnp

AMPERE, HOPPER = (8, 0), (9, 0)


def problems(head_dim: int, dtype: Any, capability: tuple[int, int]) -> list[str]:
    """List the properties of a call that are not supported, except documents and a soft-cap.

    capability: compute capability of the GPU.
    """
    found = []
    limit = 256 if capability >= HOPPER else 128
    if head_dim % 8 or head_dim > limit:
        found.append(f"head_dim={head_dim}: cudnn supports multiples of 8 up to {limit} here, xla supports any")
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        found.append(f"dtype={jnp.dtype(dtype).name}: cudnn supports bfloat16 or float16, xla supports any")
    if capability < AMPERE:
        found.append(f"capability={capability}: cudnn requires {AMPERE} (Ampere) or later, xla supports any")
    return found


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, window: int | None, scale: float) -> jax.Array:
    """Compute attention by cuDNN; see attention.attention. JAX provides the derivative."""
    keys_around = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, local_window_size=keys_around, implementation="cudnn"
    )
