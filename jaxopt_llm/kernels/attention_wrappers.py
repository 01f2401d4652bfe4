"""Implementations of attention by another one, `kernel`: with padded heads, with copied heads, and by all-to-all.

Letters: B batch, S queries, T keys, H heads, G key-value heads, C copies of each, K head size, V head size of the
values.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, KeyRanges


@dataclass(frozen=True)
class Wrapper:
    """Implementation that changes the operands and the results of another one."""

    kernel: Any

    @property
    def reads_out(self) -> bool:
        return bool(self.kernel.reads_out)

    @property
    def skips_keys(self) -> bool:
        return bool(self.kernel.skips_keys)


def common_size(head_dim: int, value_dim: int) -> int:
    """Return the head size for a kernel that takes one size.

    If the sizes differ, it is a power of two, as kernels require.
    """
    return head_dim if head_dim == value_dim else 1 << (max(head_dim, value_dim) - 1).bit_length()


@dataclass(frozen=True)
class Padded(Wrapper):
    """Attention with another head size of values than of queries and keys, by a kernel that takes one head size.

    Queries, keys and values are padded with zeros to `size`. The zeros in queries and keys change no score, and the
    padding of the values is cut off the output. The kernel computes with its own size: 192 and 128 (DeepSeek) become
    256, 1.6 times the FLOPs.
    """

    size: int

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


@dataclass(frozen=True)
class CopiedHeads(Wrapper):
    """Attention with copies of the key-value heads, where more devices divide the heads than there are key-value heads.

    The kernel gets each key-value head `copies` times. The copies are made again for the backward, so that only the
    heads themselves are kept.
    """

    copies: int

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


@dataclass(frozen=True)
class AllToAll(Wrapper):
    """Attention over a sequence that is split over devices: each device attends with some heads of all tokens.

    It is called on each device's own arrays; the sequence is in its own order. Before and after attention, in the
    forward and in the backward, the devices exchange their part of the sequence for their part of the heads (Jacobs et
    al. 2023, arXiv:2309.14509). This sends less than a ring does, all at once, and any kernel sees the whole sequence.
    But the number of devices is limited by the number of heads.

    axis: mesh axis that splits the sequence. Its size divides G. S counts the queries of a device.
    """

    axis: str

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
