"""Intermediates of a block, whose names remat policies select: the list, and the tag that marks them.

Letters: B batch, S sequence, D width, H heads, G key-value heads, K head size, V head size of values, F MLP width.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxopt_llm.config import Intermediate

# Logical axes of each intermediate after the batch axis.
INTERMEDIATE_AXES: dict[Intermediate, tuple[str, ...]] = {
    "block_input": ("residual_sequence", "embed"),
    "attention_input": ("sequence", "embed"),
    "query_latent": ("sequence", "query_latent"),
    "latent": ("sequence", "latent"),
    "rotary_key": ("sequence", "rotary_dim"),
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
    """Return x, with a name for `jax.checkpoint` policies."""
    return checkpoint_name(x, name)
