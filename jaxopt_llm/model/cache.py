"""Caches of one layer, for generation and for layers that read the keys of another: keys and values, or a state.

Keys and values are in a ring of T slots: the key of the token at position p is in slot p mod T. Without a window, T is
at least the length of the text, and a slot is written once. A layer with a window, or with chunks, has only the slots
of its window and REWIND more: later tokens take the slots of those that no query sees any more.

Letters: B batch, S sequence, T slots, G key-value heads, K head size.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxopt_llm.model.context import Context

# Slots of a ring beyond its window. A row can be continued after its last token, or after one of its last REWIND ones:
# with another end of a prompt, for example, or with a second answer to one prompt.
REWIND = 128


@struct.dataclass
class Cache:
    """Keys and values of the last tokens in one layer, [B, G, T, K].

    The order of dimensions is the one in which attention reads. In another order XLA would transpose the whole cache,
    twice for every token.

    in_order: the keys and the values that the queries of this call see, if they are in no ring; see `write`.
    """

    key: jax.Array
    value: jax.Array
    in_order: Any = None


@struct.dataclass
class RecurrentState:
    """State of a layer after the last token of each row, whatever the length of the text is.

    A row can only be continued after this token.

    state: float32 [B, H, K, V]. tails: the last inputs of a convolution, each [B, heads, taps - 1, size].
    """

    state: jax.Array
    tails: tuple[jax.Array, ...]


def describe_rings(caches: Any) -> tuple[int, int]:
    """Return the slots of the smallest ring, and the number of last tokens before which a longer text can be continued.

    Both are 0 if a layer has a recurrent state.
    """
    leaves = jax.tree.leaves(caches, is_leaf=lambda cache: isinstance(cache, RecurrentState))
    if any(isinstance(each, RecurrentState) for each in leaves):
        return 0, 0
    return min(each.shape[2] for each in leaves), REWIND


def count_slots(slots: int, window: int | None) -> int:
    """Return the slots of a layer for sequences of up to `slots` tokens. window: of a layer or a chunk, or None."""
    return slots if window is None else min(slots, window + REWIND)


def write(ring: jax.Array, new: jax.Array, context: Context, window: int | None) -> tuple[jax.Array, jax.Array]:
    """Write keys [B, S, G, K] into a ring [B, G, T, K], from position `context.cache_index` on.

    Several tokens with a window may replace keys that the first of them see, and their padding those that later queries
    see: such queries read the old ring and the new keys, in order.

    Returns:
        The ring, and the keys to attend to: the ring, or [B, G, T + S, K], the last T before the new ones and these.
    """
    slots, first, by_head = ring.shape[2], context.cache_index, jnp.swapaxes(new, 1, 2).astype(ring.dtype)
    if window is None or new.shape[1] == 1:

        def update(ring: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(ring, new, (0, first % slots if new.shape[1] == 1 else first, 0))

        ring = jax.vmap(update)(ring, by_head, first)
        return ring, ring

    def take(x: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.vmap(lambda x, rows: jnp.take(x, rows, axis=1, mode="clip"))(x, rows)

    slot, begin = jnp.arange(slots, dtype=jnp.int32), first[:, None]
    in_order = jnp.concatenate([take(ring, (begin + slot) % slots), by_head], axis=2)
    last = begin + new.shape[1] - 1 if context.lengths is None else context.lengths[:, -1:] - 1
    position = last - (last - slot) % slots  # the last one that is written to each slot
    return take(in_order, position - begin + slots), in_order


def keep_rings(caches: Any) -> Any:
    """Return the caches of all layers, after the last one has read them."""

    def keep(cache: Any) -> Any:
        return Cache(cache.key, cache.value) if isinstance(cache, Cache) else cache

    return jax.tree.map(keep, caches, is_leaf=lambda cache: isinstance(cache, Cache))
