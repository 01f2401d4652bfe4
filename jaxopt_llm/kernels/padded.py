"""Attention whose values have another head size than its queries and keys, by a kernel that knows one size.

Zeros beside queries and keys change no score, and what is beside values is cut off the result. It costs the kernel's
size: of 192 and 128 (DeepSeek) 256, 1.6 times the products.

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, V that of values.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.spans import Form, Spans


def common_size(head_dim: int, value_dim: int) -> int:
    """The head size that a kernel of one size is given: a power of two where these differ, as kernels take."""
    return head_dim if head_dim == value_dim else 1 << (max(head_dim, value_dim) - 1).bit_length()


@dataclass(frozen=True)
class Padded:
    """An attention.Implementation. kernel: another, that takes heads of this size."""

    kernel: Any
    size: int

    def forward(
        self, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans
    ) -> tuple[jax.Array, jax.Array]:
        out, log_sum = self.kernel.forward(form, *map(self._pad, (q, k, v)), spans)
        return out[..., : v.shape[-1]], log_sum

    def backward(
        self,
        form: Form,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        spans: Spans,
        log_sum: jax.Array,
        mean: jax.Array,
        gradient: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        padded = map(self._pad, (q, k, v))
        found = self.kernel.backward(form, *padded, spans, log_sum, mean, self._pad(gradient))
        d_q, d_k, d_v = (each[..., : of.shape[-1]] for each, of in zip(found, (q, k, v), strict=True))
        return d_q, d_k, d_v

    def _pad(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * 3 + [(0, self.size - x.shape[-1])])
