"""What a block adds beside its output."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Auxiliary:
    """One structure for all kinds of block.

    loss: float32, already weighted and summed over tokens, so that the main loss's denominator serves it.
    statistics: sums for the metrics.
    """

    loss: jax.Array
    statistics: dict[str, jax.Array]

    def __add__(self, other: "Auxiliary") -> "Auxiliary":
        return jax.tree.map(jnp.add, self, other)
