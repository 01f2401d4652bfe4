"""Attention with copies of the key-value heads, where more devices divide the heads than there are key-value heads.

Letters: B batch, T keys, G key-value heads, C copies of each, K head size.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.attention_mask import KeyRanges
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals


@dataclass(frozen=True)
class CopiedHeads:
    """Implementation of attention by another one, `kernel`, that gets each key-value head `copies` times.

    The copies are made again for the backward, so that only the heads themselves are kept.
    """

    kernel: Any
    copies: int

    @property
    def reads_out(self) -> bool:
        return bool(self.kernel.reads_out)

    def forward(
        self, parameters: AttentionParameters, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: KeyRanges
    ) -> tuple[jax.Array, jax.Array]:
        out, log_sum = self.kernel.forward(parameters, q, self._copy(k), self._copy(v), key_ranges)
        return out, log_sum

    def backward(
        self, parameters: AttentionParameters, residuals: AttentionResiduals, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        copied = residuals._replace(k=self._copy(residuals.k), v=self._copy(residuals.v))
        d_q, d_k, d_v = self.kernel.backward(parameters, copied, gradient)
        return d_q, self._sum(d_k), self._sum(d_v)

    def _copy(self, x: jax.Array) -> jax.Array:
        """Copy each head: [B, T, G, K] -> [B, T, G·C, K]."""
        return jnp.repeat(x, self.copies, axis=2)

    def _sum(self, x: jax.Array) -> jax.Array:
        """Sum over the copies of each head: [B, T, G·C, K] -> [B, T, G, K]."""
        return jnp.sum(x.reshape(*x.shape[:2], -1, self.copies, x.shape[3]), axis=3)
