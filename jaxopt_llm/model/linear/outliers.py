"""Outlier columns of inputs, which int8 products compute in the compute dtype: `precision.outlier_threshold`.

A few columns of the activations of a large model are many times as large as all others, and with one scale per token
they leave the others few codes. LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339) splits the product:

    y = x[:, O] · W[O, :] + scales of x and W × (codes of x[:, R] · codes of W[R, :])

O are the columns with a value above the threshold, R all others. Scales of x cover its other columns; a channel
of W has one scale for all columns. Shapes are static: at most COLUMNS columns are split off, the largest first.

Letters: z parts of the contracted axes, one for each device of `tensor` that holds a part of W; c columns of a part; n
of them are split off. They are lower case, because the axes of the whole product have upper-case letters. Columns are
selected by products with 0 and 1, which devices divide as any other product.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.model.linear import quantised
from jaxopt_llm.model.linear.leaves import Int8Weight
from jaxopt_llm.model.linear.quantised import Quantised
from jaxopt_llm.parallel.gathering import PlacedWeight, WeightShardings, gather_array
from jaxopt_llm.parallel.zero import GROUP_AXIS

# The largest number of columns of a part that are split off. The paper finds up to 7 in models of up to 13B parameters.
COLUMNS = 64


@struct.dataclass
class SplitInputs:
    """Inputs whose outlier columns are split off.

    regular: the codes and scales of all columns, with codes 0 where a column is split off.
    outliers: [rows, z, n], the columns that are split off; zeros where there are fewer.
    columns: int32 [z, n], which ones they are; -1 where there are fewer.
    axes: axes of the inputs. summed: the axes that the product sums over. If devices divide one, it is the first.
    """

    regular: Quantised
    outliers: jax.Array
    columns: jax.Array
    axes: str = struct.field(pytree_node=False)
    summed: str = struct.field(pytree_node=False)


def einsum(
    subscripts: str,
    x: jax.Array,
    weight: PlacedWeight | Int8Weight,
    gathered: Quantised,
    dtype: jnp.dtype,
    split: tuple[str, int] | None,
) -> tuple[jax.Array, SplitInputs]:
    """Compute `jnp.einsum` with result `dtype`, and return it with the inputs as they were multiplied.

    Args:
        subscripts: "axes of x,axes of the weight->axes of the result".
        weight: as it rests. If it is an array, the rows that meet outliers are not rounded. If it is int8 codes, these
            rows are dequantised codes.
        gathered: the codes of the weight.
        split: see `quantised.einsum`.
    """
    shardings = weight.codes.shardings if isinstance(weight, Int8Weight) else weight.shardings
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    summed, parts = _list_summed(right, result, split)
    inputs = split_outliers(x, left, summed, parts, shardings.outlier_threshold, shardings.grouped)
    if isinstance(weight, Int8Weight):
        scales = jnp.squeeze(gathered.scales, tuple(right.index(each) for each in summed))
        rows = select_rows(gathered.codes, right, inputs).astype(jnp.float32) * scales
        rows = rows.astype(shardings.compute_dtype)
    else:
        rows = select_rows(weight.array.astype(shardings.compute_dtype), right, inputs)
        rows = _gather_rows(rows, right, inputs, shardings)
    added = multiply(subscripts, inputs, rows, keep_parts=split is not None)
    y = quantised.einsum(subscripts, inputs.regular, gathered, shardings.compute_dtype, dtype, split, added)
    return y, inputs


def _gather_rows(rows: jax.Array, axes: str, inputs: SplitInputs, shardings: WeightShardings) -> jax.Array:
    """Gather the selected rows of a weight, [z, n, other axes], over the storage axes of ZeRO."""
    parts = shardings.gathered.spec[axes.index(inputs.summed[0])]

    def make_sharding(of: NamedSharding) -> NamedSharding:
        others = (by for axis, by in zip(axes, of.spec, strict=True) if axis not in inputs.summed)
        return NamedSharding(of.mesh, PartitionSpec(parts, None, *others))

    resting, at_use = (make_sharding(each) for each in (shardings.resting, shardings.gathered))
    exact = replace(shardings, resting=resting, gathered=at_use, gather_block=None)
    return gather_array(PlacedWeight(rows, None, exact))


def split_outliers(
    x: jax.Array, axes: str, summed: str, parts: int, threshold: float, grouped: bool = False
) -> SplitInputs:
    """Quantise inputs to int8, except for their outlier columns.

    Args:
        axes: one letter for each dimension of x.
        summed: the axes that the product sums over. If devices divide one, it is the first.
        parts: number of parts into which they divide it.
        grouped: see `quantised.quantise_inputs`.
    """
    rows = _rows(axes, summed)
    columns = _to_columns(x, axes, summed, parts)  # [rows, z, c]
    largest = _find_largest(columns, grouped)
    values, chosen = jax.lax.top_k(largest, min(COLUMNS, largest.shape[-1]))
    chosen = jnp.where(values > threshold, chosen, -1)
    selection = select(chosen, largest.shape[-1])
    is_outlier = jnp.any(selection, axis=-1).reshape([x.shape[axes.index(axis)] for axis in summed])
    regular = jnp.where(_to_input(is_outlier, axes, summed), 0, x)
    return SplitInputs(
        regular=quantised.to_integers(regular, tuple(axes.index(axis) for axis in summed), quantised.MAX_CODES["int8"]),
        outliers=jnp.einsum(f"{rows}zc,zcn->{rows}zn", columns, selection.astype(x.dtype)),
        columns=chosen,
        axes=axes,
        summed=summed,
    )


def _find_largest(columns: jax.Array, grouped: bool) -> jax.Array:
    """Return the largest magnitude of each column, float32 [z, c], for columns [rows, z, c]."""
    largest = jnp.max(jnp.abs(columns.astype(jnp.float32)), axis=tuple(range(columns.ndim - 2)))
    return jax.lax.pmax(largest, GROUP_AXIS) if grouped else largest


def _list_summed(right: str, result: str, split: tuple[str, int] | None) -> tuple[str, int]:
    """Return the axes that a product sums over, the one that devices divide first, and the number of its parts."""
    axis, parts = split or ("", 1)
    return axis + "".join(each for each in right if each not in (*result, axis)), parts


def select(columns: jax.Array, size: int) -> jax.Array:
    """Return the selection of columns, bool [z, c, n]. size: c."""
    return columns[:, None, :] == jnp.arange(size)[None, :, None]


def select_rows(array: jax.Array, axes: str, inputs: SplitInputs) -> jax.Array:
    """Return the rows of a weight that meet the outlier columns, [z, n, other axes], in the dtype of the array.

    axes: one letter for each dimension of the array.
    """
    others = "".join(axis for axis in axes if axis not in inputs.summed)
    parts = inputs.columns.shape[0]
    rows = _reorder(array, axes, inputs.summed + others)
    rows = rows.reshape(parts, -1, *rows.shape[len(inputs.summed) :])  # [z, c, others]
    selection = select(inputs.columns, rows.shape[1]).astype(array.dtype)
    product = f"zc{others},zcn->zn{others}"
    if array.dtype == jnp.int8:
        return jnp.einsum(product, rows, selection, preferred_element_type=jnp.int32).astype(jnp.int8)
    return jnp.einsum(product, rows, selection)


def multiply(subscripts: str, inputs: SplitInputs, rows: jax.Array, keep_parts: bool) -> jax.Array:
    """Return the product of the outlier columns, float32, [z, result] if keep_parts, otherwise [result].

    Args:
        subscripts: subscripts of the whole product.
        rows: `select_rows` of the weight.
    """
    operands, result = subscripts.split("->")
    weight = operands.split(",")[1]
    others = "".join(axis for axis in weight if axis not in inputs.summed)
    product = f"{_rows(inputs.axes, inputs.summed)}zn,zn{others}->{'z' * keep_parts}{result}"
    return jnp.einsum(product, inputs.outliers, rows, preferred_element_type=jnp.float32)


def dequantise(inputs: SplitInputs, dtype: str) -> jax.Array:
    """Return the inputs, rounded where they are codes."""
    regular = quantised.dequantise(inputs.regular, dtype)
    sizes = [regular.shape[inputs.axes.index(axis)] for axis in inputs.summed]
    selection = select(inputs.columns, math.prod(sizes) // inputs.columns.shape[0]).astype(dtype)
    rows = _rows(inputs.axes, inputs.summed)
    columns = jnp.einsum(f"{rows}zn,zcn->{rows}zc", inputs.outliers.astype(dtype), selection)
    whole = columns.reshape(*columns.shape[: len(rows)], *sizes)
    return regular + _reorder(whole, rows + inputs.summed, inputs.axes)


def _rows(axes: str, summed: str) -> str:
    return "".join(axis for axis in axes if axis not in summed)


def _reorder(array: jax.Array, axes: str, order: str) -> jax.Array:
    return jnp.transpose(array, [axes.index(axis) for axis in order])


def _to_columns(x: jax.Array, axes: str, summed: str, parts: int) -> jax.Array:
    """Return x as [rows, z, c]."""
    rows = _rows(axes, summed)
    return _reorder(x, axes, rows + summed).reshape(*(x.shape[axes.index(axis)] for axis in rows), parts, -1)


def _to_input(columns: jax.Array, axes: str, summed: str) -> jax.Array:
    """Return an array with the axes `summed` in a shape that broadcasts with the inputs."""
    kept = "".join(axis for axis in axes if axis in summed)
    return jnp.expand_dims(_reorder(columns, summed, kept), [axes.index(axis) for axis in _rows(axes, summed)])
