"""The rows of a batch that this process reads: those that its devices hold."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxopt_llm.core import tree


@dataclass(frozen=True)
class LocalRows:
    """The rows of this process in batches [M·B, ...], which are on the devices of all processes as [M, B, ...].

    The process reads the rows of all its devices: some rows of every microbatch. If an axis that does not split the
    batch crosses two processes, both read the same rows.

    shape: (M, B, ...), M microbatches; the fields of a batch may differ in the dimensions after these two.
    sharding: of arrays of this shape.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding

    @functools.cached_property
    def _in_microbatch(self) -> np.ndarray:
        local = self.sharding.addressable_devices_indices_map(self.shape).values()
        return np.unique([row for index in local if index for row in range(self.shape[1])[index[1]]])

    @functools.cached_property
    def indices(self) -> list[int]:
        """Indices of the rows in the batch, in the order in which `make_global` takes them."""
        microbatches, rows, *_ = self.shape
        return [int(first + row) for first in range(0, microbatches * rows, rows) for row in self._in_microbatch]

    def make_global(self, batch: tree.Tree) -> tree.Tree:
        """Return fields [local rows, ...] as [M, B, ...], over the devices of all processes."""
        microbatches, rows, *_ = self.shape

        def make_field(field: np.ndarray) -> jax.Array:
            local = field.reshape(microbatches, -1, *field.shape[1:])

            def shard(index: Any) -> np.ndarray:
                first, last, _ = index[1].indices(rows)
                begin = np.searchsorted(self._in_microbatch, first)
                return local[index[0], begin : begin + last - first, *index[2:]]

            return jax.make_array_from_callback((microbatches, rows, *field.shape[1:]), self.sharding, shard)

        return jax.tree.map(make_field, batch)
