"""Attention of packed sequences.

Letters: B batch, S queries, T keys, H heads, G key-value heads, R = H / G, K head size.
"""

import math

import jax
import jax.numpy as jnp

QUERY_BLOCK = 512  # scores held at once: [B, H, QUERY_BLOCK, T] in float32


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
) -> jax.Array:
    """Causal softmax attention with grouped queries, in blocks of queries so that no [S, T] array is whole.

    q: [B, S, H, K]; k, v: [B, T, G, K], G dividing H; query head h reads key-value head h // (H / G).
    positions, segment_ids: int [B, S]; those of the keys [B, T], the queries' own by default (then T = S, and both
        are in row order: positions grow by one within a segment).
    A query sees the keys of its segment at its own position or before it and, with a window, fewer than `window`
    positions before. Returns [B, S, H, K] in q's dtype; softmax is in float32, scaled by 1 / sqrt(K).
    """
    own_keys = key_positions is None
    key_positions = positions if key_positions is None else key_positions
    key_segment_ids = segment_ids if key_segment_ids is None else key_segment_ids
    length, keys = q.shape[1], k.shape[1]
    blocks = -(-length // QUERY_BLOCK)
    size = -(-length // blocks)
    if blocks == 1:
        return _attend(q, k, v, positions, segment_ids, key_positions, key_segment_ids, window)

    # A block of queries in row order reaches back no further than its window: the other keys are not even read.
    reach = min(size + window - 1, keys) if window is not None and own_keys else keys

    def block(index: jax.Array, queries: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        start = jnp.clip((index + 1) * size - reach, 0, keys - reach)
        q, positions, segment_ids = queries

        def near(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, reach, axis=1) if reach < keys else x

        return _attend(
            q, near(k), near(v), positions, segment_ids, near(key_positions), near(key_segment_ids), window
        )  # fmt: skip

    def split(x: jax.Array) -> jax.Array:  # [B, S, ...] -> [blocks, B, size, ...]
        padded = jnp.pad(x, [(0, 0), (0, blocks * size - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(x.shape[0], blocks, size, *x.shape[2:]), 1, 0)

    # Recomputed in the backward, else the loop would keep every block's scores: [S, T] after all.
    block = jax.checkpoint(block, prevent_cse=False)
    _, out = jax.lax.scan(
        lambda _, each: (None, block(*each)), None, (jnp.arange(blocks), (split(q), split(positions), split(segment_ids)))
    )
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], blocks * size, *q.shape[2:])[:, :length]


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    key_positions: jax.Array,
    key_segment_ids: jax.Array,
    window: int | None,
) -> jax.Array:
    batch, length, heads, head_dim = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, length, groups, heads // groups, head_dim)
    distance = positions[:, :, None] - key_positions[:, None, :]  # [B, S, T]
    visible = (segment_ids[:, :, None] == key_segment_ids[:, None, :]) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    scores = jnp.einsum("BSGRK,BTGK->BGRST", q, k, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
    # Finite, so that a row that sees nothing (a padded query) gives a mean instead of NaN.
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("BGRST,BTGK->BSGRK", probabilities, v)
    return out.reshape(batch, length, heads, head_dim)
