"""What every block is told about the tokens it reads."""

import jax
from flax import struct

from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.tree import Leaf


@struct.dataclass
class Context:
    """positions, segment_ids: int32 [B, S]; noise: uint32 [B, S] or None (see Batch).

    With a cache: cache_index, int32 scalar, the slot of the first token; cache_padding, int32 [B], how many slots at
    the start of a row's cache hold nothing; cache_layer, int32 scalar, the layer's place in its stack's cache.
    """

    positions: jax.Array
    segment_ids: jax.Array
    placement: Placement = struct.field(pytree_node=False)
    cache_index: Leaf = None
    cache_padding: Leaf = None
    cache_layer: Leaf = None
    noise: Leaf = None
