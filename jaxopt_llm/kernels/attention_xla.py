"""Attention in XLA's own operations, by blocks of queries: for any device, and what other kernels are compared with.

Beside operands and result the log of the softmax's sum alone is kept for the backward, which forms the scores again
block by block (Dao et al. 2022, arXiv:2205.14135; Rabe & Staats 2021, arXiv:2112.05682): nothing of size [S, T] is ever
whole.

Values may have another head size than queries and keys, and so has then the result.

Letters: B batch, S queries, T keys, H heads, G key-value heads, R = H / G, K head size, V that of values, Q queries of
one block.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.spans import Form, Spans

QUERY_BLOCK = 512  # queries at once: scores are [B, H, QUERY_BLOCK, T] in float32
CAUSAL_PARTS = 4  # of the queries, each with the keys up to its own end: 5/8 of all scores are formed, in 4 loops
CAUSAL_ROWS = 128  # queries of a part at least: below, a loop more costs more than the scores that it spares
MASKED = float(jnp.finfo(jnp.float32).min)  # finite: scores - peak of a query that sees nothing must not be NaN


def forward(form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans) -> tuple[jax.Array, jax.Array]:
    """See attention.Implementation."""
    q, spans = _masks_of_a_layer(q, spans)
    outs, log_sums = [], []
    for rows, seen in _parts(form, q.shape[1], k.shape[1]):
        out, log_sum = _forward_part(form, q[:, rows], k[:, seen], v[:, seen], _rows(spans, rows))
        outs.append(out)
        log_sums.append(log_sum)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(log_sums, axis=2)


def backward(
    form: Form,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: Spans,
    log_sum: jax.Array,
    mean: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See attention.Implementation."""
    q, spans = _masks_of_a_layer(q, spans)
    parts, gradients = _parts(form, q.shape[1], k.shape[1]), []
    for rows, seen in parts:
        of_queries = (q[:, rows], _rows(spans, rows), log_sum[:, :, rows], mean[:, :, rows], gradient[:, rows])
        gradients.append(_backward_part(form, k[:, seen], v[:, seen], of_queries))
    # The last part sees all keys. Added to zeros, XLA gathers them all over `tensor` and `fsdp` in a pipeline.
    _, d_keys, d_values = gradients[-1]
    for (_, seen), (_, d_k, d_v) in zip(parts[:-1], gradients[:-1], strict=True):
        d_keys, d_values = d_keys.at[:, seen].add(d_k), d_values.at[:, seen].add(d_v)
    d_queries = jnp.concatenate([each[0] for each in gradients], axis=1)
    return d_queries, d_keys.astype(k.dtype), d_values.astype(v.dtype)


def _masks_of_a_layer(q: jax.Array, spans: Spans) -> tuple[jax.Array, Spans]:
    """Spans that seem to depend on the queries. Else JAX forms what follows from them alone before the loop over
    layers: the masks of all queries, keys and heads, whole."""
    return jax.lax.optimization_barrier((q, spans))


def _parts(form: Form, queries: int, keys: int) -> list[tuple[slice, slice]]:
    """Rows of queries, and the rows of keys that they may see. With a window, blocks look for their own."""
    if form.before is not None or form.after != 0:
        return [(slice(0, queries), slice(0, keys))]
    size = max(-(-queries // CAUSAL_PARTS), CAUSAL_ROWS)
    ends = [min(start + size, queries) for start in range(0, queries, size)]
    return [(slice(start, end), slice(0, end)) for start, end in zip([0, *ends], ends, strict=False)]


def _rows(spans: Spans, rows: slice) -> Spans:
    return Spans(spans.first[:, rows], spans.last[:, rows])


def _forward_part(form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans) -> tuple[jax.Array, jax.Array]:
    keys_by_head, values_by_head = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)  # [B, G, T, K], [B, G, T, V]

    def block(_: None, each: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        index, q, spans = each
        near = _Near.of_block(form, index, q.shape[3], k.shape[1])
        visible = spans.visible(near.rows)[:, None, None]
        scores = _scores(form, "BGRSK,BGTK->BGRST", q, near.take(keys_by_head))
        scores = jnp.where(visible, scores, MASKED)
        peak = jnp.max(scores, axis=-1)
        weights = jnp.exp(scores - peak[..., None])
        # A query that sees nothing: output 0 now, and weights exp(-inf) = 0 in the backward.
        total = jnp.where(peak > MASKED, jnp.sum(weights, axis=-1), jnp.inf)
        out = _einsum("BGRST,BGTV->BGRSV", weights.astype(v.dtype), near.take(values_by_head)) / total[..., None]
        return None, (out.astype(q.dtype), peak + jnp.log(total))

    split_q = _split_heads(q, k.shape[2])
    blocks = (jnp.arange(split_q.shape[0]), split_q, _split_spans(spans))
    _, (out, log_sum) = jax.lax.scan(block, None, blocks)
    return _join_heads(out, (*q.shape[:3], v.shape[3])), _join_sums(log_sum, q.shape)


def _backward_part(form: Form, k: jax.Array, v: jax.Array, of_queries: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, in its dtype, and of k and v, in float32."""
    q, spans, log_sum, mean, gradient = of_queries
    keys_by_head, values_by_head = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)  # [B, G, T, K], [B, G, T, V]

    def block(totals: tuple[jax.Array, jax.Array], each: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        index, q, spans, log_sum, mean, d_out = each
        near = _Near.of_block(form, index, q.shape[3], k.shape[1])
        near_keys, near_values = near.take(keys_by_head), near.take(values_by_head)
        # Keys before queries: every product below then reads its operands as they lie, or transposes one of size K.
        visible = jnp.swapaxes(spans.visible(near.rows), 1, 2)[:, None, :, None]
        scores = _scores(form, "BGTK,BGRSK->BGTRS", near_keys, q)
        weights = jnp.exp(jnp.where(visible, scores, MASKED) - log_sum[:, :, None])
        d_weights = _einsum("BGTV,BGRSV->BGTRS", near_values, d_out)
        d_scores = weights * (d_weights - mean[:, :, None]) * form.scale
        if form.softcap is not None:
            d_scores *= 1 - jnp.square(scores / form.softcap)  # of the scores before masking: those are infinite
        d_scores = d_scores.astype(q.dtype)
        d_keys = _einsum("BGTRS,BGRSK->BGTK", d_scores, q)
        d_values = _einsum("BGTRS,BGRSV->BGTV", weights.astype(v.dtype), d_out)
        d_queries = jnp.moveaxis(_einsum("BGTK,BGTRS->BGKRS", near_keys, d_scores).astype(q.dtype), 2, 4)
        return (near.add(totals[0], d_keys), near.add(totals[1], d_values)), d_queries

    zeros = jnp.zeros(keys_by_head.shape, jnp.float32), jnp.zeros(values_by_head.shape, jnp.float32)
    heads = k.shape[2]
    split_q, split_gradient = (_split_heads(x, heads) for x in (q, gradient))
    split_sum, split_mean = (_split_sums(x, heads) for x in (log_sum, mean))
    blocks = (jnp.arange(split_q.shape[0]), split_q, _split_spans(spans), split_sum, split_mean, split_gradient)
    totals, d_queries = jax.lax.scan(block, zeros, blocks)
    d_keys, d_values = (jnp.swapaxes(total, 1, 2) for total in totals)
    return _join_heads(d_queries, q.shape), d_keys, d_values


def _scores(form: Form, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Scores, float32, of queries and keys in the order that `subscripts` says, before masking."""
    scores = _einsum(subscripts, x, y) * form.scale
    return scores if form.softcap is None else form.softcap * jnp.tanh(scores / form.softcap)


def _einsum(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class _Near:
    """The keys that a block of queries may see: `size` of them from `start`; all where `start` is None."""

    start: jax.Array | None
    size: int

    @classmethod
    def of_block(cls, form: Form, index: jax.Array, queries: int, keys: int) -> "_Near":
        if form.before is None or form.after is None:
            return cls(None, keys)
        size = form.before + queries + form.after
        if size >= keys:
            return cls(None, keys)
        return cls(jnp.clip(index * queries - form.before, 0, keys - size), size)

    @property
    def rows(self) -> jax.Array:
        return jnp.arange(self.size) + (0 if self.start is None else self.start)

    def take(self, x: jax.Array) -> jax.Array:
        """Of [B, G, T, K]."""
        return x if self.start is None else jax.lax.dynamic_slice_in_dim(x, self.start, self.size, 2)

    def add(self, total: jax.Array, part: jax.Array) -> jax.Array:
        if self.start is None:
            return total + part
        return jax.lax.dynamic_update_slice_in_dim(total, self.take(total) + part, self.start, 2)


def _split(x: jax.Array, fill: int = 0) -> jax.Array:
    """[B, S, ...] -> [blocks, B, Q, ...], the last block padded."""
    blocks = -(-x.shape[1] // QUERY_BLOCK)
    size = -(-x.shape[1] // blocks)
    padding = [(0, 0), (0, blocks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    padded = jnp.pad(x, padding, constant_values=fill)
    return jnp.moveaxis(padded.reshape(x.shape[0], blocks, size, *x.shape[2:]), 1, 0)


def _split_spans(spans: Spans) -> Spans:
    return Spans(_split(spans.first, 1), _split(spans.last, 0))  # what pads them sees nothing


def _split_heads(x: jax.Array, groups: int) -> jax.Array:
    """[B, S, H, K] -> [blocks, B, G, R, Q, K]."""
    blocks = _split(x)
    grouped = blocks.reshape(*blocks.shape[:3], groups, -1, x.shape[-1])
    return jnp.moveaxis(grouped, 2, 4)


def _join_heads(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_split_heads`; shape: [B, S, H, K]."""
    rows = jnp.moveaxis(jnp.moveaxis(x, 4, 2), 0, 1)  # [B, blocks, Q, G, R, K]
    return rows.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]


def _split_sums(x: jax.Array, groups: int) -> jax.Array:
    """[B, H, S] -> [blocks, B, G, R, Q]."""
    blocks = _split(jnp.swapaxes(x, 1, 2))  # [blocks, B, Q, H]
    return jnp.moveaxis(blocks.reshape(*blocks.shape[:3], groups, -1), 2, 4)


def _join_sums(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_split_sums`; shape: [B, S, H, K]."""
    return jnp.moveaxis(x, 0, 3).reshape(shape[0], shape[2], -1)[:, :, : shape[1]]
