"""Quantised operands and products of them: the arithmetic of `precision.matmul`.

fp8: one scale per tensor, from its current largest magnitude (current scaling); e4m3 for weights and inputs, e5m2 for
    incoming gradients, which need range (Micikevicius et al. 2022, arXiv:2209.05433).
int8: one scale per token of the inputs and per output channel of the weights, in the forward only; the backward treats
    rounding as the identity. outliers.py splits off the columns of the inputs that are much larger than the others.
int8_qat, int4_qat: only weights are rounded, with scales per output channel or per group of contracted values. Products
    use the dequantised weights in the compute dtype; the gradient passes straight through (Jacob et al. 2018,
    arXiv:1712.05877).

nf4: 4-bit NormalFloat for frozen bases (QLoRA: Dettmers et al. 2023, arXiv:2305.14314), two codes per byte and one
    scale per block. Blocks and bytes lie along one dimension of a matrix, `dim`, with N values. Values i and i + N/2
    share a byte, i in its low bits, so that decoding concatenates two halves. With double quantisation the scales are
    codes too: 8 bits, relative to the largest scale along `dim` (`tops`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxopt_llm.config import Matmul
from jaxopt_llm.core import tree
from jaxopt_llm.kernels import products
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import GROUP_AXIS, gathered_sharding

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
INT4_GROUP = 32  # values that share a scale
MAX_CODES = {"int8": 127, "int8_qat": 127, "int4_qat": 7}  # code of the largest magnitude: symmetric, with a code for 0
SMALLEST = 2.0**-100  # lower bound of a tensor's largest magnitude, so that a tensor of zeros gets zeros as codes


@struct.dataclass
class Quantised:
    """Operand of a product as codes × scales.

    scales: float32. Either a scalar, or of the codes' rank, with size 1 for a scale per whole dimension and a divisor
        of the dimension's size for a scale per group.
    """

    codes: jax.Array
    scales: jax.Array


Operand = jax.Array | Quantised


def quantise_weight(
    matmul: Matmul, array: jax.Array, summed: tuple[int, ...], largest: jax.Array | None = None
) -> Quantised:
    """Quantise a weight.

    summed: the dimensions that the product sums over. largest: the weight's largest magnitude, float32, if it is known.
    """
    if matmul == "fp8":
        return to_float8(array, E4M3, largest=largest)
    if matmul == "int4_qat":
        return to_grouped_integers(array, summed[-1], MAX_CODES[matmul])
    return to_integers(array, summed, MAX_CODES[matmul])


def quantise_inputs(matmul: Matmul, x: jax.Array, summed: tuple[int, ...], grouped: bool) -> Operand:
    """Return x quantised if `matmul` is fp8 or int8; otherwise return x unchanged.

    grouped: whether a `vmap` over gradient groups surrounds the call, so that x is a part of the tensor.
    """
    if matmul == "fp8":
        return to_float8(x, E4M3, grouped)
    return to_integers(x, summed, MAX_CODES[matmul]) if matmul == "int8" else x


def quantise_gradient(matmul: Matmul, dy: jax.Array, grouped: bool) -> Operand:
    """Return dy quantised if `matmul` is fp8; otherwise return dy unchanged."""
    return to_float8(dy, E5M2, grouped) if matmul == "fp8" else dy


def find_largest(array: jax.Array, leading: int = 0) -> jax.Array:
    """Return the largest magnitude of each row of a stack, float32. leading: dimensions of the stack; 0 for none."""
    return jnp.max(jnp.abs(array), axis=tuple(range(leading, array.ndim))).astype(jnp.float32)


def to_float8(array: jax.Array, dtype: jnp.dtype, grouped: bool = False, largest: jax.Array | None = None) -> Quantised:
    """Round to float8, with one scale. largest: `find_largest(array)`, if it is known."""
    if largest is None:
        largest = find_largest(array)
    if grouped:
        largest = jax.lax.pmax(largest, GROUP_AXIS)
    scale = jnp.maximum(largest, SMALLEST) / float(jnp.finfo(dtype).max)
    # Rounded to bfloat16: `dequantise` multiplies by the scale in the compute dtype, the form in which XLA recognises
    # cuBLASLt's fp8 matmul.
    scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)
    return Quantised((array.astype(jnp.float32) / scale).astype(dtype), scale)


def to_integers(array: jax.Array, dims: int | tuple[int, ...], max_code: int) -> Quantised:
    """Round to the nearest int8 code. Values along `dims` share a scale; the largest magnitude has code ±max_code."""
    array = array.astype(jnp.float32)
    scales = jnp.max(jnp.abs(array), axis=dims, keepdims=True) / max_code
    codes = jnp.round(array / jnp.where(scales > 0, scales, 1))
    return Quantised(codes.astype(jnp.int8), scales)


def to_grouped_integers(array: jax.Array, dim: int, max_code: int) -> Quantised:
    """Round to integers, with one scale per INT4_GROUP values along `dim`."""
    shape = array.shape
    grouped = array.reshape(*shape[:dim], -1, INT4_GROUP, *shape[dim + 1 :])
    quantised = to_integers(grouped, dim + 1, max_code)
    return Quantised(quantised.codes.reshape(shape), jnp.squeeze(quantised.scales, dim + 1))


def dequantise(operand: Operand, dtype: str) -> jax.Array:
    """Return codes × scales in `dtype`. An array is returned unchanged."""
    if not isinstance(operand, Quantised):
        return operand
    codes, scales = operand.codes, operand.scales
    if codes.dtype in (E4M3, E5M2):
        return codes.astype(dtype) * scales.astype(dtype)
    for dim, (size, count) in enumerate(zip(codes.shape, scales.shape, strict=True)):
        if count not in (1, size):
            scales = jnp.repeat(scales, size // count, axis=dim)
    return (codes.astype(jnp.float32) * scales).astype(dtype)


def einsum(
    subscripts: str,
    x: Operand,
    y: Operand,
    compute_dtype: str,
    dtype: Any,
    split: tuple[str, int] | None = None,
    added: jax.Array | float = 0.0,
    on_one_cpu: bool = False,
) -> jax.Array:
    """Compute `jnp.einsum` with result `dtype`.

    Two int8 operands are multiplied as integers, all others in the compute dtype. On GPUs that support it, XLA turns a
    product of dequantised fp8 operands into one call of cuBLASLt.

    split: the contracted axis that devices divide, and the number of parts. With integers, each device sums its part
        and rounds it to `dtype`, as it does in 16 bits; otherwise XLA would send the 32-bit integers between devices.
    added: float32, added to a product of integers before it is rounded to `dtype`: one array for each part, along the
        first axis, with `split`.
    on_one_cpu: whether the product runs on one CPU device (kernels/products.py).
    """
    if isinstance(x, Quantised) and isinstance(y, Quantised) and x.codes.dtype == y.codes.dtype == jnp.int8:
        operands, result = subscripts.split("->")
        operand_axes = operands.split(",")
        scales = (_along_result(q.scales, axes, result) for q, axes in zip((x, y), operand_axes, strict=True))
        codes = [x.codes, y.codes]
        if split is not None:
            axis, parts = split
            codes = [_split_dim(c, axes.index(axis), parts) for c, axes in zip(codes, operand_axes, strict=True)]
            subscripts = ",".join(axes.replace(axis, f"Z{axis}") for axes in operand_axes) + f"->Z{result}"
        summed = jnp.einsum(subscripts, *codes, preferred_element_type=jnp.int32)
        y = (summed.astype(jnp.float32) * next(scales) * next(scales) + added).astype(dtype)
        # Not jnp.sum: it would widen 16-bit values to float32, and so the bytes between devices.
        return y if split is None else jax.lax.reduce(y, jnp.zeros((), y.dtype), jax.lax.add, (0,))
    left, right = (dequantise(operand, compute_dtype) for operand in (x, y))
    return products.einsum(subscripts, left, right, dtype, on_one_cpu)


def problems(matmul: Matmul, specs: tree.Tree, placement: Placement) -> list[str]:
    """Return an error message if groups of INT4_GROUP do not divide the segments' weights on each `tensor` device.

    specs: of the weights without adapters, which are not rounded.
    """
    for path, spec in tree.leaves_with_path(specs) if matmul == "int4_qat" else ():
        if spec.leading and spec.contracting:
            size = gathered_sharding(spec, placement).shard_shape(spec.shape)[spec.contracting[-1]]
            if size % INT4_GROUP:
                return [
                    f"precision.matmul=int4_qat: {path} sums over {size} values on each device, not a multiple of "
                    f"{INT4_GROUP}: set --precision.matmul int8_qat, or change the model or --mesh.tensor"
                ]
    return []


def _split_dim(array: jax.Array, dim: int, parts: int) -> jax.Array:
    return array.reshape(*array.shape[:dim], parts, -1, *array.shape[dim + 1 :])


def _along_result(scales: jax.Array, axes: str, result: str) -> jax.Array:
    """Return an operand's scales, size 1 where the product sums, in a shape that broadcasts with the result."""
    kept = "".join(axis for axis in result if axis in axes)
    missing = tuple(dim for dim, axis in enumerate(result) if axis not in axes)
    return jnp.expand_dims(jnp.einsum(f"{axes}->{kept}", scales), missing)


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
