"""Sums of gradients over the storage axes of ZeRO as blocks of codes (`sharding.fsdp_gradients`).

Each device forms a part of a gradient: that of its own tokens. Usually the parts are implicit, and XLA reduce-scatters
them. Here they are a dimension of an array, so that each device rounds what it sends: an all-to-all of codes, after
which the device that stores a piece of the gradient adds the parts in float32 (blocks.py).

Letters: N parts; P of them along the mesh axes that divide the rows of the batch, C along those of the sequence.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.core.block_format import Bits
from jaxopt_llm.parallel import blocks, zero
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.parallel.placement import Placement, Spec


@dataclass(frozen=True)
class CodedSum:
    """The sum of one weight's gradient as codes.

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
        moved = blocks.move_blocks(parts, before, after, self.values, self.bits)
        return jax.lax.with_sharding_constraint(jnp.sum(moved, axis=0), self.total)


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
        or not blocks.moves_as_blocks(spec)
        or "fsdp" not in jax.tree.leaves(tuple(total.spec))
    ):
        return None
    values = blocks.find_block_size(spec.shape, part, total)
    if values is None:
        return None
    tokens = placement.activation("batch", "sequence").spec
    rows, sequence = (tuple(jax.tree.leaves(axes)) for axes in tokens)
    return CodedSum(part, total, rows, sequence, values, blocks.BITS[form])
