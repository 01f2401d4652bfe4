"""Where a weight meets computation: `einsum` and `materialise`; in tables.py, `take` and `cross_entropy`. Nowhere else.

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
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm import tree
from jaxopt_llm.kernels import grouped_matmul
from jaxopt_llm.model import dropout, quantised
from jaxopt_llm.model.leaves import CODED, CodedWeight, LoraWeight, dequantise, lengths, merged
from jaxopt_llm.model.quantised import Operand, Quantised
from jaxopt_llm.parallel.gathering import Placed, WeightShardings, gather, reduce_gradient
from jaxopt_llm.parallel.sharding import Placement

Whole = Placed | CodedWeight  # one array to compute with
Weight = Whole | LoraWeight
GRADIENT = "weight_gradient"  # the scope under which a compiled program and a profile name it
SMALLEST = 2.0**-100  # of a squared length: a channel of zeros stays one
KEPT = "gathered weight"  # the name under which jax.checkpoint knows a gathered weight that the backward reuses


def einsum(subscripts: str, x: jax.Array, weight: Weight, dtype: jnp.dtype | None = None) -> jax.Array:
    """`jnp.einsum(subscripts, x, weight)`, in the weight's compute dtype, or as `precision.matmul` says.

    subscripts: "x's axes,weight's axes->result's axes"; every axis appears in at least two of the three.
    dtype: of the result, accumulated in float32 in any case; x's by default.
    """
    dtype = dtype or x.dtype
    if isinstance(weight, LoraWeight):
        down, up = _through_rank(subscripts)
        low = weight.scale * einsum(down, _dropped(x, weight), weight.lora_a)
        y = einsum(subscripts, x, weight.base, dtype) + einsum(up, low, weight.lora_b, dtype)
        return y if weight.magnitude is None else _to_magnitude(subscripts, y, weight)
    return _einsum(subscripts, dtype, x, *split_tap(weight))


def grouped(
    rows: jax.Array,
    weight: Weight,
    sizes: jax.Array,
    kernel: grouped_matmul.Implementation,
    placement: Placement,
    turned: bool = False,
) -> jax.Array:
    """Each device's rows times its part of the matrices of the groups that they lie in.

    rows: [N, R, D] or, turned, [N, R, F], each of N devices' own, sorted by group; sizes: int32 [N, E], its rows in
        each of its E groups, after which there may be others, which give 0.
    weight: [groups, D, F], which `tensor` may divide: of what it sums over, each device gives its part of the sum.
    Returns [N, R, F] or, turned, [N, R, D], in rows' dtype.
    """
    if isinstance(weight, LoraWeight):
        assert weight.magnitude is None and weight.noise is None and not turned, "lora.problems refuses others"
        low = weight.scale * grouped(rows, weight.lora_a, sizes, kernel, placement)
        up = grouped(low, weight.lora_b, sizes, kernel, placement, turned=True)
        return grouped(rows, weight.base, sizes, kernel, placement) + up
    return _grouped(kernel, placement, turned, rows, *split_tap(weight), sizes)


def materialise(weight: Weight, dtype: jnp.dtype | None = None) -> jax.Array:
    """The whole weight in compute dtype, or in this one, for what is neither product nor look-up: norm scales and
    biases."""
    assert isinstance(weight, Placed), "adapters and codes are of what a product sums over"
    return _materialise(dtype, *split_tap(weight))


def whole(weight: Weight, contracting: tuple[int, ...]) -> jax.Array:
    """What a weight stands for, as one array in compute dtype, whole but for `tensor`: adapters are folded in. For
    products that `einsum` has not, of generation: it has no gradient.

    contracting: the dimensions that its own product sums over.
    """
    if not isinstance(weight, LoraWeight):
        return quantised.wide(_gather_operand(weight, contracting), shardings_of(weight).compute_dtype)
    arrays = jax.tree.map(gather_whole, weight, is_leaf=lambda leaf: isinstance(leaf, (Placed, *CODED)))
    return merged(arrays, contracting).astype(shardings_of(weight.base).compute_dtype)


def _dropped(x: jax.Array, weight: LoraWeight) -> jax.Array:
    return x if weight.noise is None else dropout.drop(x, weight.noise, weight.dropout)


def _to_magnitude(subscripts: str, y: jax.Array, weight: LoraWeight) -> jax.Array:
    """A product of base + scale × A·B, each of its output channels brought to its magnitude. The length that it has
    without is taken for a constant, as in the paper's section 4.3."""
    _, axes, result = _axes(subscripts)
    summed, others = ("".join(axis for axis in axes if (axis in result) is kept) for kept in (False, True))
    base, a, b = (gather_whole(each) for each in (weight.base, weight.lora_a, weight.lora_b))

    def product(subscripts: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)

    # |W + sAB|² channel by channel, of which A·B is never formed.
    across = jnp.sum(product(f"{axes},{summed}r->{others}r", base, a) * b, axis=-1)
    own = product(f"{others}r,rt,{others}t->{others}", b, product(f"{summed}r,{summed}t->rt", a, a), b)
    squares = jnp.square(lengths(base, _summed(axes, result))) + weight.scale * (2 * across + weight.scale * own)
    scale = materialise(weight.magnitude, jnp.dtype(jnp.float32)) * jax.lax.rsqrt(jnp.maximum(squares, SMALLEST))
    return (y.astype(jnp.float32) * jnp.einsum(f"{others}->{result[-len(others) :]}", scale)).astype(y.dtype)


def _axes(subscripts: str) -> tuple[str, str, str]:
    """Of x, of the weight and of the result."""
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    return left, right, result


def _summed(axes: str, result: str) -> tuple[int, ...]:
    """The dimensions of an operand that the product sums over."""
    return tuple(dim for dim, axis in enumerate(axes) if axis not in result)


def _split_sum(gathered: NamedSharding, axes: str, result: str) -> tuple[str, int] | None:
    """The axis of a weight that the product sums over and devices divide, and between how many."""
    for axis, by in zip(axes, gathered.spec, strict=True):
        if by and axis not in result:
            return axis, math.prod(gathered.mesh.shape[name] for name in jax.tree.leaves(by))
    return None


def _through_rank(subscripts: str) -> tuple[str, str]:
    """A product's two steps through a low rank: "BSD,DHK->BSHK" -> ("BSD,Dr->BSr", "BSr,HKr->BSHK")."""
    left, right, result = _axes(subscripts)
    summed = "".join(axis for axis in right if axis not in result)
    others = "".join(axis for axis in right if axis in result)
    low = "".join(axis for axis in left if axis not in summed) + "r"
    return f"{left},{summed}r->{low}", f"{low},{others}r->{result}"


def split_tap(weight: Whole) -> tuple[Whole, jax.Array | None]:
    """The weight as it rests, and its tap, which no backward needs to keep."""
    return (replace(weight, tap=None), weight.tap) if isinstance(weight, Placed) else (weight, None)


def split_taps(weights: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
    """Weights as they rest, and their taps, None where no gradient is wanted."""
    resting = jax.tree.map(lambda each: replace(each, tap=None), weights, is_leaf=_is_placed)
    return resting, jax.tree.map(lambda each: each.tap, weights, is_leaf=_is_placed)


def with_taps(resting: tree.Tree, taps: tree.Tree) -> tree.Tree:
    """The inverse of `split_taps`."""
    return jax.tree.map(lambda each, tap: replace(each, tap=tap), resting, taps, is_leaf=_is_placed)


def _is_placed(leaf: tree.Leaf) -> bool:
    return isinstance(leaf, Placed)


def shardings_of(weight: Whole) -> WeightShardings:
    return weight.codes.shardings if isinstance(weight, CODED) else weight.shardings


def gather_whole(weight: Whole) -> jax.Array:
    """The weight in compute dtype, whole but for `tensor`. Codes are gathered as codes, and widened after."""
    if isinstance(weight, CODED):
        gathered = jax.tree.map(lambda x: gather(x, x.array.dtype), weight, is_leaf=lambda x: isinstance(x, Placed))
        return dequantise(gathered).astype(shardings_of(weight).compute_dtype)
    return gather(weight)


def _gather_operand(weight: Whole, summed: tuple[int, ...]) -> Operand:
    """The weight as its products take it, gathered so: of codes, a gather moves one byte each.

    summed: the dimensions that they sum over.
    """
    shardings = shardings_of(weight)
    if isinstance(weight, CODED) or shardings.matmul == "compute_dtype":
        return gather_whole(weight)
    if shardings.matmul == "int4_qat":  # whole first: what rests on a device need not be of whole groups
        return quantised.weight(shardings.matmul, gather_whole(weight), summed)
    found = quantised.weight(shardings.matmul, weight.array, summed)
    return Quantised(
        gather(replace(weight, array=found.codes), found.codes.dtype),
        gather(Placed(found.scales, None, _of_scales(shardings, found.scales.shape)), jnp.float32),
    )


def _of_scales(shardings: WeightShardings, shape: tuple[int, ...]) -> WeightShardings:
    """Divided as the weight is where they have more than one along a dimension."""

    def place(of_weight: NamedSharding) -> NamedSharding:
        return NamedSharding(
            of_weight.mesh,
            PartitionSpec(*(by if size > 1 else None for by, size in zip(of_weight.spec, shape, strict=bool(shape)))),
        )

    return replace(shardings, resting=place(shardings.resting), gathered=place(shardings.gathered))


# In each operation the weight itself has no cotangent (None): its gradient is the tap's.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum(subscripts, dtype, x, weight, tap):
    return _einsum_forward(subscripts, dtype, x, weight, tap)[0]


def _einsum_forward(subscripts, dtype, x, weight, tap):
    shardings = shardings_of(weight)
    left, right, result = _axes(subscripts)
    gathered = _gather_operand(weight, _summed(right, result))
    operand = quantised.inputs(shardings.matmul, x, _summed(left, result), shardings.grouped)
    split = _split_sum(shardings.gathered, right, result)
    y = quantised.einsum(subscripts, operand, gathered, shardings.compute_dtype, dtype, split)
    kept = jax.tree.map(lambda array: checkpoint_name(array, KEPT), gathered) if shardings.keep else None
    return y, (operand, weight, kept)


def _einsum_backward(subscripts, dtype, residuals, dy):
    x, weight, gathered = residuals
    shardings = shardings_of(weight)
    left, right, result = _axes(subscripts)
    gathered = _gather_operand(weight, _summed(right, result)) if gathered is None else gathered
    x_dtype = shardings.compute_dtype if isinstance(x, Quantised) else x.dtype
    dy = quantised.incoming(shardings.matmul, dy.astype(x_dtype), shardings.grouped)
    dx = quantised.einsum(f"{result},{right}->{left}", dy, gathered, shardings.compute_dtype, x_dtype)
    if not shardings.trainable:
        return dx, None, None
    x, dy = (quantised.wide(each, shardings.compute_dtype) for each in (x, dy))
    dw = _weight_gradient(left, result, right, x, dy, shardings)
    return dx, None, reduce_gradient(dw, shardings)


@jax.named_scope(GRADIENT)
def _weight_gradient(left: str, result: str, right: str, x: jax.Array, dy: jax.Array, shardings: WeightShardings):
    rows = "".join(axis for axis in left if axis not in right)  # what is summed over: batch and sequence
    inputs, outputs = left.removeprefix(rows), result.removeprefix(rows)
    # A split sequence cannot be merged with the batch, nor head sizes that ZeRO splits with their heads: XLA would sum
    # whole gradients on every device.
    whole_rows = shardings.resting.mesh.shape["context"] == 1
    split = {axis for axis, by in zip(right, shardings.gradient.spec, strict=True) if by}
    mergeable = whole_rows and split <= {*inputs[:1], *outputs[:1]}
    if mergeable and right in (inputs + outputs, outputs + inputs):
        # As one product of matrices: with more dimensions XLA for CPUs transposes a copy of x or dy.
        shape = [dict(zip(left + result, x.shape + dy.shape, strict=True))[axis] for axis in right]
        x, dy = (array.reshape(math.prod(array.shape[: len(rows)]), -1) for array in (x, dy))
        product = "RI,RO->IO" if right == inputs + outputs else "RI,RO->OI"
        return jnp.einsum(product, x, dy, preferred_element_type=shardings.reduce_dtype).reshape(shape)
    return jnp.einsum(f"{left},{result}->{right}", x, dy, preferred_element_type=shardings.reduce_dtype)


_einsum.defvjp(_einsum_forward, _einsum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _materialise(dtype, weight, tap):
    return gather(weight, dtype)


def _materialise_forward(dtype, weight, tap):
    return gather(weight, dtype), replace(weight, array=None)


def _materialise_backward(dtype, weight, dy):
    return None, reduce_gradient(dy, weight.shardings) if weight.shardings.trainable else None


_materialise.defvjp(_materialise_forward, _materialise_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _grouped(kernel, placement, turned, rows, weight, tap, sizes):
    return _grouped_forward(kernel, placement, turned, rows, weight, tap, sizes)[0]


def _grouped_forward(kernel, placement, turned, rows, weight, tap, sizes):
    shardings = shardings_of(weight)
    gathered = _gather_operand(weight, (2,) if turned else (1,))
    operand = _rows_operand(placement, turned, rows, shardings)
    kept = jax.tree.map(lambda array: checkpoint_name(array, KEPT), gathered) if shardings.keep else None
    y = _rows_times(kernel, placement, turned, operand, gathered, shardings, sizes, rows.dtype)
    return y, (operand, weight, kept, sizes)


def _rows_operand(placement, turned, rows, shardings):
    """A row's scale is of all of it, also where `tensor` divides it."""
    parts = placement.size("tensor") if shardings.gathered.spec[2 if turned else 1] else 1
    whole = rows.reshape(-1, parts, *rows.shape[1:])  # [N / parts, parts, R, D]
    operand = quantised.inputs(shardings.matmul, whole, (1, 3), shardings.grouped)
    if not isinstance(operand, Quantised):
        return rows
    scales = operand.scales
    if scales.ndim:
        scales = jnp.broadcast_to(scales, (*whole.shape[:3], 1)).reshape(*rows.shape[:2], 1)
    return Quantised(operand.codes.reshape(rows.shape), scales)


def _rows_times(kernel, placement, turned, rows, gathered, shardings, sizes, dtype):
    """In the compute dtype, of what operands in fewer bits stand for."""
    rows, matrices = (quantised.wide(each, shardings.compute_dtype) for each in (rows, gathered))

    def on_device(rows, matrices, sizes):
        return kernel.forward(rows[0], matrices, sizes[0], dtype, transposed=turned)[None]

    own = PartitionSpec(placement.device_axes)
    return placement.on_each_device(on_device, (own, shardings.gathered.spec, own), own)(rows, matrices, sizes)


def _grouped_backward(kernel, placement, turned, residuals, dy):
    rows, weight, gathered, sizes = residuals
    shardings = shardings_of(weight)
    gathered = _gather_operand(weight, (2,) if turned else (1,)) if gathered is None else gathered
    dtype = shardings.compute_dtype if isinstance(rows, Quantised) else rows.dtype
    dy = quantised.incoming(shardings.matmul, dy.astype(dtype), shardings.grouped)
    d_rows = _rows_times(kernel, placement, not turned, dy, gathered, shardings, sizes, dtype)
    if not shardings.trainable:
        return d_rows, None, None, None
    rows, dy = (quantised.wide(each, shardings.compute_dtype) for each in (rows, dy))

    def on_device(rows, dy, sizes):
        x, y = (dy, rows) if turned else (rows, dy)
        return kernel.weight_gradient(x[0], y[0], sizes[0], shardings.reduce_dtype)[None]

    # Each device's part of the sum leaves the region: outside, XLA reduces it to where it goes.
    spec, own = shardings.gathered.spec, PartitionSpec(placement.device_axes)
    held = jax.tree.leaves(tuple(spec))
    others = tuple(axis for axis in placement.device_axes if axis not in held)
    with jax.named_scope(GRADIENT):
        parts = placement.on_each_device(on_device, (own, own, own), PartitionSpec(others, *spec))(rows, dy, sizes)
        # Not jnp.sum: it would widen 16-bit values to float32, and so the bytes between devices.
        gradient = jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, (0,))
    return d_rows, None, reduce_gradient(gradient, shardings), None


_grouped.defvjp(_grouped_forward, _grouped_backward)
