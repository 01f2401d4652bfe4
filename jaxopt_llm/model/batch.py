"""What a model reads: one batch of packed sequences."""

from flax import struct

from jaxopt_llm.tree import Leaf


@struct.dataclass
class Batch:
    """Packed token sequences. Every field has one shape: [B, S] as read, [M, B, S] once split into microbatches.

    tokens:      int32, ids below the tokenizer's vocabulary size.
    targets:     int32, the token that follows each token.
    loss_mask:   bool, True where `targets` is a real token of the same document.
    segment_ids: int32, one id per document in its row, 0 of padding; tokens attend within their own segment only.
    positions:   int32, restart at 0 in every segment.
    noise:       uint32, random bits of the step, by which dropout drops; None where nothing is dropped.
    """

    tokens: Leaf
    targets: Leaf
    loss_mask: Leaf
    segment_ids: Leaf
    positions: Leaf
    noise: Leaf = None
