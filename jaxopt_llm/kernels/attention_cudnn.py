"""Attention by cuDNN, NVIDIA's own, through jax.nn: for `attention` called by hand, and to compare kernels with.

It is no attention.Implementation. Those are told what a query sees by data (spans.py), as packed documents and parts of
a sequence want it. cuDNN is told by constants: a causal order and a window of it. Of documents JAX lets it know by
internals alone, for a number of them that is fixed when compiled and at the price of a log-sum-exp of every query for
each of them. Training's rows always have documents.
"""

from typing import Any

import jax
import jax.numpy as jnp

AMPERE, HOPPER = (8, 0), (9, 0)


def problems(head_dim: int, dtype: Any, capability: tuple[int, int]) -> list[str]:
    """What of a call is not supported, in words, beside documents and a soft-cap. capability: the GPU's compute
    capability."""
    found = []
    most = 256 if capability >= HOPPER else 128
    if head_dim % 8 or head_dim > most:
        found.append(f"head_dim={head_dim}: cudnn takes a multiple of 8 up to {most} here, xla any")
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        found.append(f"dtype={jnp.dtype(dtype).name}: cudnn takes bfloat16 or float16, xla any")
    if capability < AMPERE:
        found.append(f"capability={capability}: cudnn wants {AMPERE} (Ampere) or later, xla none")
    return found


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, window: int | None, scale: float) -> jax.Array:
    """See attention.attention. JAX gives it its derivative."""
    before = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, local_window_size=before, implementation="cudnn"
    )
