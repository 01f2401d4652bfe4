"""4-bit NormalFloat (QLoRA: Dettmers et al. 2023, arXiv:2305.14314): codes two to a byte, and a scale for each block.

Blocks and bytes lie along one dimension of a matrix, `dim`, of N values: value i and value i + N/2 share a byte, the
first in its low bits, so that what is read back is two halves side by side. With double quantisation the scales are
codes themselves: eight bits of the largest scale along `dim`.
"""

import jax
import jax.numpy as jnp
import numpy as np

# What a code stands for, of its block's largest magnitude: the paper's appendix E. The quantiles of a normal
# distribution, eight of each sign, with 0 and ±1 among them.
TABLE = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
BETWEEN = (TABLE[1:] + TABLE[:-1]) / 2
BLOCKS = (64, 32, 16)  # values that share a scale, the paper's first; the others are for matrices too narrow for it
MOST = 255  # the code of the largest scale


def block(size: int) -> int | None:
    """How many of `size` values share a scale; None where no block divides them."""
    return next((values for values in BLOCKS if size % values == 0), None)


def encode(array: jax.Array, dim: int, double: bool) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Codes uint8 [..., N/2, ...], scales [..., N/block, ...], and what these are relative to, float32 [..., 1, ...].

    array: [..., N, ...]; dim: of N, from the end. The scales are uint8 with `double`, else float32 and relative to
    nothing. Each value goes to the nearest that its block has.
    """
    values = block(array.shape[dim])
    assert values is not None
    blocks = _split(array.astype(jnp.float32), dim, values)  # [..., N/block, block, ...]
    largest = jnp.max(jnp.abs(blocks), axis=dim)  # `dim` from the end is now that of the block's values
    scales, tops = (largest, None) if not double else _encode_scales(largest, dim)
    used = jnp.expand_dims(_decode_scales(scales, tops), dim)
    shares = blocks / jnp.where(used > 0, used, 1)
    codes = sum((shares > between).astype(jnp.uint8) for between in BETWEEN).reshape(array.shape)
    low, high = jnp.split(codes, 2, axis=dim)
    return low | (high << 4), scales, tops


def decode(codes: jax.Array, scales: jax.Array, tops: jax.Array | None, dim: int) -> jax.Array:
    """float32 [..., N, ...]: what `encode` made codes of."""
    wide = jnp.concatenate([codes & 15, codes >> 4], axis=dim)
    values = jnp.asarray(TABLE).at[wide].get(mode="promise_in_bounds")
    return values * jnp.repeat(_decode_scales(scales, tops), values.shape[dim] // scales.shape[dim], axis=dim)


def _split(array: jax.Array, dim: int, values: int) -> jax.Array:
    at = array.ndim + dim
    return array.reshape(*array.shape[:at], -1, values, *array.shape[at + 1 :])


def _encode_scales(scales: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    tops = jnp.max(scales, axis=dim, keepdims=True)
    return jnp.round(MOST * scales / jnp.where(tops > 0, tops, 1)).astype(jnp.uint8), tops


def _decode_scales(scales: jax.Array, tops: jax.Array | None) -> jax.Array:
    return scales if tops is None else scales.astype(jnp.float32) * (tops / MOST)
