"""The intermediates of a block that rematerialisation can name: one list, and the tag that marks them where they are
made.

Letters: B batch, S sequence, D width, H heads, G key-value heads, K head size, V that of values, F MLP
width.
"""

from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name

Intermediate = Literal[
    "block_input",  # [B, S, D], the residual stream as it enters the block
    "attention_input",  # [B, S, D], its norm, as the projections read it
    "query_latent",  # [B, S, model.query_rank], what queries are projected from, before its norm; absent with 0
    "latent",  # [B, S, model.latent_rank], what keys and values are projected from, likewise
    "rotary_key",  # [B, S, model.rotary_head_dim], the key that all heads share, before rotary positions; with latents
    "query",  # [B, S, H, K], as projected: before norms and rotary positions
    "key",  # [B, S, G, K], likewise; with latents without what heads share
    "value",  # [B, S, G, V]
    "attention",  # [B, S, H, V], the values as attention mixes them, and its log-sum-exp: see kernels/attention.py
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
    "query_latent": ("sequence", "query_latent"),
    "latent": ("sequence", "latent"),
    "rotary_key": ("sequence", "turned_dim"),
    "query": ("sequence", "heads", "head_dim"),
    "key": ("sequence", "kv_heads", "key_dim"),
    "value": ("sequence", "kv_heads", "value_dim"),
    "attention": ("sequence", "heads", "value_dim"),
    "attention_output": ("residual_sequence", "embed"),
    "mlp_input": ("sequence", "embed"),
    "mlp_gate": ("sequence", "mlp"),
    "mlp_up": ("sequence", "mlp"),
    "mlp_output": ("residual_sequence", "embed"),
}


def tag(x: jax.Array, name: Intermediate) -> jax.Array:
    """x, known to `jax.checkpoint` by this name."""
    return checkpoint_name(x, name)
