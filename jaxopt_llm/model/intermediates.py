"""The intermediates of a block that rematerialisation can name: one list, and the tag that marks them where they are
made.

Letters: B batch, S sequence, D width, H heads, G key-value heads, K head size, F MLP width.
"""

from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name

Intermediate = Literal[
    "block_input",  # [B, S, D], the residual stream as it enters the block
    "attention_input",  # [B, S, D], its norm, as the projections read it
    "query",  # [B, S, H, K], as projected: before norms and rotary positions
    "key",  # [B, S, G, K], likewise
    "value",  # [B, S, G, K]
    "attention",  # [B, S, H, K], the values as attention mixes them, and its log-sum-exp: see kernels/attention.py
    "attention_output",  # [B, S, D], their projection, as it joins the residual stream
    "mlp_input",  # [B, S, D], the norm of that sum, as the MLP reads it
    "mlp_gate",  # [B, S, F], before the activation function; absent with mlp=gelu
    "mlp_up",  # [B, S, F], likewise
    "mlp_output",  # [B, S, D], as it joins the residual stream; a backward wants it for a norm after it alone
]


# Their logical axes after the batch's, as the placement knows them.
AXES: dict[Intermediate, tuple[str, ...]] = {
    "block_input": ("residual_sequence", "embed"),
    "attention_input": ("sequence", "embed"),
    "query": ("sequence", "heads", "head_dim"),
    "key": ("sequence", "kv_heads", "head_dim"),
    "value": ("sequence", "kv_heads", "head_dim"),
    "attention": ("sequence", "heads", "head_dim"),
    "attention_output": ("residual_sequence", "embed"),
    "mlp_input": ("sequence", "embed"),
    "mlp_gate": ("sequence", "mlp"),
    "mlp_up": ("sequence", "mlp"),
    "mlp_output": ("residual_sequence", "embed"),
}


def tag(x: jax.Array, name: Intermediate) -> jax.Array:
    """x, known to `jax.checkpoint` by this name."""
    return checkpoint_name(x, name)
