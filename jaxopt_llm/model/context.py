"""What every block is told about the tokens it reads."""

import jax
from flax import struct

from jaxopt_llm.kernels.spans import Spans
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.tree import Leaf


@struct.dataclass
class Context:
    """positions: int32 [B, S]; spans: the rows, or slots of the cache, that each token sees but for a window; noise:
    uint32 [B, S] or None (see Batch); counts: bool [B, S], the tokens whose loss counts, None with a cache; real: bool
    [B, S], those that are no padding, None with a cache and where no layer has experts.

    With a cache: cache_index, int32 scalar, the slot of the first token; cache_layer, int32 scalar, the layer's place
    in its stack's cache.
    """

    positions: jax.Array
    spans: Spans
    placement: Placement = struct.field(pytree_node=False)
    cache_index: Leaf = None
    cache_layer: Leaf = None
    noise: Leaf = None
    counts: Leaf = None
    real: Leaf = None
