"""The only place where a weight meets computation: `einsum`, `take` and `materialise`.

Blocks hand a weight over as they were given it and never learn what it is. Each operation gathers the weight where it
is used and writes its own backward, so that the gradient is formed and summed over devices in the reduction's dtype
and what is kept in between is said here, whatever the rematerialisation policy.
"""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxopt_llm.model.leaves import Int8Weight, LoraWeight, dequantise
from jaxopt_llm.parallel.sharding import Placed, WeightShardings, gather, reduce_gradient

Whole = Placed | Int8Weight  # one array to compute with
Weight = Whole | LoraWeight
GRADIENT = "weight_gradient"  # the scope under which a compiled program and a profile name it
KEPT = "gathered weight"  # the name under which jax.checkpoint knows a gathered weight that the backward reuses


def einsum(subscripts: str, x: jax.Array, weight: Weight, dtype: jnp.dtype | None = None) -> jax.Array:
    """`jnp.einsum(subscripts, x, weight)`, in the weight's compute dtype.

    subscripts: "x's axes,weight's axes->result's axes"; every axis appears in at least two of the three.
    dtype: of the result, accumulated in float32 in any case; x's by default.
    """
    dtype = dtype or x.dtype
    if isinstance(weight, LoraWeight):
        down, up = _through_rank(subscripts)
        low = weight.scale * einsum(down, x, weight.lora_a)
        return einsum(subscripts, x, weight.base, dtype) + einsum(up, low, weight.lora_b, dtype)
    return _einsum(subscripts, dtype, x, *_split(weight))


def take(table: Weight, ids: jax.Array) -> jax.Array:
    """Rows of a table: weight [V, D], ids [...] -> [..., D]. Ids must be within the table: the host checks them."""
    if isinstance(table, LoraWeight):
        rows = "XYZ"[: ids.ndim]
        low = table.scale * take(table.lora_b, ids)
        return take(table.base, ids) + einsum(f"{rows}r,Dr->{rows}D", low, table.lora_a)
    return _take(*_split(table), ids)


def materialise(weight: Weight) -> jax.Array:
    """The whole weight in compute dtype, for what is neither product nor look-up: norm scales and biases."""
    assert isinstance(weight, Placed), "adapters and codes are of what a product sums over"
    return _materialise(*_split(weight))


def _through_rank(subscripts: str) -> tuple[str, str]:
    """A product's two steps through a low rank: "BSD,DHK->BSHK" -> ("BSD,Dr->BSr", "BSr,HKr->BSHK")."""
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    summed = "".join(axis for axis in right if axis not in result)
    others = "".join(axis for axis in right if axis in result)
    low = "".join(axis for axis in left if axis not in summed) + "r"
    return f"{left},{summed}r->{low}", f"{low},{others}r->{result}"


def _split(weight: Whole) -> tuple[Whole, jax.Array | None]:
    """The weight as it rests, and its tap, which no backward needs to keep."""
    return (replace(weight, tap=None), weight.tap) if isinstance(weight, Placed) else (weight, None)


def _shardings(weight: Whole) -> WeightShardings:
    return weight.codes.shardings if isinstance(weight, Int8Weight) else weight.shardings


def _gather(weight: Whole) -> jax.Array:
    """The weight in compute dtype, whole but for `tensor`. Codes are gathered as codes, and widened after."""
    if isinstance(weight, Int8Weight):
        gathered = Int8Weight(gather(weight.codes, jnp.int8), gather(weight.scales, jnp.float32))
        return dequantise(gathered).astype(_shardings(weight).compute_dtype)
    return gather(weight)


# In each of the three the weight itself has no cotangent (None): its gradient is the tap's.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum(subscripts, dtype, x, weight, tap):
    return jnp.einsum(subscripts, x, _gather(weight), preferred_element_type=dtype)


def _einsum_forward(subscripts, dtype, x, weight, tap):
    gathered = _gather(weight)
    y = jnp.einsum(subscripts, x, gathered, preferred_element_type=dtype)
    return y, (x, weight, checkpoint_name(gathered, KEPT) if _shardings(weight).keep else None)


def _einsum_backward(subscripts, dtype, residuals, dy):
    x, weight, gathered = residuals
    shardings = _shardings(weight)
    gathered = _gather(weight) if gathered is None else gathered
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    dy = dy.astype(x.dtype)
    dx = jnp.einsum(f"{result},{right}->{left}", dy, gathered, preferred_element_type=x.dtype)
    if not shardings.trainable:
        return dx, None, None
    dw = _weight_gradient(left, result, right, x, dy, shardings)
    return dx, None, reduce_gradient(dw, shardings)


@jax.named_scope(GRADIENT)
def _weight_gradient(left: str, result: str, right: str, x: jax.Array, dy: jax.Array, shardings: WeightShardings):
    rows = "".join(axis for axis in left if axis not in right)  # what is summed over: batch and sequence
    inputs, outputs = left.removeprefix(rows), result.removeprefix(rows)
    whole_rows = shardings.resting.mesh.shape["context"] == 1  # a split sequence cannot be merged with the batch
    if whole_rows and right in (inputs + outputs, outputs + inputs):
        # As one product of matrices: with more dimensions XLA for CPUs transposes a copy of x or dy.
        shape = [dict(zip(left + result, x.shape + dy.shape, strict=True))[axis] for axis in right]
        x, dy = (array.reshape(math.prod(array.shape[: len(rows)]), -1) for array in (x, dy))
        product = "RI,RO->IO" if right == inputs + outputs else "RI,RO->OI"
        return jnp.einsum(product, x, dy, preferred_element_type=shardings.reduce_dtype).reshape(shape)
    return jnp.einsum(f"{left},{result}->{right}", x, dy, preferred_element_type=shardings.reduce_dtype)


_einsum.defvjp(_einsum_forward, _einsum_backward)


@jax.custom_vjp
def _take(table, tap, ids):
    return _gather(table)[ids]


def _take_forward(table, tap, ids):
    return _take(table, tap, ids), (table, ids)


def _take_backward(residuals, dy):
    table, ids = residuals
    shardings = _shardings(table)
    if not shardings.trainable:
        return None, None, None
    # In float32: a frequent token's row sums over thousands of positions.
    with jax.named_scope(GRADIENT):
        gradient = jnp.zeros(table.array.shape, jnp.float32).at[ids].add(dy.astype(jnp.float32))
    # Whole rows first: asked for divided rows, XLA gathers every device's positions instead of reducing the rows.
    gradient = jax.lax.with_sharding_constraint(gradient, shardings.gathered)
    return None, reduce_gradient(gradient, shardings), None


_take.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def _materialise(weight, tap):
    return gather(weight)


def _materialise_forward(weight, tap):
    return gather(weight), replace(weight, array=None)


def _materialise_backward(weight, dy):
    return None, reduce_gradient(dy, weight.shardings) if weight.shardings.trainable else None


_materialise.defvjp(_materialise_forward, _materialise_backward)
