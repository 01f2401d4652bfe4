"""Attention over a sequence that is split over devices, by all-to-all: each device takes some heads of all tokens.

Before and after attention, in the forward and in the backward, the devices exchange their part of the sequence for
their part of the heads (Jacobs et al. 2023, arXiv:2309.14509). This sends less than a ring does, all at once, and any
kernel sees the whole sequence. But the number of devices is limited by the number of heads.

Letters: B batch, S queries of a device, H heads, G key-value heads, K head size.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax

from jaxopt_llm.kernels.attention_mask import KeyRanges
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals


@dataclass(frozen=True)
class AllToAll:
    """Implementation of attention, called on each device's own arrays, for a sequence in its own order.

    kernel: implementation that attends; axis: mesh axis that splits the sequence. The size of the axis divides G.
    """

    kernel: Any
    axis: str

    @property
    def reads_out(self) -> bool:
        return bool(self.kernel.reads_out)

    def forward(
        self, parameters: AttentionParameters, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: KeyRanges
    ) -> tuple[jax.Array, jax.Array]:
        out, log_sum = self.kernel.forward(parameters, *map(self._split_heads, (q, k, v)), self._gather(key_ranges))
        return self._split_rows(out), self._exchange(log_sum, split=2, join=1)

    def backward(
        self, parameters: AttentionParameters, residuals: AttentionResiduals, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v, key_ranges, *statistics, out = residuals
        by_head = functools.partial(self._exchange, split=1, join=2)
        log_sum, delta = jax.tree.map(by_head, statistics)
        q, k, v, out = jax.tree.map(self._split_heads, (q, k, v, out))
        whole = AttentionResiduals(q, k, v, self._gather(key_ranges), log_sum, delta, out)
        d_q, d_k, d_v = self.kernel.backward(parameters, whole, self._split_heads(gradient))
        return self._split_rows(d_q), self._split_rows(d_k), self._split_rows(d_v)

    def _split_heads(self, x: jax.Array) -> jax.Array:
        """Exchange this device's rows of all heads for all rows of its heads. x: [B, S, H, K]."""
        return self._exchange(x, split=2, join=1)

    def _split_rows(self, x: jax.Array) -> jax.Array:
        """Invert `_split_heads`."""
        return self._exchange(x, split=1, join=2)

    def _exchange(self, x: jax.Array, split: int, join: int) -> jax.Array:
        return jax.lax.all_to_all(x, self.axis, split, join, tiled=True)

    def _gather(self, key_ranges: KeyRanges) -> KeyRanges:
        return jax.lax.all_gather(key_ranges, self.axis, axis=1, tiled=True)
