"""Auxiliary losses and statistics that a block returns in addition to its output."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Auxiliary:
    """Auxiliary sums of a block, with the same structure for all kinds of block.

    loss: float32, already weighted, and summed over tokens, so that it has the same denominator as the main loss.
    statistics: sums for the metrics.
    """

    loss: jax.Array
    statistics: dict[str, jax.Array]

    def __add__(self, other: "Auxiliary") -> "Auxiliary":
        return jax.tree.map(jnp.add, self, other)
