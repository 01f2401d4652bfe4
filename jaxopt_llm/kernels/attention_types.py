"""Arguments of every implementation of attention: the mask, parameters, residuals, and the tiles of its GPU kernels.

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, V head size of the values.
"""

import contextlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxopt_llm.core.tree import Leaf

ALL_KEYS = "every_key_visible"  # the named scope of attention without a causal order


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

    def limit_to_chunk(self, chunk: int | None) -> "KeyRanges":
        """Return the ranges of a causal order cut to chunks of `chunk` keys, from the first key; None cuts nothing.

        The last key of a range is the query's own, whose chunk it keeps.
        """
        if chunk is None:
            return self
        return KeyRanges(jnp.maximum(self.first, self.last - (self.last - self.first) % chunk), self.last)

    def take_queries(self, rows: jax.Array) -> "KeyRanges":
        """Gather the ranges of the queries in `rows`, int [B, N]. A row that does not exist gets an empty range."""
        exists = (rows >= 0) & (rows < self.first.shape[1])
        first, last = (jnp.take_along_axis(x, rows, axis=1, mode="clip") for x in self)
        return KeyRanges(jnp.where(exists, first, -1), jnp.where(exists, last, -1))

    def make_mask(self, keys: jax.Array) -> jax.Array:
        """Return the mask of the keys in rows `keys`, int [T]: bool [B, S, T], True where the key is visible."""
        return (self.first[:, :, None] <= keys) & (keys <= self.last[:, :, None])

    def make_ring_mask(self, slots: int) -> jax.Array:
        """Return the mask of a ring of T = `slots` keys, bool [B, S, T]: that of position p is in row p mod T.

        A query sees fewer than T keys, or all that there are.
        """
        age = (self.last % slots)[:, :, None] - jnp.arange(slots)  # of the key in each row, from the query's own on
        return jnp.where(age < 0, age + slots, age) <= (self.last - self.first)[:, :, None]


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


def attention_scope(window: int | None, parts: int = 1, causal: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Return a named scope that records facts about attention that are not in a kernel's program.

    Args:
        window: number of the last keys that a query sees; None for all keys.
        parts: number of kernel calls, each with one part of the keys.
        causal: whether a query sees no key after its own.
    """
    if not causal:
        return jax.named_scope(ALL_KEYS)
    if window is None and parts == 1:
        return contextlib.nullcontext()
    return jax.named_scope(f"within_{window or 'all'}_keys_in_{parts}_parts")


@dataclass(frozen=True)
class AttentionParameters:
    """Scale, soft-cap and static bounds of a call, known when it is compiled.

    scale: factor of the scores.
    softcap: bound of the scaled scores, applied as softcap × tanh(score / softcap); None does not bound them.
    keys_before, keys_after: static bounds of the key ranges, for kernels that need them at compile time. The query in
        row r sees no key before row r - keys_before and none after row r + keys_after. None sets no bound.
    window: size of the sliding window, the maximum number of keys that a query sees, at any position. Kernels include
        it in their names. Otherwise XLA would merge two loops with the same body, such as the loops of a ring in two
        layers, and the FLOP counter could not tell them apart.
    segments: maximum number of segments in a row, padding included, for kernels that need it at compile time; None if
        any number is possible.
    rectangles: the visible pairs of a row are one rectangle, of its first queries and its last keys; all of them if
        `segments` is 1.
    ring: keys and values are a ring; see KeyRanges.make_ring_mask. Only xla and, for one query, pallas support it.
    """

    scale: float
    softcap: float | None = None
    keys_before: int | None = None
    keys_after: int | None = None
    window: int | None = None
    segments: int | None = None
    rectangles: bool = False
    ring: bool = False

    def kernel_name(self, kernel: str) -> str:
        return kernel if self.window is None else f"{kernel}_within_{self.window}"


class AttentionResiduals(NamedTuple):
    """Arrays that the backward of attention reads, in addition to the gradient of the output.

    An implementation reads `out` or `delta`, as its `reads_out` says; the other one is None.

    log_sum: log of each query's softmax sum over all its keys, float32 [B, H, S]; the keys here may be a part of them.
    delta: for each query and head, the sum over V of output gradient × output, float32 [B, H, S]. It is the mean of
        the gradients of the softmax weights, under the softmax (D in Dao 2023, arXiv:2307.08691).
    out: the output, [B, S, H, V].
    """

    q: jax.Array  # [B, S, H, K]
    k: jax.Array  # [B, T, G, K]
    v: jax.Array  # [B, T, G, V]
    key_ranges: KeyRanges
    log_sum: jax.Array
    delta: Leaf = None
    out: Leaf = None


@dataclass(frozen=True)
class Tile:
    """Rows that one program of a kernel works on at once, and options of Triton's compiler."""

    queries: int
    keys: int
    warps: int
    stages: int  # loads of the loop that are in flight, each with its own shared memory


@dataclass(frozen=True)
class Tiles:
    """Tiles of the three kernels."""

    forward: Tile
    d_queries: Tile
    d_keys: Tile  # gradients of keys and values
