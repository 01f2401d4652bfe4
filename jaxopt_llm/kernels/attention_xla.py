"""Attention in XLA's own operations, by blocks of queries: for any device, and as a reference for the other kernels.

In addition to operands and output, only the log of the softmax sum is kept for the backward, which computes the scores
again block by block (Dao et al. 2022, arXiv:2205.14135; Rabe & Staats 2021, arXiv:2112.05682). No array of size [S, T]
ever exists.

Values may have another head size than queries and keys. The output then has the head size of the values.

Letters: B batch, S queries, T keys, H heads, G key-value heads, R = H / G, K head size, V head size of the values, Q
queries of a block.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, KeyRanges

QUERY_BLOCK = 512  # queries of a block: scores are [B, H, QUERY_BLOCK, T] in float32
# Model of the queries, each with the keys up to its own end. Four parts form 5/8 of all scores, in 4 loops.
CAUSAL_PARTS = 4
CAUSAL_ROWS = 128  # minimum queries of a part: with fewer, another loop costs more than the scores that it saves
reads_out = False
skips_keys = False
MASKED = float(jnp.finfo(jnp.float32).min)  # finite: scores - peak of a query that sees nothing must not be NaN


def forward(
    parameters: AttentionParameters, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: KeyRanges
) -> tuple[jax.Array, jax.Array]:
    """See attention.Implementation."""
    q, key_ranges = _tie_to_layer(q, key_ranges)
    results = [
        _forward_part(parameters, q[:, rows], k[:, keys], v[:, keys], _slice_ranges(key_ranges, rows))
        for rows, keys in _split_into_parts(parameters, q.shape[1], k.shape[1])
    ]
    outs, log_sums = zip(*results, strict=True)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(log_sums, axis=2)


def backward(
    parameters: AttentionParameters, residuals: AttentionResiduals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See attention.Implementation."""
    q, k, v, key_ranges, log_sum, delta, _ = residuals
    q, key_ranges = _tie_to_layer(q, key_ranges)
    parts, gradients = _split_into_parts(parameters, q.shape[1], k.shape[1]), []
    for rows, keys in parts:
        part_q, part_ranges = q[:, rows], _slice_ranges(key_ranges, rows)
        part_log_sum, part_delta, part_gradient = log_sum[:, :, rows], delta[:, :, rows], gradient[:, rows]
        part = AttentionResiduals(part_q, k[:, keys], v[:, keys], part_ranges, part_log_sum, part_delta)
        gradients.append(_backward_part(parameters, part, part_gradient))
    # The last part sees all keys, so the other parts are added to its gradients. If they were added to zeros, XLA would
    # gather all of them over `tensor` and `fsdp` in a pipeline.
    _, d_keys, d_values = gradients[-1]
    for (_, keys), (_, d_k, d_v) in zip(parts[:-1], gradients[:-1], strict=True):
        d_keys, d_values = d_keys.at[:, keys].add(d_k), d_values.at[:, keys].add(d_v)
    d_queries = jnp.concatenate([d_q for d_q, _, _ in gradients], axis=1)
    return d_queries, d_keys.astype(k.dtype), d_values.astype(v.dtype)


def _tie_to_layer(q: jax.Array, key_ranges: KeyRanges) -> tuple[jax.Array, KeyRanges]:
    """Make the key ranges depend on the queries, for the compiler.

    Otherwise JAX computes everything that depends only on them before the loop over layers: the masks of all queries,
    keys and heads, as whole arrays.
    """
    return jax.lax.optimization_barrier((q, key_ranges))


def _split_into_parts(parameters: AttentionParameters, queries: int, keys: int) -> list[tuple[slice, slice]]:
    """Split a causal call into rows of queries, each with the rows of keys that they may see.

    A call with a window is one part, as each of its blocks selects its own keys.
    """
    if parameters.keys_before is not None or parameters.keys_after != 0:
        return [(slice(0, queries), slice(0, keys))]
    size = max(-(-queries // CAUSAL_PARTS), CAUSAL_ROWS)
    ends = [min(start + size, queries) for start in range(0, queries, size)]
    return [(slice(start, end), slice(0, end)) for start, end in zip([0, *ends], ends, strict=False)]


def _slice_ranges(key_ranges: KeyRanges, rows: slice) -> KeyRanges:
    return KeyRanges(key_ranges.first[:, rows], key_ranges.last[:, rows])


def _forward_part(
    parameters: AttentionParameters, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: KeyRanges
) -> tuple[jax.Array, jax.Array]:
    keys_by_head, values_by_head = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)  # [B, G, T, K], [B, G, T, V]

    def block(_: None, arrays: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        index, q, key_ranges = arrays
        key_block = _KeyBlock.select(parameters, index, q.shape[3], k.shape[1])
        mask = key_ranges.make_ring_mask(k.shape[1]) if parameters.ring else key_ranges.make_mask(key_block.rows)
        visible = mask[:, None, None]
        scores = _compute_scores(parameters, "BGRSK,BGTK->BGRST", q, key_block.take(keys_by_head))
        scores = jnp.where(visible, scores, MASKED)
        peak = jnp.max(scores, axis=-1)
        weights = jnp.exp(scores - peak[..., None])
        # For a query that sees nothing, the output is 0, and its weights in the backward are exp(-inf) = 0.
        total = jnp.where(peak > MASKED, jnp.sum(weights, axis=-1), jnp.inf)
        out = _einsum("BGRST,BGTV->BGRSV", weights.astype(v.dtype), key_block.take(values_by_head)) / total[..., None]
        return None, (out.astype(q.dtype), peak + jnp.log(total))

    split_q = _split_heads(q, k.shape[2])
    blocks = (jnp.arange(split_q.shape[0]), split_q, _split_ranges(key_ranges))
    _, (out, log_sum) = jax.lax.scan(block, None, blocks)
    return _join_heads(out, (*q.shape[:3], v.shape[3])), _join_statistics(log_sum, q.shape)


def _backward_part(
    parameters: AttentionParameters, residuals: AttentionResiduals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, in its dtype, and of k and v, in float32."""
    q, k, v, key_ranges, log_sum, delta, _ = residuals
    keys_by_head, values_by_head = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)  # [B, G, T, K], [B, G, T, V]

    def block(totals: tuple[jax.Array, jax.Array], arrays: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        index, q, key_ranges, log_sum, delta, d_out = arrays
        key_block = _KeyBlock.select(parameters, index, q.shape[3], k.shape[1])
        block_keys, block_values = key_block.take(keys_by_head), key_block.take(values_by_head)
        # Keys before queries: each matmul below then reads its operands in their layout, or transposes one of size K.
        visible = jnp.swapaxes(key_ranges.make_mask(key_block.rows), 1, 2)[:, None, :, None]
        scores = _compute_scores(parameters, "BGTK,BGRSK->BGTRS", block_keys, q)
        weights = jnp.exp(jnp.where(visible, scores, MASKED) - log_sum[:, :, None])
        d_weights = _einsum("BGTV,BGRSV->BGTRS", block_values, d_out)
        d_scores = weights * (d_weights - delta[:, :, None]) * parameters.scale
        if parameters.softcap is not None:
            d_scores *= 1 - jnp.square(scores / parameters.softcap)  # unmasked: masked scores are huge
        d_scores = d_scores.astype(q.dtype)
        d_keys = _einsum("BGTRS,BGRSK->BGTK", d_scores, q)
        d_values = _einsum("BGTRS,BGRSV->BGTV", weights.astype(v.dtype), d_out)
        d_queries = jnp.moveaxis(_einsum("BGTK,BGTRS->BGKRS", block_keys, d_scores).astype(q.dtype), 2, 4)
        return (key_block.add(totals[0], d_keys), key_block.add(totals[1], d_values)), d_queries

    zeros = jnp.zeros(keys_by_head.shape, jnp.float32), jnp.zeros(values_by_head.shape, jnp.float32)
    heads = k.shape[2]
    split_q, split_gradient = (_split_heads(x, heads) for x in (q, gradient))
    split_log_sum, split_delta = (_split_statistics(x, heads) for x in (log_sum, delta))
    index, ranges = jnp.arange(split_q.shape[0]), _split_ranges(key_ranges)
    blocks = (index, split_q, ranges, split_log_sum, split_delta, split_gradient)
    totals, d_queries = jax.lax.scan(block, zeros, blocks)
    d_keys, d_values = (jnp.swapaxes(total, 1, 2) for total in totals)
    return _join_heads(d_queries, q.shape), d_keys, d_values


def _compute_scores(parameters: AttentionParameters, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the scores before masking, in float32. x, y: queries and keys, in the order of `subscripts`."""
    scores = _einsum(subscripts, x, y) * parameters.scale
    return scores if parameters.softcap is None else parameters.softcap * jnp.tanh(scores / parameters.softcap)


def _einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class _KeyBlock:
    """Keys that a block of queries may see: `size` of them from `start`, or all keys if `start` is None."""

    start: jax.Array | None
    size: int

    @classmethod
    def select(cls, parameters: AttentionParameters, index: jax.Array, queries: int, keys: int) -> "_KeyBlock":
        """Select the keys of the block `index` of `queries` queries."""
        before, after = parameters.keys_before, parameters.keys_after
        if before is None or after is None:
            return cls(None, keys)
        size = before + queries + after
        if size >= keys:
            return cls(None, keys)
        return cls(jnp.clip(index * queries - before, 0, keys - size), size)

    @property
    def rows(self) -> jax.Array:
        return jnp.arange(self.size) + (0 if self.start is None else self.start)

    def take(self, x: jax.Array) -> jax.Array:
        """Take the block's keys from x [B, G, T, K]."""
        return x if self.start is None else jax.lax.dynamic_slice_in_dim(x, self.start, self.size, 2)

    def add(self, total: jax.Array, part: jax.Array) -> jax.Array:
        """Add `part`, of the block's keys, to `total`, of all keys."""
        if self.start is None:
            return total + part
        return jax.lax.dynamic_update_slice_in_dim(total, self.take(total) + part, self.start, 2)


def _split(x: jax.Array, fill: int = 0) -> jax.Array:
    """Split [B, S, ...] into blocks of queries, [blocks, B, Q, ...]; the last block is padded with `fill`."""
    blocks = -(-x.shape[1] // QUERY_BLOCK)
    size = -(-x.shape[1] // blocks)
    padding = [(0, 0), (0, blocks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    padded = jnp.pad(x, padding, constant_values=fill)
    return jnp.moveaxis(padded.reshape(x.shape[0], blocks, size, *x.shape[2:]), 1, 0)


def _split_ranges(key_ranges: KeyRanges) -> KeyRanges:
    return KeyRanges(_split(key_ranges.first, 1), _split(key_ranges.last, 0))  # the padding sees nothing


def _split_heads(x: jax.Array, groups: int) -> jax.Array:
    """Split [B, S, H, K] into [blocks, B, G, R, Q, K]."""
    blocks = _split(x)
    grouped = blocks.reshape(*blocks.shape[:3], groups, -1, x.shape[-1])
    return jnp.moveaxis(grouped, 2, 4)


def _join_heads(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Invert `_split_heads`. shape: [B, S, H, K]."""
    rows = jnp.moveaxis(jnp.moveaxis(x, 4, 2), 0, 1)  # [B, blocks, Q, G, R, K]
    return rows.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]


def _split_statistics(x: jax.Array, groups: int) -> jax.Array:
    """Split [B, H, S] into [blocks, B, G, R, Q]."""
    blocks = _split(jnp.swapaxes(x, 1, 2))  # [blocks, B, Q, H]
    return jnp.moveaxis(blocks.reshape(*blocks.shape[:3], groups, -1), 2, 4)


def _join_statistics(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Invert `_split_statistics`. shape: [B, S, H, K]."""
    return jnp.moveaxis(x, 0, 3).reshape(shape[0], shape[2], -1)[:, :, : shape[1]]
