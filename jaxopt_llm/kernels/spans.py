"""What attention is told beside its operands: which keys each query sees, and what is made of its scores.

Letters: B batch, S queries, T keys.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Spans(NamedTuple):
    """The keys that each query sees: the rows from `first` to `last`, both included, none where first > last; int32
    [B, S] each.

    One run of keys is enough for the causal order, a window, packed documents, a cache that is padded on the left, and
    a part of the keys, in whose rows the span may begin before the first or end after the last.
    """

    first: jax.Array
    last: jax.Array

    def within(self, window: int | None) -> "Spans":
        """The last `window` keys of each alone; all, if None."""
        return self if window is None else Spans(jnp.maximum(self.first, self.last - (window - 1)), self.last)

    def from_row(self, row: jax.Array | int) -> "Spans":
        """In rows of the keys from `row` on."""
        return Spans(self.first - row, self.last - row)

    def of_rows(self, rows: jax.Array) -> "Spans":
        """Of queries in these of the rows, int [B, N], alone. One that is in none of them sees nothing."""
        there = (rows >= 0) & (rows < self.first.shape[1])
        first, last = (jnp.take_along_axis(each, rows, axis=1, mode="clip") for each in self)
        return Spans(jnp.where(there, first, -1), jnp.where(there, last, -1))

    def visible(self, keys: jax.Array) -> jax.Array:
        """bool [B, S, T]; keys: their rows, int [T]."""
        return (self.first[:, :, None] <= keys) & (keys <= self.last[:, :, None])


def of_documents(segment_ids: jax.Array, causal: bool = True) -> Spans:
    """Of rows that see those of their own segment, up to themselves or all. segment_ids: int [B, S], runs of equals."""
    row = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    begins = segment_ids[:, 1:] != segment_ids[:, :-1]
    # The first row begins a segment and the last ends one, whatever is beside them.
    first = jax.lax.cummax(jnp.where(jnp.pad(begins, ((0, 0), (1, 0))), row, 0), axis=1)
    if causal:
        return Spans(first, row)
    end = segment_ids.shape[1] - 1
    last = jax.lax.cummin(jnp.where(jnp.pad(begins, ((0, 0), (0, 1))), row, end), axis=1, reverse=True)
    return Spans(first, last)


@dataclass(frozen=True)
class Form:
    """scale: multiplies the scores; softcap: then bounds them, as softcap × tanh(score / softcap).

    before, after: a promise that the query in row r sees no key before row r - before and none after r + after, for a
    kernel that wants to know when it is compiled; None promises nothing.

    window: the keys that a query sees at most, wherever they are. Kernels have it in their names: XLA makes one of two
    loops that do the same, such as a ring's of two layers, and what counts their FLOPs could not tell them apart.
    """

    scale: float
    softcap: float | None = None
    before: int | None = None
    after: int | None = None
    window: int | None = None

    def named(self, kernel: str) -> str:
        return kernel if self.window is None else f"{kernel}_within_{self.window}"
