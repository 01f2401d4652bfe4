"""Attention with another head size of values than of queries and keys, by a kernel that takes one head size.

Queries, keys and values are padded with zeros. The zeros in queries and keys change no score, and the padding of the
values is cut off the output. The cost is that of the kernel's size: 192 and 128 (DeepSeek) become 256, 1.6 times the
FLOPs.

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, V head size of the values.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.attention_mask import KeyRanges
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals


def common_size(head_dim: int, value_dim: int) -> int:
    """Return the head size for a kernel that takes one size.

    If the sizes differ, it is a power of two, as kernels require.
    """
    return head_dim if head_dim == value_dim else 1 << (max(head_dim, value_dim) - 1).bit_length()


@dataclass(frozen=True)
class Padded:
    """Implementation of attention by another one, `kernel`, with heads padded to `size`."""

    kernel: Any
    size: int

    @property
    def reads_out(self) -> bool:
        return bool(self.kernel.reads_out)

    @property
    def skips_keys(self) -> bool:
        return bool(self.kernel.skips_keys)

    def forward(
        self, parameters: AttentionParameters, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: KeyRanges
    ) -> tuple[jax.Array, jax.Array]:
        out, log_sum = self.kernel.forward(parameters, *map(self._pad, (q, k, v)), key_ranges)
        return out[..., : v.shape[-1]], log_sum

    def backward(
        self, parameters: AttentionParameters, residuals: AttentionResiduals, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        operands = residuals.q, residuals.k, residuals.v
        q, k, v = map(self._pad, operands)
        padded = residuals._replace(q=q, k=k, v=v, out=jax.tree.map(self._pad, residuals.out))
        gradients = self.kernel.backward(parameters, padded, self._pad(gradient))
        d_q, d_k, d_v = (each[..., : x.shape[-1]] for each, x in zip(gradients, operands, strict=True))
        return d_q, d_k, d_v

    def _pad(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * 3 + [(0, self.size - x.shape[-1])])
