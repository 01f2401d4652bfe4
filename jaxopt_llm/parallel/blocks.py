"""Blocks of int8 or int4 codes, which collectives move in place of values of 16 or 32 bits.

The method is that of ZeRO++ (Wang et al. 2023, arXiv:2306.10209): values are rounded on the device that sends them,
with one scale for each block, and every sum is formed in float32 on the device that receives them.

A block is a run of values along the last dimension, within one device's part. Letters: N values of the last dimension,
V values of a block.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxopt_llm.core.block_format import BLOCK_SIZES, MAX_CODES, Bits
from jaxopt_llm.parallel.placement import Spec

BITS: dict[str, Bits] = {"int8": 8, "int4": 4}  # of the formats of gradients that are not exact
QUANTISE_SCOPE, DEQUANTISE_SCOPE = "quantise_blocks", "dequantise_blocks"  # named scopes in compiled programs


def moves_as_blocks(spec: Spec) -> bool:
    """Return whether a parameter may move as codes: a matrix that need not be exact."""
    return not spec.exact and bool(spec.contracting)  # a bias per head has two dimensions, too


def find_block_size(shape: tuple[int, ...], *shardings: NamedSharding) -> int | None:
    """Return the largest block size that divides each device's part of the last dimension; None if there is none.

    shardings: those between which the array moves.
    """
    size = math.gcd(*(shape[-1] // _count_parts(sharding, len(shape)) for sharding in shardings))
    return next((values for values in BLOCK_SIZES if size % values == 0), None)


def _count_parts(sharding: NamedSharding, ndim: int) -> int:
    """Return the number of parts of the last dimension. JAX's shard_shape does not support manual axes of the mesh."""
    axes = sharding.spec[-1] if len(sharding.spec) == ndim else None
    return math.prod(sharding.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))


def move_blocks(array: jax.Array, before: NamedSharding, after: NamedSharding, values: int, bits: Bits) -> jax.Array:
    """Move an array [..., N] from one sharding to another as codes, and return it in float32.

    XLA inserts the collective: a gather if `after` divides fewer dimensions, an all-to-all if it divides others.

    values: the block size, from `find_block_size` of both shardings.
    """
    with jax.named_scope(QUANTISE_SCOPE):
        codes, scales = encode(jax.lax.with_sharding_constraint(array, before), values, bits)
        # Otherwise XLA may move the array, and quantise on the device that receives it.
        codes, scales = (jax.lax.with_sharding_constraint(each, before) for each in (codes, scales))
    codes, scales = (jax.lax.with_sharding_constraint(each, after) for each in (codes, scales))
    with jax.named_scope(DEQUANTISE_SCOPE):
        return jax.lax.with_sharding_constraint(decode(codes, scales, bits), after)


def encode(array: jax.Array, values: int, bits: Bits) -> tuple[jax.Array, jax.Array]:
    """Round each value to the nearest code of its block.

    A block with an infinity or a NaN is NaN after `decode`, so that the guard of the step sees it.

    Returns:
        Codes, int8 [..., N], or uint8 [..., N/2] with two codes per byte; and scales, float32 [..., N/V].
    """
    blocks = array.astype(jnp.float32).reshape(*array.shape[:-1], -1, values)  # [..., N/V, V]
    scales = jnp.max(jnp.abs(blocks), axis=-1) / MAX_CODES[bits]
    codes = jnp.round(blocks / jnp.where(scales > 0, scales, 1)[..., None])
    scales = jnp.where(jnp.isfinite(scales), scales, jnp.nan)
    if bits == 8:
        return codes.astype(jnp.int8).reshape(array.shape), scales
    # Values v and v + V/2 of a block share a byte, v in its low bits. No byte has values of two devices.
    low, high = jnp.split((codes + MAX_CODES[4]).astype(jnp.uint8), 2, axis=-1)
    return (low | (high << 4)).reshape(*array.shape[:-1], -1), scales


def decode(codes: jax.Array, scales: jax.Array, bits: Bits) -> jax.Array:
    """Return the values, float32 [..., N], from what `encode` returns."""
    blocks = codes.reshape(*scales.shape, -1)  # [..., N/V, V], or V/2 bytes
    if bits == 4:
        blocks = jnp.concatenate([blocks & 15, blocks >> 4], axis=-1).astype(jnp.float32) - MAX_CODES[4]
    return (blocks.astype(jnp.float32) * scales[..., None]).reshape(*codes.shape[:-1], -1)
