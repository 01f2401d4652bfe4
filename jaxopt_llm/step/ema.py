"""Exponential moving average of the trained parameters, `training.ema_decay`.

After each update, average = decay × average + (1 - decay) × parameters. The average starts as the initial parameters.
So that they do not dominate it for the first 1 / (1 - decay) updates, the decay of update n, from 0, is at most
(1 + n) / (10 + n). This is the warm-up of `tf.train.ExponentialMovingAverage` (with `num_updates`) and of
`diffusers.EMAModel`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel import offload


def begin_average(masters: Params, shardings: Params | None) -> Params | None:
    """Copy the masters, one leaf at a time, into their average; None if `shardings` is None."""

    def copy(master: jax.Array, sharding: NamedSharding) -> jax.Array:
        def fetch(master: jax.Array) -> jax.Array:
            return jnp.copy(offload.fetch_to_device(master))  # jit would return its argument itself

        return jax.jit(fetch, out_shardings=sharding)(master)

    return None if shardings is None else jax.tree.map(copy, masters, shardings)


def new_weight(decay: float, updates: jax.Array) -> jax.Array:
    """Return the weight of the new parameters in the average, float32.

    Args:
        updates: number of updates before this one.
    """
    # 1 - decay is rounded once: float32 has only three or four digits of 1 - 0.9999.
    return jnp.maximum(jnp.float32(1 - decay), 9 / (10 + updates.astype(jnp.float32)))


def move_average(
    average: Params | None, masters: Params, weight: jax.Array | float, good: jax.Array | bool
) -> Params | None:
    """Return the average after an update that gave these masters; None if there is no average.

    Args:
        weight: weight of the masters.
        good: bool; if False, the average stays bitwise unchanged.
    """

    def move(average: jax.Array, master: jax.Array) -> jax.Array:
        return jnp.where(good, average + weight * (master - average), average)

    return None if average is None else jax.tree.map(move, average, masters)
