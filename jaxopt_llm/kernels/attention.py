"""Attention of packed sequences.

Letters: B batch, S queries, T keys, H heads, G key-value heads, R = H / G, K head size, Q queries of one block.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

QUERY_BLOCK = 512  # queries at once: scores are [B, H, QUERY_BLOCK, T] in float32
CAUSAL_PARTS = 4  # of the queries, each with the keys up to its own end: 5/8 of all scores are formed, in 4 loops
CAUSAL_ROWS = 128  # queries of a part at least: below, a loop more costs more than the scores that it spares
SAVED = "attention"  # the name under which jax.checkpoint knows result and log-sum-exp: saved, no forward runs again
MASKED = float(jnp.finfo(jnp.float32).min)  # finite: scores - peak of a query that sees nothing must not be NaN

Where = tuple[jax.Array, jax.Array]  # positions and segment ids, int [B, S] of queries or [B, T] of keys


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    positions: jax.Array,
    segment_ids: jax.Array,
    key_positions: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Causal softmax attention with grouped queries, softmax in float32.

    q: [B, S, H, K]; k, v: [B, T, G, K], G dividing H; query head h reads key-value head h // (H / G).
    positions, segment_ids: int [B, S]; those of the keys [B, T], the queries' own by default (then T = S, and both
        are in row order: positions grow by one within a segment).
    A query sees the keys of its segment at its own position or before it and, with a window, fewer than `window`
    positions before; one that sees nothing gives 0. Returns [B, S, H, K] in q's dtype.
    scale: multiplies the scores, 1 / sqrt(K) by default.
    softcap: then bounds them, as softcap × tanh(score / softcap), before what is not visible is masked.

    Runs in blocks of queries and saves, beside operands and result, the log of the softmax's sum for the
    backward, which forms the scores again block by block (Dao et al. 2022, arXiv:2205.14135; Rabe & Staats 2021,
    arXiv:2112.05682): nothing of size [S, T] is ever whole.
    """
    queries = keys = (positions, segment_ids)
    in_order = key_positions is None
    assert in_order is (key_segment_ids is None), "keys have both positions and segments, or neither"
    if key_positions is not None and key_segment_ids is not None:
        keys = (key_positions, key_segment_ids)
    form = _Form(window, in_order, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap)
    return _attention(form, q, k, v, queries, keys)


@dataclass(frozen=True)
class _Form:
    """window, scale, softcap: as `attention` takes them; in_order: keys are the queries' own, in row order."""

    window: int | None
    in_order: bool
    scale: float
    softcap: float | None

    @property
    def reach(self) -> int | None:
        """How many rows before itself a query may need, where rows say so."""
        return self.window if self.in_order else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(form: _Form, q: jax.Array, k: jax.Array, v: jax.Array, queries: Where, keys: Where) -> jax.Array:
    return _forward(form, q, k, v, queries, keys)[0]


def _forward(
    form: _Form, q: jax.Array, k: jax.Array, v: jax.Array, queries: Where, keys: Where
) -> tuple[jax.Array, Any]:
    outs, log_sums = [], []
    for rows, seen in _parts(form, q.shape[1], k.shape[1]):
        part = (q[:, rows], k[:, seen], v[:, seen], _rows(queries, rows), _rows(keys, seen))
        out, log_sum = _forward_part(form, *part)
        outs.append(out)
        log_sums.append(log_sum)
    out, log_sums = checkpoint_name((jnp.concatenate(outs, axis=1), log_sums), SAVED)
    return out, (q, k, v, queries, keys, out, log_sums)


def _backward(form: _Form, residuals: Any, gradient: jax.Array) -> Any:
    q, k, v, queries, keys, out, log_sums = residuals
    mean = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)  # [B, S, H, 1]
    parts, gradients = _parts(form, q.shape[1], k.shape[1]), []
    for (rows, seen), log_sum in zip(parts, log_sums, strict=True):
        part = (q[:, rows], k[:, seen], v[:, seen], _rows(queries, rows), _rows(keys, seen))
        gradients.append(_backward_part(form, part, log_sum, gradient[:, rows], mean[:, rows]))
    # The last part sees all keys. Added to zeros, XLA gathers them all over `tensor` and `fsdp` in a pipeline.
    _, d_keys, d_values = gradients[-1]
    for (_, seen), (_, d_k, d_v) in zip(parts[:-1], gradients[:-1], strict=True):
        d_keys, d_values = d_keys.at[:, seen].add(d_k), d_values.at[:, seen].add(d_v)
    d_queries = jnp.concatenate([each[0] for each in gradients], axis=1)
    return d_queries, d_keys.astype(k.dtype), d_values.astype(v.dtype), None, None


_attention.defvjp(_forward, _backward)


def _parts(form: _Form, queries: int, keys: int) -> list[tuple[slice, slice]]:
    """Rows of queries, and the rows of keys that they may see. With a window, blocks look for their own."""
    if form.window is not None or not form.in_order:
        return [(slice(0, queries), slice(0, keys))]
    size = max(-(-queries // CAUSAL_PARTS), CAUSAL_ROWS)
    ends = [min(start + size, queries) for start in range(0, queries, size)]
    return [(slice(start, end), slice(0, end)) for start, end in zip([0, *ends], ends, strict=False)]


def _rows(where: Where, rows: slice) -> Where:
    return where[0][:, rows], where[1][:, rows]


def _forward_part(
    form: _Form, q: jax.Array, k: jax.Array, v: jax.Array, queries: Where, keys: Where
) -> tuple[jax.Array, jax.Array]:
    """The output, and for the backward the log of the softmax's sum, by blocks."""
    keys_by_head, values_by_head = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)  # [B, G, T, K]

    def block(_: None, each: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        index, q, queries = each
        near = _Near.of_block(index, q.shape[3], k.shape[1], form.reach)
        visible = _visible(queries, near.take_where(keys), form.window)[:, None, None]
        scores = _scores(form, "BGRSK,BGTK->BGRST", q, near.take(keys_by_head, 2))
        scores = jnp.where(visible, scores, MASKED)
        peak = jnp.max(scores, axis=-1)
        weights = jnp.exp(scores - peak[..., None])
        # A query that sees nothing: output 0 now, and weights exp(-inf) = 0 in the backward.
        total = jnp.where(peak > MASKED, jnp.sum(weights, axis=-1), jnp.inf)
        out = _einsum("BGRST,BGTK->BGRSK", weights.astype(v.dtype), near.take(values_by_head, 2)) / total[..., None]
        return None, (out.astype(q.dtype), peak + jnp.log(total))

    split_q = _split_heads(q, k.shape[2])
    blocks = (jnp.arange(split_q.shape[0]), split_q, jax.tree.map(_split, queries))
    _, (out, log_sum) = jax.lax.scan(block, None, blocks)
    return _join_heads(out, q.shape), log_sum


def _backward_part(
    form: _Form, operands: Any, log_sum: jax.Array, gradient: jax.Array, mean: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, in its dtype, and of k and v, in float32. mean: of d_weights under the softmax, [B, S, H, 1]."""
    q, k, v, queries, keys = operands
    keys_by_head, values_by_head = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)  # [B, G, T, K]

    def block(totals: tuple[jax.Array, jax.Array], each: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        index, q, queries, log_sum, d_out, mean = each
        near = _Near.of_block(index, q.shape[3], k.shape[1], form.reach)
        near_keys, near_values = near.take(keys_by_head, 2), near.take(values_by_head, 2)
        # Keys before queries: every product below then reads its operands as they lie, or transposes one of size K.
        visible = jnp.swapaxes(_visible(queries, near.take_where(keys), form.window), 1, 2)[:, None, :, None]
        scores = _scores(form, "BGTK,BGRSK->BGTRS", near_keys, q)
        weights = jnp.exp(jnp.where(visible, scores, MASKED) - log_sum[:, :, None])
        d_weights = _einsum("BGTK,BGRSK->BGTRS", near_values, d_out)
        d_scores = weights * (d_weights - mean[:, :, None, ..., 0]) * form.scale
        if form.softcap is not None:
            d_scores *= 1 - jnp.square(scores / form.softcap)  # of the scores before masking: those are infinite
        d_scores = d_scores.astype(q.dtype)
        d_keys = _einsum("BGTRS,BGRSK->BGTK", d_scores, q)
        d_values = _einsum("BGTRS,BGRSK->BGTK", weights.astype(v.dtype), d_out)
        d_queries = jnp.moveaxis(_einsum("BGTK,BGTRS->BGKRS", near_keys, d_scores).astype(q.dtype), 2, 4)
        return (near.add(totals[0], d_keys, 2), near.add(totals[1], d_values, 2)), d_queries

    zeros = jnp.zeros(keys_by_head.shape, jnp.float32)
    split_q, split_gradient, split_mean = (_split_heads(x, k.shape[2]) for x in (q, gradient, mean))
    blocks = (jnp.arange(split_q.shape[0]), split_q, jax.tree.map(_split, queries), log_sum, split_gradient, split_mean)
    totals, d_queries = jax.lax.scan(block, (zeros, zeros), blocks)
    d_keys, d_values = (jnp.swapaxes(total, 1, 2) for total in totals)
    return _join_heads(d_queries, q.shape), d_keys, d_values


def _visible(queries: Where, keys: Where, window: int | None) -> jax.Array:
    """bool [B, Q, T]"""
    distance = queries[0][:, :, None] - keys[0][:, None, :]
    visible = (queries[1][:, :, None] == keys[1][:, None, :]) & (distance >= 0)
    return visible if window is None else visible & (distance < window)


def _scores(form: _Form, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Scores, float32, of queries and keys in the order that `subscripts` says, before masking."""
    scores = _einsum(subscripts, x, y) * form.scale
    return scores if form.softcap is None else form.softcap * jnp.tanh(scores / form.softcap)


def _einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class _Near:
    """The rows of keys that a block of queries may see: `size` of them from `start`; all where `start` is None."""

    start: jax.Array | None
    size: int

    @classmethod
    def of_block(cls, index: jax.Array, queries: int, keys: int, reach: int | None) -> "_Near":
        size = keys if reach is None else queries + reach - 1
        if size >= keys:
            return cls(None, keys)
        return cls(jnp.clip((index + 1) * queries - size, 0, keys - size), size)

    def take(self, x: jax.Array, axis: int) -> jax.Array:
        return x if self.start is None else jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis)

    def take_where(self, keys: Where) -> Where:
        return self.take(keys[0], 1), self.take(keys[1], 1)

    def add(self, total: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        if self.start is None:
            return total + part
        return jax.lax.dynamic_update_slice_in_dim(total, self.take(total, axis) + part, self.start, axis)


def _split(x: jax.Array) -> jax.Array:
    """[B, S, ...] -> [blocks, B, Q, ...], the last block padded."""
    blocks = -(-x.shape[1] // QUERY_BLOCK)
    size = -(-x.shape[1] // blocks)
    padded = jnp.pad(x, [(0, 0), (0, blocks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(x.shape[0], blocks, size, *x.shape[2:]), 1, 0)


def _split_heads(x: jax.Array, groups: int) -> jax.Array:
    """[B, S, H, K] -> [blocks, B, G, R, Q, K]."""
    blocks = _split(x)
    grouped = blocks.reshape(*blocks.shape[:3], groups, -1, x.shape[-1])
    return jnp.moveaxis(grouped, 2, 4)


def _join_heads(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_split_heads`; shape: [B, S, H, K]."""
    rows = jnp.moveaxis(jnp.moveaxis(x, 4, 2), 0, 1)  # [B, blocks, Q, G, R, K]
    return rows.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]
