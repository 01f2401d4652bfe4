"""Sums of gradients over devices as blocks of codes, where gradients are summed in every microbatch.

Each device forms a part of a gradient: that of its own rows of the batch. Usually the parts are implicit, and XLA adds
them. With `sharding.fsdp_gradients` or `sharding.data_gradients` they are a dimension of an array, so that each device
rounds what it sends (blocks.py): over `fsdp` an all-to-all; over `data` an all-to-all and, unless `data` divides the
masters, a gather of the sums. coded_sums.py does it within gradient groups.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxopt_llm.core.block_format import Bits
from jaxopt_llm.parallel import blocks, zero
from jaxopt_llm.parallel.placement import Dims, Placement, Spec

AXES = ("data", "fsdp")  # the mesh axes that divide the rows, outermost first


@dataclass(frozen=True)
class _Step:
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
            array = blocks.move_blocks(array, self.before, self.after, self.values, self.bits)
        if self.dim is not None:
            # Not jnp.sum: it would widen 16-bit values to float32, and so the bytes between devices.
            array = jax.lax.reduce(array, jnp.zeros((), array.dtype), jax.lax.add, (self.dim,))
        return jax.lax.with_sharding_constraint(array, self.total)


@dataclass(frozen=True)
class RowSum:
    """The sum of one weight's gradient over the devices that have rows of the batch.

    sizes: number of devices along each mesh axis that divides the rows, outermost first.
    parts: the sharding of the parts, [*sizes, *gradient].
    """

    sizes: tuple[int, ...]
    parts: NamedSharding
    steps: tuple[_Step, ...]

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def coded(self) -> int:
        """Number of mesh axes over which codes are sent to be summed."""
        return sum(bool(step.before) and step.dim is not None for step in self.steps)

    def splits(self, size: int) -> bool:
        """Return whether a dimension of this size can be that of the rows."""
        return size % self.count == 0

    def split(self, array: jax.Array, dim: int = 0) -> jax.Array:
        """Split a dimension by the devices that have its rows: [..., B, ...] -> [N, ..., B/N, ...]."""
        split = array.reshape(*array.shape[:dim], self.count, -1, *array.shape[dim + 1 :])
        return jnp.moveaxis(split, dim, 0)

    def add(self, parts: jax.Array) -> jax.Array:
        """Sum over the first dimension, which has one entry for each device: [N, ...] -> [...]."""
        parts = jax.lax.with_sharding_constraint(parts.reshape(*self.sizes, *parts.shape[1:]), self.parts)
        for step in self.steps:
            parts = step.apply(parts)
        return parts


def find_row_sum(spec: Spec, placement: Placement) -> RowSum | None:
    """Return how a gradient is summed as codes; None if its sum is exact."""
    sharding, axes = placement.sharding, [axis for axis in AXES if placement.size(axis) > 1]
    formats = {"fsdp": sharding.fsdp_gradients, "data": sharding.data_gradients}
    if not placement.reduces_microbatches or not blocks.moves_as_blocks(spec):
        return None
    if all(formats[axis] == "exact" for axis in axes):
        return None
    part, within = placement.dims(spec), placement.dims(spec, zero.storage_axes(1, placement))
    total = placement.dims(spec, *zero.master_overlays(placement))
    scattered = {"fsdp": within, "data": placement.dims(spec, zero.storage_axes(1, placement), ("data",))}
    steps: list[_Step] = []
    dims = part
    for dim in reversed(range(len(axes))):
        axis, leading = axes[dim], tuple((each,) for each in axes[:dim])
        steps += _make_steps(spec, (axis, formats[axis]), leading, (dims, scattered[axis], total), placement)
        dims = within
    lead = tuple((axis,) for axis in axes)
    sizes = tuple(placement.size(axis) for axis in axes)
    found = RowSum(sizes, placement.named_sharding(lead + part), tuple(steps))
    return found if found.coded else None


def _make_steps(
    spec: Spec, format: tuple[str, str], leading: Dims, dims: tuple[Dims, Dims, Dims], placement: Placement
) -> list[_Step]:
    """Return the sum over one mesh axis.

    format: the axis, and its format.
    leading: the mesh axes of the dimensions of parts that are not summed yet.
    dims: the mesh axes of the gradient's dimensions before the sum; after it, each device having its part; and at the
        end.
    """
    (axis, name), (before, scattered, total) = format, dims
    make = placement.named_sharding
    values = blocks.find_block_size(spec.shape, make(before), make(scattered))
    ends = total if not leading else scattered
    divides = any(axis in each for each in scattered)
    if name == "exact" or not divides or values is None:
        return [_Step(None, None, len(leading), make(leading + ends), 0, 8)]
    bits = blocks.BITS[name]
    sent = make((*leading, (axis,), *before)), make((*leading, (), *scattered))
    steps = [_Step(*sent, len(leading), make(leading + scattered), values, bits)]
    if ends != scattered:  # all replicas read the same sums
        steps.append(_Step(make(scattered), make(ends), None, make(ends), values, 8))
    return steps
