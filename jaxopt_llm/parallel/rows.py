"""Which rows of a batch this process reads: those that its devices hold."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxopt_llm import tree


@dataclass(frozen=True)
class OwnRows:
    """Of batches [B, S], which rest on the devices of all processes as [M, B / M, S] by `sharding`.

    A process has the rows of all its devices: of every microbatch some, and the same ones as another process where an
    axis that does not split the batch crosses the two.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding

    @functools.cached_property
    def _of_microbatch(self) -> np.ndarray:
        held = self.sharding.addressable_devices_indices_map(self.shape).values()
        return np.unique([row for index in held if index for row in range(self.shape[1])[index[1]]])

    @property
    def numbers(self) -> list[int]:
        """Of the rows of the batch, in the order in which `place` takes them."""
        microbatches, rows, _ = self.shape
        return [int(first + row) for first in range(0, microbatches * rows, rows) for row in self._of_microbatch]

    def place(self, batch: tree.Tree) -> tree.Tree:
        """Fields [own rows, S] -> [M, B / M, S], over the devices of all processes."""
        microbatches, rows, length = self.shape

        def place(field: np.ndarray) -> jax.Array:
            own = field.reshape(microbatches, -1, length)

            def part(index: Any) -> np.ndarray:
                first, last, _ = index[1].indices(rows)
                begin = np.searchsorted(self._of_microbatch, first)
                return own[index[0], begin : begin + last - first, index[2]]

            return jax.make_array_from_callback(self.shape, self.sharding, part)

        return jax.tree.map(place, batch)
