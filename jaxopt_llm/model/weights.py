"""The only place where a weight meets computation: `einsum`, `take`, `materialise` and `cross_entropy`.

Blocks hand a weight over as they were given it and never learn what it is. Each operation gathers the weight where it
is used and writes its own backward, so that the gradient is formed and summed over devices in the reduction's dtype
and what is kept in between is said here, whatever the rematerialisation policy.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.kernels import cross_entropy as kernel
from jaxopt_llm.kernels.cross_entropy import Classifier, Losses, Tokens
from jaxopt_llm.model import dropout, quantised
from jaxopt_llm.model.leaves import CODED, CodedWeight, LoraWeight, dequantise, lengths
from jaxopt_llm.model.quantised import Operand, Quantised
from jaxopt_llm.parallel.sharding import Placed, Placement, WeightShardings, gather, reduce_gradient

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
    return _einsum(subscripts, dtype, x, *_split(weight))


def take(table: Weight, ids: jax.Array) -> jax.Array:
    """Rows of a table: weight [V, D], ids [...] -> [..., D]. Ids must be within the table: the host checks them."""
    if isinstance(table, LoraWeight):
        assert table.magnitude is None, "magnitudes are of the blocks: lora.problems refuses others"
        rows = "XYZ"[: ids.ndim]
        low = table.scale * take(table.lora_b, ids)
        return take(table.base, ids) + einsum(f"{rows}r,Dr->{rows}D", low, table.lora_a)
    return _take(*_split(table), ids)


def materialise(weight: Weight, dtype: jnp.dtype | None = None) -> jax.Array:
    """The whole weight in compute dtype, or in this one, for what is neither product nor look-up: norm scales and
    biases."""
    assert isinstance(weight, Placed), "adapters and codes are of what a product sums over"
    return _materialise(dtype, *_split(weight))


def cross_entropy(
    x: jax.Array, table: Weight, tokens: Tokens, cotangent: jax.Array, form: Classifier, placement: Placement
) -> Losses:
    """cotangent × objective, and the cross-entropy, of logits x · tableᵀ, each summed over the tokens that count.

    x: [B, S, D] with all its positions; table: [V, D]. Only the former is differentiated, by x and table.
    cotangent: float32 scalar. It is wanted here because the gradients are formed with the loss, in 16 bits: scaled
        afterwards, small ones would be lost in float16, and a second array of the table's size be needed.
    The table is gathered once, and its gradient reduced once (see kernels/cross_entropy.py).
    """
    xs, tables = zip(*_terms(x, table), strict=True)
    tables, taps = zip(*map(_split, tables), strict=True)
    cotangent = jax.lax.stop_gradient(jnp.asarray(cotangent, jnp.float32))
    objective, loss = _cross_entropy(form, placement, xs, tables, taps, tokens, cotangent)
    return objective, jax.lax.stop_gradient(loss)


def _terms(x: jax.Array, table: Weight) -> list[tuple[jax.Array, Whole]]:
    """What x · tableᵀ is the sum of: inputs, each with the array that it multiplies."""
    if not isinstance(table, LoraWeight):
        return [(x, table)]
    assert table.magnitude is None, "magnitudes are of the blocks: lora.problems refuses others"
    low = table.scale * einsum("BSD,Dr->BSr", x, table.lora_a)
    return [*_terms(x, table.base), (low, table.lora_b)]


def _dropped(x: jax.Array, weight: LoraWeight) -> jax.Array:
    return x if weight.noise is None else dropout.drop(x, weight.noise, weight.dropout)


def _to_magnitude(subscripts: str, y: jax.Array, weight: LoraWeight) -> jax.Array:
    """A product of base + scale × A·B, each of its output channels brought to its magnitude. The length that it has
    without is taken for a constant, as in the paper's section 4.3."""
    _, axes, result = _axes(subscripts)
    summed, others = ("".join(axis for axis in axes if (axis in result) is kept) for kept in (False, True))
    base, a, b = (_gather(each) for each in (weight.base, weight.lora_a, weight.lora_b))

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


def _split(weight: Whole) -> tuple[Whole, jax.Array | None]:
    """The weight as it rests, and its tap, which no backward needs to keep."""
    return (replace(weight, tap=None), weight.tap) if isinstance(weight, Placed) else (weight, None)


def _shardings(weight: Whole) -> WeightShardings:
    return weight.codes.shardings if isinstance(weight, CODED) else weight.shardings


def _gather(weight: Whole) -> jax.Array:
    """The weight in compute dtype, whole but for `tensor`. Codes are gathered as codes, and widened after."""
    if isinstance(weight, CODED):
        gathered = jax.tree.map(lambda x: gather(x, x.array.dtype), weight, is_leaf=lambda x: isinstance(x, Placed))
        return dequantise(gathered).astype(_shardings(weight).compute_dtype)
    return gather(weight)


def _gather_operand(weight: Whole, summed: tuple[int, ...]) -> Operand:
    """The weight as its products take it, gathered so: of codes, a gather moves one byte each.

    summed: the dimensions that they sum over.
    """
    shardings = _shardings(weight)
    if isinstance(weight, CODED) or shardings.matmul == "compute_dtype":
        return _gather(weight)
    if shardings.matmul == "int4_qat":  # whole first: what rests on a device need not be of whole groups
        return quantised.weight(shardings.matmul, _gather(weight), summed)
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


# In each of the four the weight itself has no cotangent (None): its gradient is the tap's.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum(subscripts, dtype, x, weight, tap):
    return _einsum_forward(subscripts, dtype, x, weight, tap)[0]


def _einsum_forward(subscripts, dtype, x, weight, tap):
    shardings = _shardings(weight)
    left, right, result = _axes(subscripts)
    gathered = _gather_operand(weight, _summed(right, result))
    operand = quantised.inputs(shardings.matmul, x, _summed(left, result), shardings.grouped)
    split = _split_sum(shardings.gathered, right, result)
    y = quantised.einsum(subscripts, operand, gathered, shardings.compute_dtype, dtype, split)
    kept = jax.tree.map(lambda array: checkpoint_name(array, KEPT), gathered) if shardings.keep else None
    return y, (operand, weight, kept)


def _einsum_backward(subscripts, dtype, residuals, dy):
    x, weight, gathered = residuals
    shardings = _shardings(weight)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _materialise(dtype, weight, tap):
    return gather(weight, dtype)


def _materialise_forward(dtype, weight, tap):
    return gather(weight, dtype), replace(weight, array=None)


def _materialise_backward(dtype, weight, dy):
    return None, reduce_gradient(dy, weight.shardings) if weight.shardings.trainable else None


_materialise.defvjp(_materialise_forward, _materialise_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(form, placement, xs, tables, taps, tokens, cotangent):
    where = _Where.of(placement, tables)
    run = placement.on_each_device(
        functools.partial(kernel.losses, form, axis=where.vocabulary),
        (where.xs, where.tables, where.tokens),
        where.tokens,
    )
    return _sum_losses(run(xs, tuple(map(_gather, tables)), tokens), cotangent)


def _cross_entropy_forward(form, placement, xs, tables, taps, tokens, cotangent):
    where = _Where.of(placement, tables)
    wanted = tuple(_shardings(each).trainable for each in tables)

    def on_device(xs, tables, tokens, cotangent):
        found = kernel.losses_and_gradients(form, xs, tables, wanted, tokens, cotangent, where.vocabulary)
        losses, *gradients = found
        return losses, *jax.tree.map(lambda part: part[None], gradients)

    # Gradients leave the region as each device's part of their sums: outside, XLA reduces them to where they go.
    run = placement.on_each_device(
        on_device,
        (where.xs, where.tables, where.tokens, PartitionSpec()),
        (
            where.tokens,
            PartitionSpec(where.vocabulary, *where.xs),
            tuple(PartitionSpec(where.rows, *spec) for spec in where.tables),
        ),
    )
    losses, d_xs, d_tables = run(xs, tuple(map(_gather, tables)), tokens, cotangent)
    return _sum_losses(losses, cotangent), (d_xs, d_tables, tables)


def _cross_entropy_backward(form, placement, residuals, cotangents):
    d_xs, d_tables, tables = residuals
    scale = cotangents[0]  # 1, where the executor differentiates this alone: XLA then leaves the product out
    d_xs = tuple(_sum_parts(each, scale, each.dtype) for each in d_xs)

    @jax.named_scope(GRADIENT)
    def of_tap(table, gradient):
        shardings = _shardings(table)
        if not shardings.trainable:
            return None
        return reduce_gradient(_sum_parts(gradient, scale, shardings.reduce_dtype), shardings)

    return d_xs, None, tuple(map(of_tap, tables, d_tables)), None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _sum_losses(losses: Losses, cotangent: jax.Array) -> Losses:
    objective, loss = map(jnp.sum, losses)
    return cotangent * objective, loss


def _sum_parts(parts: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """[devices, ...] -> [...], times scale."""
    scaled = (parts.astype(jnp.float32) * scale).astype(dtype)
    # Not jnp.sum: it would widen 16-bit values to float32, and so the bytes between devices.
    return jax.lax.reduce(scaled, jnp.zeros((), dtype), jax.lax.add, (0,))


@dataclass(frozen=True)
class _Where:
    """How the operands of a cross-entropy are divided. vocabulary: the axis that splits the tables' rows, if any; rows:
    the axes that split batch and sequence."""

    xs: PartitionSpec
    tokens: PartitionSpec
    tables: tuple[PartitionSpec, ...]

    @classmethod
    def of(cls, placement: Placement, tables: tuple[Whole, ...]) -> "_Where":
        return cls(
            xs=placement.activation("batch", "sequence", "embed").spec,
            tokens=placement.activation("batch", "sequence").spec,
            tables=tuple(_shardings(each).gathered.spec for each in tables),
        )

    @property
    def vocabulary(self) -> str | None:
        return self.tables[0][0]

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(jax.tree.leaves(tuple(self.tokens)))
