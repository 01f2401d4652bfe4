"""4-bit NormalFloat (QLoRA: Dettmers et al. 2023, arXiv:2305.14314): two codes per byte and one scale per block.

Blocks and bytes lie along one dimension of a matrix, `dim`, with N values. Values i and i + N/2 share a byte, i in its
low bits, so that decoding concatenates two halves. With double quantisation the scales are codes too: 8 bits, relative
to the largest scale along `dim` (`tops`).
"""

import jax
import jax.numpy as jnp
import numpy as np

# Value of each code, relative to the largest magnitude of its block (the paper's appendix E): quantiles of a normal
# distribution, eight of each sign, including 0 and ±1.
TABLE = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
MIDPOINTS = (TABLE[1:] + TABLE[:-1]) / 2
BLOCK_SIZES = (64, 32, 16)  # values that share a scale: the paper's size first, then sizes for narrow matrices
MAX_CODE = 255  # code of the largest scale


def block_size(size: int) -> int | None:
    """Return the largest block size that divides `size`; None if there is none."""
    return next((values for values in BLOCK_SIZES if size % values == 0), None)


def encode(array: jax.Array, dim: int, double: bool) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Round each value of an array to the nearest value of its block.

    array: [..., N, ...]; dim: the dimension of N, counted from the end.

    Returns:
        Codes uint8 [..., N/2, ...]; scales [..., N/block, ...], uint8 with `double`, otherwise float32; and the largest
        scales, float32 [..., 1, ...], to which uint8 scales are relative, None without `double`.
    """
    values = block_size(array.shape[dim])
    assert values is not None
    blocks = _split_blocks(array.astype(jnp.float32), dim, values)  # [..., N/block, block, ...]
    largest = jnp.max(jnp.abs(blocks), axis=dim)  # counted from the end, `dim` is now the dimension within a block
    scales, tops = (largest, None) if not double else _encode_scales(largest, dim)
    used = jnp.expand_dims(_decode_scales(scales, tops), dim)
    shares = blocks / jnp.where(used > 0, used, 1)
    codes = sum((shares > between).astype(jnp.uint8) for between in MIDPOINTS).reshape(array.shape)
    low, high = jnp.split(codes, 2, axis=dim)
    return low | (high << 4), scales, tops


def decode(codes: jax.Array, scales: jax.Array, tops: jax.Array | None, dim: int) -> jax.Array:
    """Return float32 [..., N, ...], the inverse of `encode` up to rounding."""
    wide = jnp.concatenate([codes & 15, codes >> 4], axis=dim)
    values = jnp.asarray(TABLE).at[wide].get(mode="promise_in_bounds")
    return values * jnp.repeat(_decode_scales(scales, tops), values.shape[dim] // scales.shape[dim], axis=dim)


def _split_blocks(array: jax.Array, dim: int, values: int) -> jax.Array:
    axis = array.ndim + dim
    return array.reshape(*array.shape[:axis], -1, values, *array.shape[axis + 1 :])


def _encode_scales(scales: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    tops = jnp.max(scales, axis=dim, keepdims=True)
    return jnp.round(MAX_CODE * scales / jnp.where(tops > 0, tops, 1)).astype(jnp.uint8), tops


def _decode_scales(scales: jax.Array, tops: jax.Array | None) -> jax.Array:
    return scales if tops is None else scales.astype(jnp.float32) * (tops / MAX_CODE)
