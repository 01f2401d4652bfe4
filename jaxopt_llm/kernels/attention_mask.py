"""Attention mask as a range of keys for each query.

Letters: B batch, S queries, T keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KeyRanges(NamedTuple):
    """First and last visible key row of each query, both included; int32 [B, S] each.

    If first > last, the query sees no key.

    One range of consecutive keys is enough for a causal mask, a sliding window, packed documents, and a cache that is
    padded on the left. It is also enough for a part of the keys: in the rows of that part, the range may begin before
    the first row or end after the last.
    """

    first: jax.Array
    last: jax.Array

    def limit_to_window(self, window: int | None) -> "KeyRanges":
        """Return the ranges cut to their last `window` keys; None cuts nothing."""
        return self if window is None else KeyRanges(jnp.maximum(self.first, self.last - (window - 1)), self.last)

    def take_queries(self, rows: jax.Array) -> "KeyRanges":
        """Gather the ranges of the queries in `rows`, int [B, N]. A row that does not exist gets an empty range."""
        exists = (rows >= 0) & (rows < self.first.shape[1])
        first, last = (jnp.take_along_axis(x, rows, axis=1, mode="clip") for x in self)
        return KeyRanges(jnp.where(exists, first, -1), jnp.where(exists, last, -1))

    def make_mask(self, keys: jax.Array) -> jax.Array:
        """Return the mask of the keys in rows `keys`, int [T]: bool [B, S, T], True where the key is visible."""
        return (self.first[:, :, None] <= keys) & (keys <= self.last[:, :, None])


def make_document_ranges(segment_ids: jax.Array, causal: bool = True) -> KeyRanges:
    """Return the key ranges of packed documents.

    Each query sees the keys of its own segment: up to its own row if causal, otherwise all of them. segment_ids: int
    [B, S]; the rows of a segment are consecutive.
    """
    row = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    # The first row always begins a segment, and the last row always ends one: these are the two paddings below.
    first = jax.lax.cummax(jnp.where(jnp.pad(begins, ((0, 0), (1, 0))), row, 0), axis=1)
    if causal:
        return KeyRanges(first, row)
    end = segment_ids.shape[1] - 1
    last = jax.lax.cummin(jnp.where(jnp.pad(begins, ((0, 0), (0, 1))), row, end), axis=1, reverse=True)
    return KeyRanges(first, last)
