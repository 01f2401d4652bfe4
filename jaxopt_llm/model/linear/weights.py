"""Operations on weights: `einsum`, `grouped_matmul`, `materialise`, and functions that are linear in a weight.

`__init__.py` explains the design.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.core import tree
from jaxopt_llm.kernels import products
from jaxopt_llm.kernels.grouped_matmul import Implementation, OneByOne
from jaxopt_llm.model.linear import dropout, outliers, plain_groups, quantised
from jaxopt_llm.model.linear.leaves import (
    Int8Weight,
    LoraWeight,
    Nf4Weight,
    QuantisedWeight,
    channel_norms,
    dequantise,
    merge_to_array,
)
from jaxopt_llm.model.linear.outliers import SplitInputs
from jaxopt_llm.model.linear.quantised import Operand, Quantised
from jaxopt_llm.parallel.gathering import (
    PlacedWeight,
    WeightShardings,
    gather_array,
    reduce_gradient,
    reduce_parts,
    sum_after_loop,
)
from jaxopt_llm.parallel.placement import Placement

BaseWeight = PlacedWeight | QuantisedWeight  # a weight without an adapter: one matrix to compute with
Weight = BaseWeight | LoraWeight
GRADIENT = "weight_gradient"  # named scope of weight gradients in compiled programs and profiles
SMALLEST = 2.0**-100  # lower bound of a squared norm, so that a channel of zeros stays zeros
GATHERED_NAME = "gathered weight"  # jax.checkpoint's name for a gathered weight that the backward reuses


def einsum(subscripts: str, x: jax.Array, weight: Weight | jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Compute `jnp.einsum(subscripts, x, weight)` in the weight's compute dtype, or as `precision.matmul` sets.

    subscripts: "axes of x,axes of weight->axes of the result"; every axis appears in at least two of the three.
    dtype: of the result, x's by default; the product accumulates in float32 in any case.
    """
    dtype = dtype or x.dtype
    if isinstance(weight, jax.Array):
        return jnp.einsum(subscripts, x, weight, preferred_element_type=dtype)
    if isinstance(weight, LoraWeight):
        low = einsum(low_rank_subscripts(subscripts)[0], _apply_dropout(x, weight), weight.lora_a)
        return add_adapter(subscripts, x, low, weight, dtype)
    return _einsum(subscripts, dtype, x, *split_perturbation(weight))


def add_adapter(
    subscripts: str, x: jax.Array, low: jax.Array, weight: LoraWeight, dtype: jnp.dtype | None = None
) -> jax.Array:
    """Compute `einsum` with a weight that has an adapter. low: the product of the adapter's input with A."""
    dtype = dtype or x.dtype
    up = einsum(low_rank_subscripts(subscripts)[1], weight.scale * low, weight.lora_b, dtype)
    return scale_to_magnitude(subscripts, einsum(subscripts, x, weight.base, dtype) + up, weight)


def grouped_matmul(
    rows: jax.Array,
    weight: Weight | jax.Array,
    sizes: jax.Array,
    kernel: Implementation,
    placement: Placement,
    transposed: bool = False,
) -> jax.Array:
    """Multiply each device's rows by its local matrices, each row by the matrix of its group.

    rows: [N, R, D], or [N, R, F] if transposed: the local rows of N devices, sorted by group.
    weight: [groups, D, F]. If `tensor` divides the contracted dimension, each device returns its partial sum.
    sizes: int32 [N, E], the number of rows in each of a device's E groups. Rows after them give 0.

    Returns:
        [N, R, F], or [N, R, D] if transposed, in the dtype of rows.
    """
    if isinstance(weight, jax.Array):
        return plain_groups.multiply(kernel, placement, transposed, rows, weight, sizes)
    if isinstance(weight, LoraWeight):
        assert weight.magnitude is None and weight.noise is None and not transposed, "lora.problems refuses others"
        low = weight.scale * grouped_matmul(rows, weight.lora_a, sizes, kernel, placement)
        up = grouped_matmul(low, weight.lora_b, sizes, kernel, placement, transposed=True)
        return grouped_matmul(rows, weight.base, sizes, kernel, placement) + up
    return _grouped_matmul(kernel, placement, transposed, rows, *split_perturbation(weight), sizes)


def add_grouped_bias(rows: jax.Array, bias: Weight | jax.Array, sizes: jax.Array, placement: Placement) -> jax.Array:
    """Add to each row the bias of its group. The arguments are as in `grouped_matmul`, for rows [N, R, F].

    bias: [groups, F]. Nothing is added to the rows after the groups.
    """
    if isinstance(bias, jax.Array):
        groups = jax.vmap(functools.partial(_find_groups, rows.shape[1]))(sizes)
        return rows + bias.at[groups].get(mode="fill", fill_value=0)
    assert isinstance(bias, PlacedWeight), "only weights with contracting dimensions have adapters or are quantised"
    return _add_grouped_bias(placement, rows, *split_perturbation(bias), sizes)


def materialise(weight: Weight | jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Return the gathered weight in `dtype`, by default its compute dtype.

    For elementwise use (norm scales, biases) and for routers.
    """
    if isinstance(weight, jax.Array):
        return weight.astype(dtype or weight.dtype)
    assert isinstance(weight, PlacedWeight), "only weights with contracting dimensions have adapters or are quantised"
    return _materialise(dtype, *split_perturbation(weight))


def keep_gathered(weight: Weight) -> Weight:
    """Return a weight whose products keep it gathered for their backward."""

    def keep(placed: PlacedWeight) -> PlacedWeight:
        return replace(placed, shardings=replace(placed.shardings, keep_gathered=True))

    return jax.tree.map(keep, weight, is_leaf=_is_placed)


def gather_once(params: tree.Tree) -> tree.Tree:
    """Return weights that rest as they are used, in the compute dtype, so that a loop which reads them gathers nothing.

    Weights whose products read codes stay: their codes come from the exact values.
    """

    def gather(weight: BaseWeight) -> BaseWeight:
        if isinstance(weight, QuantisedWeight) or weight.shardings.matmul != "compute_dtype":
            return weight
        shardings = replace(weight.shardings, resting=weight.shardings.gathered, gather_block=None)
        return replace(weight, array=gather_array(weight), shardings=shardings)

    return jax.tree.map(gather, params, is_leaf=lambda leaf: isinstance(leaf, BaseWeight))


def gather_before_loop(weight: Weight) -> Weight:
    """Return a weight for the iterations of a loop: gathered before it, with a gradient that is summed after it."""

    def enter(placed: PlacedWeight, dtype: Any = None) -> PlacedWeight:
        shardings = replace(placed.shardings, resting=placed.shardings.gathered, gather_block=None)
        return sum_after_loop(replace(placed, array=gather_array(placed, dtype), shardings=shardings))

    def gather(leaf: Any) -> Any:
        if isinstance(leaf, QuantisedWeight):
            return jax.tree.map(lambda codes: enter(codes, codes.array.dtype), leaf, is_leaf=_is_placed)
        is_gathered = isinstance(leaf, PlacedWeight) and leaf.shardings.matmul == "compute_dtype"
        return enter(leaf) if is_gathered else leaf

    gathered: Weight = jax.tree.map(gather, weight, is_leaf=lambda leaf: isinstance(leaf, BaseWeight))
    return gathered


def cast_to_compute(params: tree.Tree) -> tree.Tree:
    """Return weights at rest in the compute dtype, for a loop that gathers them: it holds what it reads.

    Weights that move or are multiplied as codes stay: their codes come from the exact values.
    """

    def cast(weight: BaseWeight) -> BaseWeight:
        if isinstance(weight, QuantisedWeight):
            return weight
        shardings = weight.shardings
        is_coded = shardings.matmul != "compute_dtype" or shardings.gather_block
        return weight if is_coded else replace(weight, array=weight.array.astype(shardings.compute_dtype))

    return jax.tree.map(cast, params, is_leaf=lambda leaf: isinstance(leaf, BaseWeight))


def gather_for_use(weight: Weight) -> jax.Array:
    """Return the gathered weight in compute dtype, for any use other than a product. It has a gradient, if it trains.

    Adapters are never added to their base as arrays: only a product with `einsum` reads them.
    """
    assert not isinstance(weight, LoraWeight), "an adapter is only multiplied"
    return materialise(weight) if isinstance(weight, PlacedWeight) else gather_weight(weight)


def gather_merged(weight: Weight, contracting: tuple[int, ...]) -> jax.Array:
    """Return the gathered weight as one array in compute dtype, with its adapter merged. It has no gradient.

    Generation uses it for products that `einsum` does not support.

    contracting: the dimensions that the weight's usual product sums over.
    """
    if not isinstance(weight, LoraWeight):
        return quantised.dequantise(_gather_operand(weight, contracting), shardings_of(weight).compute_dtype)
    dtype = shardings_of(weight.base).compute_dtype
    base = quantised.dequantise(_gather_operand(weight.base, contracting), dtype)
    arrays = jax.tree.map(gather_weight, replace(weight, base=None), is_leaf=_is_placed)
    return merge_to_array(replace(arrays, base=base), contracting).astype(dtype)


def _apply_dropout(x: jax.Array, weight: LoraWeight) -> jax.Array:
    return x if weight.noise is None else dropout.apply_dropout(x, weight.noise, weight.dropout)


def scale_to_magnitude(subscripts: str, y: jax.Array, weight: LoraWeight) -> jax.Array:
    """Scale each output channel of y, a product with base + scale × A·B, by magnitude / norm of the channel's weights.

    Without a magnitude (DoRA), return y.

    The norm is a constant for the gradient, as in the paper (arXiv:2402.09353, section 4.3).
    """
    if weight.magnitude is None:
        return y
    _, axes, result = split_subscripts(subscripts)
    summed, others = ("".join(axis for axis in axes if (axis in result) is kept) for kept in (False, True))
    base, a, b = (gather_weight(part) for part in (weight.base, weight.lora_a, weight.lora_b))

    def product(subscripts: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)

    # |W + sAB|² of each channel, expanded so that A·B is never formed.
    cross = jnp.sum(product(f"{axes},{summed}r->{others}r", base, a) * b, axis=-1)
    square = product(f"{others}r,rt,{others}t->{others}", b, product(f"{summed}r,{summed}t->rt", a, a), b)
    base_square = jnp.square(channel_norms(base, _contracted_dims(axes, result)))
    squares = base_square + weight.scale * (2 * cross + weight.scale * square)
    scale = materialise(weight.magnitude, jnp.dtype(jnp.float32)) * jax.lax.rsqrt(jnp.maximum(squares, SMALLEST))
    return (y.astype(jnp.float32) * jnp.einsum(f"{others}->{result[-len(others) :]}", scale)).astype(y.dtype)


def split_subscripts(subscripts: str) -> tuple[str, str, str]:
    """Return the axes of x, of the weight and of the result."""
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    return left, right, result


def _contracted_dims(axes: str, result: str) -> tuple[int, ...]:
    """Return the dimensions of an operand that the product sums over."""
    return tuple(dim for dim, axis in enumerate(axes) if axis not in result)


def _find_split_axis(gathered: NamedSharding, axes: str, result: str) -> tuple[str, int] | None:
    """Return the contracted axis of a weight that devices divide, and the number of parts; None if there is none."""
    for axis, by in zip(axes, gathered.spec, strict=True):
        if by and axis not in result:
            return axis, math.prod(gathered.mesh.shape[name] for name in jax.tree.leaves(by))
    return None


def low_rank_subscripts(subscripts: str) -> tuple[str, str]:
    """Return the products with A and with B: "BSD,DHK->BSHK" -> ("BSD,Dr->BSr", "BSr,HKr->BSHK")."""
    left, right, result = split_subscripts(subscripts)
    summed = "".join(axis for axis in right if axis not in result)
    others = "".join(axis for axis in right if axis in result)
    low = "".join(axis for axis in left if axis not in summed) + "r"
    return f"{left},{summed}r->{low}", f"{low},{others}r->{result}"


def split_perturbation(weight: BaseWeight) -> tuple[BaseWeight, jax.Array | None]:
    """Return the weight without its perturbation, which no backward needs to keep, and the perturbation."""
    if not isinstance(weight, PlacedWeight):
        return weight, None
    return replace(weight, perturbation=None), weight.perturbation


def _is_placed(leaf: tree.Leaf) -> bool:
    return isinstance(leaf, PlacedWeight)


def shardings_of(weight: BaseWeight) -> WeightShardings:
    return weight.codes.shardings if isinstance(weight, QuantisedWeight) else weight.shardings


def gather_weight(weight: BaseWeight) -> jax.Array:
    """Return the weight in compute dtype, gathered over the storage axes of ZeRO.

    Codes are gathered as codes and dequantised afterwards.
    """
    if isinstance(weight, QuantisedWeight):
        gathered = jax.tree.map(lambda x: gather_array(x, x.array.dtype), weight, is_leaf=_is_placed)
        return dequantise(gathered).astype(shardings_of(weight).compute_dtype)
    return gather_array(weight)


def _gather_operand(weight: BaseWeight, summed: tuple[int, ...]) -> Operand:
    """Return the gathered weight as its products take it. Quantised operands are gathered as codes, 1 byte per value.

    summed: the dimensions that the products sum over.
    """
    shardings = shardings_of(weight)
    if isinstance(weight, Int8Weight) and _multiplies_codes(weight, summed):
        return Quantised(*(gather_array(each, each.array.dtype) for each in (weight.codes, weight.scales)))
    if isinstance(weight, QuantisedWeight) or shardings.matmul == "compute_dtype":
        return gather_weight(weight)
    if shardings.matmul == "int4_qat":  # gathered first: a device's shard may not consist of whole groups
        return quantised.quantise_weight(shardings.matmul, gather_weight(weight), summed)
    operand = quantised.quantise_weight(shardings.matmul, weight.array, summed, weight.largest)
    scales = PlacedWeight(operand.scales, None, _scale_shardings(shardings, operand.scales.shape))
    codes = gather_array(replace(weight, array=operand.codes), operand.codes.dtype)
    return Quantised(codes, gather_array(scales, jnp.float32))


def _multiplies_codes(weight: BaseWeight, summed: tuple[int, ...]) -> bool:
    """Return whether an int8 product multiplies integers.

    A product over int8 codes needs one scale for each output channel, as the weight's first product in a model has.
    """
    if isinstance(weight, Int8Weight) and any(weight.scales.array.shape[dim] != 1 for dim in summed):
        return False
    return shardings_of(weight).matmul == "int8" and not isinstance(weight, Nf4Weight)


def _scale_shardings(shardings: WeightShardings, shape: tuple[int, ...]) -> WeightShardings:
    """Return the shardings of scales: divided like the weight along the dimensions where there is more than one."""

    def make_sharding(weight_sharding: NamedSharding) -> NamedSharding:
        spec = (by if size > 1 else None for by, size in zip(weight_sharding.spec, shape, strict=bool(shape)))
        return NamedSharding(weight_sharding.mesh, PartitionSpec(*spec))

    return replace(shardings, resting=make_sharding(shardings.resting), gathered=make_sharding(shardings.gathered))


# In each operation the weight itself has no cotangent (None): its gradient is that of the perturbation.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum(subscripts, dtype, x, weight, perturbation):
    return _einsum_forward(subscripts, dtype, x, weight, perturbation)[0]


def _einsum_forward(subscripts, dtype, x, weight, perturbation):
    shardings = shardings_of(weight)
    left, right, result = split_subscripts(subscripts)
    gathered = _gather_operand(weight, _contracted_dims(right, result))
    split = _find_split_axis(shardings.gathered, right, result)
    if shardings.outlier_threshold and isinstance(gathered, Quantised):
        y, inputs = outliers.einsum(subscripts, x, weight, gathered, dtype, split)
        return y, (inputs, weight, _keep_gathered(gathered, shardings))
    operand = quantised.quantise_inputs(shardings.matmul, x, _contracted_dims(left, result), shardings.grouped)
    y = quantised.einsum(
        subscripts, operand, gathered, shardings.compute_dtype, dtype, split, on_one_cpu=shardings.on_one_cpu
    )
    return y, (operand, weight, _keep_gathered(gathered, shardings))


def _einsum_backward(subscripts, dtype, residuals, dy):
    x, weight, gathered = residuals
    shardings = shardings_of(weight)
    left, right, result = split_subscripts(subscripts)
    gathered = _gather_operand(weight, _contracted_dims(right, result)) if gathered is None else gathered
    x_dtype = shardings.compute_dtype if isinstance(x, Quantised | SplitInputs) else x.dtype
    dy = quantised.quantise_gradient(shardings.matmul, dy.astype(x_dtype), shardings.grouped)
    backward = f"{result},{right}->{left}"
    dx = quantised.einsum(backward, dy, gathered, shardings.compute_dtype, x_dtype, on_one_cpu=shardings.on_one_cpu)
    if not shardings.trainable:
        return dx, None, None
    dequantise_x = outliers.dequantise if isinstance(x, SplitInputs) else quantised.dequantise
    x, dy = dequantise_x(x, shardings.compute_dtype), quantised.dequantise(dy, shardings.compute_dtype)
    return dx, None, _form_and_reduce_gradient(left, result, right, x, dy, shardings)


def _keep_gathered(gathered: Operand, shardings: WeightShardings) -> Operand | None:
    """Return the gathered weight as a residual, named for jax.checkpoint; None if the backward gathers again."""
    return (
        jax.tree.map(lambda array: checkpoint_name(array, GATHERED_NAME), gathered) if shardings.keep_gathered else None
    )


def _form_and_reduce_gradient(
    left: str, result: str, right: str, x: jax.Array, dy: jax.Array, shardings: WeightShardings
) -> jax.Array:
    coded, form = shardings.coded_sum, functools.partial(form_gradient, left, result, right, shardings=shardings)
    if rows := shardings.row_sum:
        # The rows of the batch, or rows and sequence as one dimension.
        axis = next(
            (axis for axis, size in zip(left, x.shape, strict=True) if axis not in right and rows.splits(size)), ""
        )
        if axis:
            parts = jax.vmap(form)(rows.split(x, left.index(axis)), rows.split(dy, result.index(axis)))
            return rows.add(parts).astype(shardings.reduce_dtype)
    if coded is None:
        gradient = form(x, dy)
        if {*left} & {*right} & {*result}:
            # XLA computes a wrong product if a storage axis also divides a dimension that is a batch of matrices.
            gradient = jax.lax.with_sharding_constraint(gradient, shardings.gathered)
        return reduce_gradient(gradient, shardings)
    assert left[:2] == "BS", f"{left}: the tokens of a coded sum are rows and sequence"
    parts = jax.vmap(form)(coded.split_tokens(x), coded.split_tokens(dy))
    return reduce_parts(parts, coded.axes, shardings)


@jax.named_scope(GRADIENT)
def form_gradient(left: str, result: str, right: str, x: jax.Array, dy: jax.Array, shardings: WeightShardings):
    rows = "".join(axis for axis in left if axis not in right)  # contracted: batch and sequence
    inputs, outputs = left.removeprefix(rows), result.removeprefix(rows)
    # Dimensions are merged only if no device boundary lies inside them: not batch and sequence if `context` divides the
    # sequence, and not heads and head size if ZeRO divides the head size. Otherwise XLA all-reduces the whole gradient
    # instead of reduce-scattering it.
    whole_rows = shardings.resting.mesh.shape["context"] == 1
    split = {axis for axis, by in zip(right, shardings.gradient.spec, strict=True) if by}
    mergeable = whole_rows and split <= {*inputs[:1], *outputs[:1]}
    if mergeable and right in (inputs + outputs, outputs + inputs):
        # As a matmul of two matrices: with more dimensions XLA for CPUs transposes a copy of x or dy.
        shape = [dict(zip(left + result, x.shape + dy.shape, strict=True))[axis] for axis in right]
        x, dy = (array.reshape(math.prod(array.shape[: len(rows)]), -1) for array in (x, dy))
        if right != inputs + outputs:
            x, dy = dy, x
        return products.sum_over_rows(x, dy, shardings.reduce_dtype, shardings.on_one_cpu).reshape(shape)
    return products.einsum(f"{left},{result}->{right}", x, dy, shardings.reduce_dtype, shardings.on_one_cpu)


_einsum.defvjp(_einsum_forward, _einsum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _materialise(dtype, weight, perturbation):
    return gather_array(weight, dtype)


def _materialise_forward(dtype, weight, perturbation):
    return gather_array(weight, dtype), replace(weight, array=None)


def _materialise_backward(dtype, weight, dy):
    return None, reduce_gradient(dy, weight.shardings) if weight.shardings.trainable else None


_materialise.defvjp(_materialise_forward, _materialise_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _grouped_matmul(kernel, placement, transposed, rows, weight, perturbation, sizes):
    return _grouped_matmul_forward(kernel, placement, transposed, rows, weight, perturbation, sizes)[0]


def _grouped_matmul_forward(kernel, placement, transposed, rows, weight, perturbation, sizes):
    shardings = shardings_of(weight)
    is_cast_later = isinstance(kernel, OneByOne) and isinstance(weight, PlacedWeight)
    gathered: Operand = (
        gather_array(weight, weight.array.dtype)
        if is_cast_later
        else _gather_operand(weight, (2,) if transposed else (1,))
    )
    operand = _quantise_rows(placement, transposed, rows, shardings)
    kept = _keep_gathered(gathered, shardings)
    y = _multiply_rows(kernel, placement, transposed, operand, gathered, shardings, sizes, rows.dtype)
    return y, (operand, weight, kept, sizes)


def _quantise_rows(placement, transposed, rows, shardings):
    """Quantise rows with one scale per whole row, also where `tensor` divides the row."""
    parts = placement.size("tensor") if shardings.gathered.spec[2 if transposed else 1] else 1
    whole = rows.reshape(-1, parts, *rows.shape[1:])  # [N / parts, parts, R, D]
    operand = quantised.quantise_inputs(shardings.matmul, whole, (1, 3), shardings.grouped)
    if not isinstance(operand, Quantised):
        return rows
    scales = operand.scales
    if scales.ndim:
        scales = jnp.broadcast_to(scales, (*whole.shape[:3], 1)).reshape(*rows.shape[:2], 1)
    return Quantised(operand.codes.reshape(rows.shape), scales)


def _multiply_rows(kernel, placement, transposed, rows, gathered, shardings, sizes, dtype):
    """Multiply in the compute dtype, with quantised operands dequantised first."""
    rows, matrices = (quantised.dequantise(operand, shardings.compute_dtype) for operand in (rows, gathered))

    def on_device(rows, matrices, sizes):
        return kernel.forward(rows[0], matrices, sizes[0], dtype, transposed=transposed)[None]

    local = PartitionSpec(placement.device_axes)
    return placement.shard_map(on_device, (local, shardings.gathered.spec, local), local)(rows, matrices, sizes)


def _grouped_matmul_backward(kernel, placement, transposed, residuals, dy):
    rows, weight, gathered, sizes = residuals
    shardings = shardings_of(weight)
    gathered = _gather_operand(weight, (2,) if transposed else (1,)) if gathered is None else gathered
    dtype = shardings.compute_dtype if isinstance(rows, Quantised) else rows.dtype
    dy = quantised.quantise_gradient(shardings.matmul, dy.astype(dtype), shardings.grouped)
    d_rows = _multiply_rows(kernel, placement, not transposed, dy, gathered, shardings, sizes, dtype)
    if not shardings.trainable:
        return d_rows, None, None, None
    rows, dy = (quantised.dequantise(operand, shardings.compute_dtype) for operand in (rows, dy))

    def on_device(rows, dy, sizes):
        x, y = (dy, rows) if transposed else (rows, dy)
        return kernel.weight_gradient(x[0], y[0], sizes[0], shardings.reduce_dtype)[None]

    # Each device's partial sum leaves the manual region: outside, XLA reduces it to the gradient's sharding.
    spec, local = shardings.gathered.spec, PartitionSpec(placement.device_axes)
    weight_axes = jax.tree.leaves(tuple(spec))
    others = tuple(axis for axis in placement.device_axes if axis not in weight_axes)
    with jax.named_scope(GRADIENT):
        parts = placement.shard_map(on_device, (local, local, local), PartitionSpec(others, *spec))(rows, dy, sizes)
    return d_rows, None, reduce_parts(parts, others, shardings), None


_grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_grouped_bias(placement, rows, weight, perturbation, sizes):
    def on_device(rows, bias, sizes):
        of_rows = bias.at[_find_groups(rows.shape[1], sizes[0])].get(mode="fill", fill_value=0)
        return (rows + of_rows.astype(jnp.float32)).astype(rows.dtype)

    local = PartitionSpec(placement.device_axes)
    run = placement.shard_map(on_device, (local, weight.shardings.gathered.spec, local), local)
    return run(rows, gather_array(weight), sizes)


def _add_grouped_bias_forward(placement, rows, weight, perturbation, sizes):
    y = _add_grouped_bias(placement, rows, weight, perturbation, sizes)
    return y, (replace(weight, array=None), sizes)


def _add_grouped_bias_backward(placement, residuals, dy):
    weight, sizes = residuals
    shardings = weight.shardings
    if not shardings.trainable:
        return dy, None, None, None

    def on_device(dy, sizes):
        # A product with the groups of the rows: a sum by index would add row after row on a GPU.
        groups = jax.nn.one_hot(_find_groups(dy.shape[1], sizes[0]), sizes.shape[1], dtype=dy.dtype)
        return jnp.einsum("RE,RF->EF", groups, dy[0], preferred_element_type=jnp.float32)[None]

    spec, local = shardings.gathered.spec, PartitionSpec(placement.device_axes)
    others = tuple(axis for axis in placement.device_axes if axis not in jax.tree.leaves(tuple(spec)))
    with jax.named_scope(GRADIENT):
        parts = placement.shard_map(on_device, (local, local), PartitionSpec(others, *spec))(dy, sizes)
    return dy, None, reduce_parts(parts.astype(shardings.reduce_dtype), others, shardings), None


def _find_groups(rows, sizes):
    """Return the group of each row, int32 [R], and the number of groups for the rows after them."""
    return jnp.sum(jnp.arange(rows)[:, None] >= jnp.cumsum(sizes), axis=1, dtype=jnp.int32)


_add_grouped_bias.defvjp(_add_grouped_bias_forward, _add_grouped_bias_backward)


def apply_linear(
    function: Callable[..., jax.Array], weight: PlacedWeight, *others: jax.Array, by_rows: bool = False
) -> jax.Array:
    """Apply a function that is linear in a weight and has no derivative by the other arguments, such as a lookup.

    Its gradient is formed in float32.

    function: (array of the weight's shape and of any dtype, *others) -> array of that dtype.
    by_rows: whether the first dimension of the result and of the other arguments are rows, each of them on its own.
    """
    resting, perturbation = replace(weight, perturbation=None), weight.perturbation
    return _apply_linear(function, jax.typeof(weight.array).shape, by_rows, resting, perturbation, others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _apply_linear(function, shape, by_rows, weight, perturbation, others):
    return function(gather_array(weight), *others)


def _apply_linear_forward(function, shape, by_rows, weight, perturbation, others):
    return function(gather_array(weight), *others), (replace(weight, array=None), others)


def _apply_linear_backward(function, shape, by_rows, residuals, dy):
    weight, others = residuals
    if not weight.shardings.trainable:
        return None, None, None
    rows = weight.shardings.row_sum

    @jax.named_scope(GRADIENT)
    def form_gradient(dy, *others):
        # In float32: a frequent token's row sums over thousands of positions.
        argument = jax.ShapeDtypeStruct(shape, jnp.float32)
        transpose = jax.linear_transpose(lambda array: function(array, *others), argument)
        return transpose(dy.astype(jnp.float32))[0]

    if rows and by_rows and all(rows.splits(len(each)) for each in (dy, *others)):
        gradient = rows.add(jax.vmap(form_gradient)(*map(rows.split, (dy, *others))))
        return None, gradient.astype(weight.shardings.reduce_dtype), None
    # Constrained to whole rows first: with divided rows XLA gathers every device's positions instead of reducing rows.
    gradient = jax.lax.with_sharding_constraint(form_gradient(dy, *others), weight.shardings.gathered)
    return None, reduce_gradient(gradient, weight.shardings), None


_apply_linear.defvjp(_apply_linear_forward, _apply_linear_backward)
