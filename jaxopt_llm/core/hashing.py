"""Random bits as a hash of an element's index.

Each device computes the bits of its own shard only, and the bits do not depend on the mesh.
"""

import jax
import jax.numpy as jnp

GOLDEN = 0x9E3779B9  # 2^32 divided by the golden ratio: its products with neighbouring integers are far apart


def mix_bits(bits: jax.Array) -> jax.Array:
    """Hash uint32 values with MurmurHash3's finalizer, a bijection whose output bits each depend on all input bits."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


def linear_indices(shape: tuple[int, ...]) -> jax.Array:
    """Return the row-major index of every element of an array of this shape, modulo 2**32, as uint32."""
    index = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        index = index * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return index
