"""Dropout of the input of adapters, by a hash of each value's position.

The result depends on neither the mesh, nor the microbatches, nor recomputation.
"""

import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxopt_llm.core import tree
from jaxopt_llm.core.hashing import GOLDEN, linear_indices, mix_bits
from jaxopt_llm.model.linear.leaves import LoraWeight


def with_noise(weights: tree.Tree, noise: jax.Array | None, layer: jax.Array) -> tree.Tree:
    """Return a block's weights, with separate noise for each adapter that has dropout.

    noise: uint32 [B, S], the batch's; None disables dropout. layer: int32, index of the layer.
    """

    def add_noise(path: tuple[object, ...], weight: tree.Leaf) -> tree.Leaf:
        if noise is None or not (isinstance(weight, LoraWeight) and weight.dropout):
            return weight
        salt = jnp.uint32(zlib.crc32(tree.path_string(path).encode()))
        return replace(weight, noise=mix_bits(noise ^ mix_bits(salt + jnp.uint32(GOLDEN) * layer.astype(jnp.uint32))))

    return jax.tree_util.tree_map_with_path(add_noise, weights, is_leaf=lambda leaf: isinstance(leaf, LoraWeight))


def apply_dropout(x: jax.Array, noise: jax.Array, rate: float) -> jax.Array:
    """Set values to zero with probability `rate`, and scale the others by 1 / (1 - rate).

    x: [B, S, ...]; noise: uint32 of as many tokens, in the same order.
    """
    features = x.shape[2:]
    bits = mix_bits(noise.reshape(*x.shape[:2], *(1 for _ in features)) ^ mix_bits(linear_indices(features)))
    kept = bits >= jnp.uint32(round(rate * 2**32))
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
