"""Random bits as a hash of where a value is: each device forms those of its own part, and no mesh changes them."""

import jax
import jax.numpy as jnp

GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: neighbours' products with it are far apart


def mix(bits: jax.Array) -> jax.Array:
    """uint32 -> uint32: MurmurHash3's finalizer, under which every bit depends on every other."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


def places(shape: tuple[int, ...]) -> jax.Array:
    """uint32: of every value of an array its number."""
    number = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        number = number * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return number
