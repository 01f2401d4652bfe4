"""Context: information on the tokens of a microbatch that every block reads."""

from dataclasses import field
from typing import Any

import jax
from flax import struct

from jaxopt_llm.config import Kind
from jaxopt_llm.core.tree import Leaf
from jaxopt_llm.kernels.attention_types import KeyRanges
from jaxopt_llm.parallel.placement import Placement


@struct.dataclass
class Context:
    """Positions, masks and cache indices of the tokens [B, S] of a microbatch.

    positions: int32 [B, S].
    key_ranges: the rows, or slots of the cache, that each token sees without a window.
    cache_index: int32 [B], the slot of the first token of each row; None without a cache.
    noise: uint32 [B, S], see Batch; None without dropout.
    loss_mask: bool [B, S], the tokens that the loss counts; None with a cache.
    token_mask: bool [B, S], False for padding; None with a cache and in a model without experts.
    lengths: int32 [B, S] or [B, 1], tokens of each token's document so far known, with a cache all after them being
        padding; None without a cache where no document can be long enough to change the frequencies of RoPE.
    layer_inputs: [layers, B, S, ...], what the tokens give to each layer beside the residual stream; None: nothing.
    caches: for each kind of layers, the cache that layers without keys of their own read; {} before the layers that
        give them.
    """

    positions: jax.Array
    key_ranges: KeyRanges
    placement: Placement = struct.field(pytree_node=False)
    cache_index: Leaf = None
    noise: Leaf = None
    loss_mask: Leaf = None
    token_mask: Leaf = None
    lengths: Leaf = None
    layer_inputs: Leaf = None
    caches: dict[Kind, Any] = field(default_factory=dict)


@struct.dataclass
class NewCache:
    """In place of a cache: the block returns a cache of just these tokens, which layers after it read."""
