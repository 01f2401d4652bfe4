"""Operands in fewer bits, and products of them: the arithmetic of `precision.matmul`.

fp8: one scale per tensor, of its own largest value (current scaling), e4m3 for weights and inputs, e5m2 for incoming
    gradients, which want range (Micikevicius et al. 2022, arXiv:2209.05433).
int8: one scale per token of the inputs and per output channel of the weights, in the forward alone (LLM.int8(),
    Dettmers et al. 2022, arXiv:2208.07339, without its outliers); the backward takes the rounding as the identity.
int8_qat, int4_qat: weights alone, per output channel or in groups of what a product sums over, multiplied in the
    compute dtype as what their codes stand for; the gradient passes straight through (Jacob et al. 2018,
    arXiv:1712.05877).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxopt_llm import tree
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.precision import Matmul
from jaxopt_llm.parallel.sharding import GROUPS, Placement

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
INT4_GROUP = 32  # values that share a scale
MOST = {"int8": 127, "int8_qat": 127, "int4_qat": 7}  # the code of the largest value: symmetric, zero is a code
SMALLEST = 2.0**-100  # of a largest value: a tensor of zeros has zeros for codes


@struct.dataclass
class Quantised:
    """codes × scales, as an operand of a product.

    scales: float32, a scalar; or of the codes' rank, 1 where one stands for a whole dimension, and a divisor of its
        size where it stands for a group.
    """

    codes: jax.Array
    scales: jax.Array


Operand = jax.Array | Quantised


def weight(matmul: Matmul, array: jax.Array, summed: tuple[int, ...]) -> Quantised:
    """summed: the dimensions that the product sums over."""
    if matmul == "fp8":
        return float8(array, E4M3)
    if matmul == "int4_qat":
        return in_groups(array, summed[-1], MOST[matmul])
    return integers(array, summed, MOST[matmul])


def inputs(matmul: Matmul, x: jax.Array, summed: tuple[int, ...], grouped: bool) -> Operand:
    """grouped: whether a `vmap` over gradient groups is around, which divides the tensor."""
    if matmul == "fp8":
        return float8(x, E4M3, grouped)
    return integers(x, summed, MOST[matmul]) if matmul == "int8" else x


def incoming(matmul: Matmul, dy: jax.Array, grouped: bool) -> Operand:
    """The gradient of a product's result."""
    return float8(dy, E5M2, grouped) if matmul == "fp8" else dy


def float8(array: jax.Array, dtype: jnp.dtype, grouped: bool = False) -> Quantised:
    largest = jnp.max(jnp.abs(array.astype(jnp.float32)))
    if grouped:
        largest = jax.lax.pmax(largest, GROUPS)
    scale = jnp.maximum(largest, SMALLEST) / float(jnp.finfo(dtype).max)
    # As bfloat16 has it: `wide` multiplies by it in the compute dtype, as cuBLAS's call wants it written.
    scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)
    return Quantised((array.astype(jnp.float32) / scale).astype(dtype), scale)


def integers(array: jax.Array, dims: int | tuple[int, ...], most: int) -> Quantised:
    """To the nearest code; one scale for what lies along `dims`, whose largest value is ±most."""
    array = array.astype(jnp.float32)
    scales = jnp.max(jnp.abs(array), axis=dims, keepdims=True) / most
    codes = jnp.round(array / jnp.where(scales > 0, scales, 1))
    return Quantised(codes.astype(jnp.int8), scales)


def in_groups(array: jax.Array, dim: int, most: int) -> Quantised:
    """One scale for every INT4_GROUP values along `dim`."""
    shape = array.shape
    grouped = array.reshape(*shape[:dim], -1, INT4_GROUP, *shape[dim + 1 :])
    found = integers(grouped, dim + 1, most)
    return Quantised(found.codes.reshape(shape), jnp.squeeze(found.scales, dim + 1))


def wide(operand: Operand, dtype: str) -> jax.Array:
    """What an operand stands for."""
    if not isinstance(operand, Quantised):
        return operand
    codes, scales = operand.codes, operand.scales
    if codes.dtype in (E4M3, E5M2):
        return codes.astype(dtype) * scales.astype(dtype)
    for dim, (size, of_scales) in enumerate(zip(codes.shape, scales.shape, strict=True)):
        if of_scales not in (1, size):
            scales = jnp.repeat(scales, size // of_scales, axis=dim)
    return (codes.astype(jnp.float32) * scales).astype(dtype)


def einsum(
    subscripts: str, x: Operand, y: Operand, compute_dtype: str, dtype: Any, split: tuple[str, int] | None = None
) -> jax.Array:
    """`jnp.einsum`, of result `dtype`: of int8 with int8 in integers, of all else in the compute dtype, whose products
    of dequantised fp8 XLA makes one call of cuBLASLt's on GPUs that have it.

    split: the summed axis that devices divide, and between how many. Of integers, each sums its part and rounds it to
        `dtype`, as it does of 16 bits; left to XLA, devices would send each other the integers, of 32.
    """
    if isinstance(x, Quantised) and isinstance(y, Quantised) and x.codes.dtype == y.codes.dtype == jnp.int8:
        operands, result = subscripts.split("->")
        axes = operands.split(",")
        scales = (_along(each.scales, of_each, result) for each, of_each in zip((x, y), axes, strict=True))
        codes = [each.codes for each in (x, y)]
        if split is not None:
            codes = [
                _in_parts(array, of_each.index(split[0]), split[1]) for array, of_each in zip(codes, axes, strict=True)
            ]
            subscripts = ",".join(of_each.replace(split[0], f"Z{split[0]}") for of_each in axes) + f"->Z{result}"
        summed = jnp.einsum(subscripts, *codes, preferred_element_type=jnp.int32)
        y = (summed.astype(jnp.float32) * next(scales) * next(scales)).astype(dtype)
        # Not jnp.sum: it would widen 16-bit values to float32, and so the bytes between devices.
        return y if split is None else jax.lax.reduce(y, jnp.zeros((), y.dtype), jax.lax.add, (0,))
    return jnp.einsum(subscripts, wide(x, compute_dtype), wide(y, compute_dtype), preferred_element_type=dtype)


def problems(matmul: Matmul, specs: tree.Tree, placement: Placement) -> list[str]:
    """Weights of the stacks that groups of INT4_GROUP values do not divide, on each device of `tensor`."""
    if matmul != "int4_qat":
        return []

    def left_over(path: str, spec: ParamSpec) -> tuple[str, int] | None:
        if not (spec.leading and spec.contracting):
            return None
        along = placement.gathered(spec).shard_shape(spec.shape)[spec.contracting[-1]]
        return (path, along) if along % INT4_GROUP else None

    found = jax.tree.leaves(tree.map_with_path(left_over, specs), is_leaf=lambda each: isinstance(each, tuple))
    return [
        f"precision.matmul=int4_qat: {path} sums over {along} values on each device, which are no groups of "
        f"{INT4_GROUP}: set --precision.matmul int8_qat, or change the model or mesh.tensor"
        for path, along in found[:1]
    ]


def _in_parts(array: jax.Array, dim: int, count: int) -> jax.Array:
    return array.reshape(*array.shape[:dim], count, -1, *array.shape[dim + 1 :])


def _along(scales: jax.Array, axes: str, result: str) -> jax.Array:
    """Scales of an operand, 1 where the product sums, to multiply the result by."""
    kept = "".join(axis for axis in result if axis in axes)
    missing = tuple(dim for dim, axis in enumerate(result) if axis not in axes)
    return jnp.expand_dims(jnp.einsum(f"{axes}->{kept}", scales), missing)
