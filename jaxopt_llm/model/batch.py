"""Batch: the input of a model, packed token sequences."""

import jax.numpy as jnp
from flax import struct

from jaxopt_llm.core.tree import Leaf


@struct.dataclass
class Batch:
    """Packed token sequences.

    Fields have the shape [M·B, S] as read, and [M, B, S] after the split into M microbatches of B sequences of S
    tokens. Those of a teacher have one dimension more.

    tokens:      int32, ids below the tokenizer's vocabulary size.
    targets:     int32, the token that follows each token.
    loss_mask:   bool, True where the target is a real token of the same document; in rows of whole documents that get
                 scores, True for all tokens.
    segment_ids: int32, one id per document in its row, 0 for padding; tokens attend only within their own segment.
    positions:   int32, restart at 0 in every segment.
    reference:   float32, log-probability of each target by a reference model, or anything with the same sum over the
                 counted targets of each document; None if the objective needs none, or the data have none.
    labels:      float32, number of each token's document: its label, or the advantage of an answer that the model drew;
                 None if the objective needs none.
    sampled:     float32, log-probability of each target by the sampler that drew it; None unless the model drew them.
    teacher:     compute dtype [..., S, D], input of the teacher's head, in the order and the sharding of the residual
                 stream; None without a teacher.
    teacher_ids: int32 [..., S, K], the tokens that a teacher finds most likely after each token; None unless the data
                 have them. All zeros where the target does not count.
    teacher_log_probabilities: float16 [..., S, K + 1], those of these tokens, and of all others together.
    noise:       uint32, random bits of the step for dropout; None without dropout.
    """

    tokens: Leaf
    targets: Leaf
    loss_mask: Leaf
    segment_ids: Leaf
    positions: Leaf
    reference: Leaf = None
    labels: Leaf = None
    sampled: Leaf = None
    teacher: Leaf = None
    teacher_ids: Leaf = None
    teacher_log_probabilities: Leaf = None
    noise: Leaf = None


def rows_of_documents(tokens: Leaf) -> Batch:
    """Return the batch of tokens [B, S] of which each row is one document, with all tokens counted."""
    ones = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return Batch(tokens, tokens, ones.astype(jnp.bool), segment_ids=ones, positions=positions)
