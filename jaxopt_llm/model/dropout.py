"""Dropout of what adapters read, by a hash of where a value is: no mesh, microbatch or recomputation changes it."""

import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxopt_llm import tree
from jaxopt_llm.hashing import GOLDEN, mix, places
from jaxopt_llm.model.leaves import LoraWeight


def with_noise(weights: tree.Tree, noise: jax.Array | None, layer: jax.Array) -> tree.Tree:
    """A block's weights, of which each adapter with dropout has noise of its own.

    noise: uint32 [B, S], the batch's; None where nothing is to be dropped. layer: int32, its number.
    """

    def own(path: tuple[object, ...], weight: tree.Leaf) -> tree.Leaf:
        if noise is None or not (isinstance(weight, LoraWeight) and weight.dropout):
            return weight
        salt = jnp.uint32(zlib.crc32(tree.path_string(path).encode()))
        return replace(weight, noise=mix(noise ^ mix(salt + jnp.uint32(GOLDEN) * layer.astype(jnp.uint32))))

    return jax.tree_util.tree_map_with_path(own, weights, is_leaf=lambda leaf: isinstance(leaf, LoraWeight))


def drop(x: jax.Array, noise: jax.Array, rate: float) -> jax.Array:
    """Values become zero with probability `rate`, the others grow so that the mean stays. x: [B, S, ...]; noise: uint32
    [B, S]."""
    features = x.shape[2:]
    bits = mix(noise.reshape(*noise.shape, *(1 for _ in features)) ^ mix(places(features)))
    kept = bits >= jnp.uint32(round(rate * 2**32))
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
