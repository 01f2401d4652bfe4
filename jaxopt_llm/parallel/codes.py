"""Collectives that move blocks of int8 or int4 codes in place of values of 16 or 32 bits.

The method is from ZeRO++ (Wang et al. 2023, arXiv:2306.10209): values are rounded on the device that sends them,
with one scale for each block, and every sum is formed in float32 on the device that receives them.

A block is a run of values along the last dimension, within one device's part.

A sum of gradients over devices usually has implicit parts, which XLA adds: each device forms the part of its own
tokens. In a sum as codes the parts are a dimension of an array, so that each device rounds what it sends. `CodedSum` is
the sum within a gradient group, over the storage axes of ZeRO (`sharding.fsdp_gradients`). `RowSum` is the sum in every
microbatch, where there are no gradient groups (`sharding.fsdp_gradients` and `sharding.data_gradients`).

Letters: N values of the last dimension of an array, V values of a block; of sums, N parts, P of them along the mesh
axes that divide the rows of the batch, and C along the axes that divide the sequence.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.parallel import zero
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.parallel.placement import Dims, Placement, Spec

Bits = Literal[4, 8]
BLOCK_SIZES = (128, 64, 32)  # values that share a float32 scale: 3% of the bytes of int8 codes, then 6% and 12%
MAX_CODES: dict[Bits, int] = {8: 127, 4: 7}  # symmetric, with a code for 0


BITS: dict[str, Bits] = {"int8": 8, "int4": 4}  # of the formats of gradients that are not exact
ROW_AXES = ("data", "fsdp")  # the mesh axes that divide the rows, outermost first
QUANTISE_SCOPE, DEQUANTISE_SCOPE = "quantise_blocks", "dequantise_blocks"  # named scopes in compiled programs


def moves_as_blocks(spec: Spec) -> bool:
    """Return whether a parameter may move as codes: a matrix that need not be exact."""
    return not spec.exact and bool(spec.contracting)  # a bias per head has two dimensions, too


def find_block_size(shape: tuple[int, ...], *shardings: NamedSharding) -> int | None:
    """Return the largest block size that divides each device's part of the last dimension; None if there is none.

    shardings: the array moves between them.
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

    values: the block size that `find_block_size` returns for both shardings.
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


# ---- Sums over one mesh axis.


@dataclass(frozen=True)
class SumStep:
    """A move of parts [..., one mesh axis, *gradient] or of sums.

    before, after: shardings of the array before and after it moves as codes; None if it moves in its own dtype.
    dim: the dimension that is summed then; None for a move of sums.
    total: the sharding of the result.
    values: number of values in a block.
    """

    before: NamedSharding | None
    after: NamedSharding | None
    dim: int | None
    total: NamedSharding
    values: int
    bits: Bits

    def apply(self, array: jax.Array) -> jax.Array:
        if self.before and self.after:
            array = move_blocks(array, self.before, self.after, self.values, self.bits)
        if self.dim is not None:
            # Not jnp.sum: it would widen 16-bit values to float32, and so the bytes between devices.
            array = jax.lax.reduce(array, jnp.zeros((), array.dtype), jax.lax.add, (self.dim,))
        return jax.lax.with_sharding_constraint(array, self.total)


def plan_sum(
    spec: Spec, format: tuple[str, str], leading: Dims, dims: tuple[Dims, Dims, Dims], placement: Placement
) -> list[SumStep]:
    """Return the steps of a gradient's sum over one mesh axis, in the format of this axis.

    Each device sends codes of its part to the device that sums them: an all-to-all. If the axis does not divide the
    result, the sums are then gathered, as int8 codes, so that all replicas read the same values. A gradient without
    whole blocks, or that the axis does not divide, is summed exactly.

    format: the axis, and its format.
    leading: the mesh axes of the dimensions of parts that are summed later.
    dims: the mesh axes of the gradient's dimensions before the sum; after it, when each device has its part; and at the
        end.
    """
    (axis, name), (before, scattered, total) = format, dims
    make = placement.named_sharding
    values = find_block_size(spec.shape, make(before), make(scattered))
    ends = total if not leading else scattered
    divides = any(axis in each for each in scattered)
    if name == "exact" or not divides or values is None:
        return [SumStep(None, None, len(leading), make(leading + ends), 0, 8)]
    bits = BITS[name]
    sent = make((*leading, (axis,), *before)), make((*leading, (), *scattered))
    steps = [SumStep(*sent, len(leading), make(leading + scattered), values, bits)]
    if ends != scattered:  # all replicas read the same sums
        steps.append(SumStep(make(scattered), make(ends), None, make(ends), values, 8))
    return steps


def run_steps(array: jax.Array, steps: Iterable[SumStep]) -> jax.Array:
    """Run the steps of a sum one after another."""
    for step in steps:
        array = step.apply(array)
    return array


# ---- Sums within a gradient group.


@dataclass(frozen=True)
class CodedSum:
    """The sum of one weight's gradient as codes: an all-to-all, after which a device adds the parts of what it stores.

    part: the sharding of one part, which only the axes of the parameters' table divide.
    total: the sharding of the sum.
    rows, sequence: the mesh axes that divide the rows of the batch, and the tokens of a row.
    values: number of values in a block.
    """

    part: NamedSharding
    total: NamedSharding
    rows: tuple[str, ...]
    sequence: tuple[str, ...]
    values: int
    bits: Bits

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that divide the tokens."""
        return order_as_storage(self.rows + self.sequence)

    def split_tokens(self, x: jax.Array) -> jax.Array:
        """Split an activation by the devices that have its tokens: [B, S, ...] -> [N, B/P, S/C, ...]."""
        rows, sequence = ([self.total.mesh.shape[axis] for axis in axes] for axes in (self.rows, self.sequence))
        local = x.shape[0] // math.prod(rows), x.shape[1] // math.prod(sequence)
        x = x.reshape(*rows, local[0], *sequence, local[1], *x.shape[2:])
        names = (*self.rows, "", *self.sequence)  # of the first dimensions
        x = jnp.moveaxis(x, [names.index(axis) for axis in self.axes], range(len(self.axes)))
        return x.reshape(-1, *local, *x.shape[len(names) + 1 :])

    def add(self, parts: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Sum over the first dimension, which these mesh axes divide; float32."""
        before = NamedSharding(self.part.mesh, PartitionSpec(axes, *self.part.spec))
        after = NamedSharding(self.total.mesh, PartitionSpec(None, *self.total.spec))
        return SumStep(before, after, 0, self.total, self.values, self.bits).apply(parts)


def order_as_storage(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the mesh axes in the order in which they divide gradients.

    In another order, XLA also sends the codes by a permutation of the devices.
    """
    return tuple(sorted(axes, key=("data", *STORAGE_AXES).index))


def find_coded_sum(spec: Spec, placement: Placement) -> CodedSum | None:
    """Return how a gradient is summed within its gradient group; None if its sum is exact."""
    form = placement.sharding.fsdp_gradients
    part, total = zero.gathered_sharding(spec, placement), zero.gradient_sharding(spec, placement)
    if (
        form == "exact"
        or placement.reduces_microbatches
        or not moves_as_blocks(spec)
        or "fsdp" not in jax.tree.leaves(tuple(total.spec))
    ):
        return None
    values = find_block_size(spec.shape, part, total)
    if values is None:
        return None
    tokens = placement.activation("batch", "sequence").spec
    rows, sequence = (tuple(jax.tree.leaves(axes)) for axes in tokens)
    return CodedSum(part, total, rows, sequence, values, BITS[form])


# ---- Sums over the rows of the batch, in every microbatch.


@dataclass(frozen=True)
class RowSum:
    """The sum of one weight's gradient over the devices that have rows of the batch.

    Over `fsdp` it is an all-to-all; over `data` an all-to-all and, unless `data` divides the masters, a gather of the
    sums.

    sizes: number of devices along each mesh axis that divides the rows, outermost first.
    parts: the sharding of the parts, [*sizes, *gradient].
    steps: of the sum. Without steps, the parts stay apart: a loop adds to them, and they are summed after it.
    """

    sizes: tuple[int, ...]
    parts: NamedSharding
    steps: tuple[SumStep, ...]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def coded(self) -> int:
        """Number of mesh axes over which codes are sent to be summed."""
        return sum(bool(step.before) and step.dim is not None for step in self.steps)

    def splits(self, size: int) -> bool:
        """Return whether a dimension of this size can be split by the rows."""
        return size % self.count == 0

    def split(self, array: jax.Array, dim: int = 0) -> jax.Array:
        """Split a dimension by the devices that have its rows: [..., B, ...] -> [N, ..., B/N, ...]."""
        split = array.reshape(*array.shape[:dim], self.count, -1, *array.shape[dim + 1 :])
        return jnp.moveaxis(split, dim, 0)

    def add(self, parts: jax.Array) -> jax.Array:
        """Sum over the first dimension, which has one entry for each device: [N, ...] -> [...]."""
        parts = jax.lax.with_sharding_constraint(parts.reshape(*self.sizes, *parts.shape[1:]), self.parts)
        return run_steps(parts, self.steps)

    def as_parts(self, gradient: jax.Array) -> jax.Array:
        """Return parts, [*sizes, ...], that have this sum: the first one is the gradient."""
        parts = jnp.zeros((self.count, *gradient.shape), gradient.dtype).at[0].set(gradient)
        return jax.lax.with_sharding_constraint(parts.reshape(*self.sizes, *gradient.shape), self.parts)


def find_row_sum(spec: Spec, placement: Placement) -> RowSum | None:
    """Return how a gradient is summed as codes; None if its sum is exact."""
    sharding, axes = placement.sharding, [axis for axis in ROW_AXES if placement.size(axis) > 1]
    formats = {"fsdp": sharding.fsdp_gradients, "data": sharding.data_gradients}
    if not placement.reduces_microbatches or not moves_as_blocks(spec):
        return None
    if all(formats[axis] == "exact" for axis in axes):
        return None
    part, within = placement.dims(spec), placement.dims(spec, zero.storage_axes(1, placement))
    total = placement.dims(spec, *zero.master_overlays(placement))
    scattered = {"fsdp": within, "data": placement.dims(spec, zero.storage_axes(1, placement), ("data",))}
    steps: list[SumStep] = []
    dims = part
    for dim in reversed(range(len(axes))):
        axis, leading = axes[dim], tuple((each,) for each in axes[:dim])
        steps += plan_sum(spec, (axis, formats[axis]), leading, (dims, scattered[axis], total), placement)
        dims = within
    lead = tuple((axis,) for axis in axes)
    sizes = tuple(placement.size(axis) for axis in axes)
    found = RowSum(sizes, placement.named_sharding(lead + part), tuple(steps))
    return found if found.coded else None
