"""Numbers of the optimizer and of its schedule, as arguments of the compiled step.

Runs that differ only in them share one compiled program, which the compilation cache holds.
"""

from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from jaxopt_llm.config import Config, OptimizerConfig
from jaxopt_llm.step.schedule import Shape, find_shape

Scalar = jax.Array | np.float32


@struct.dataclass
class Decay:
    """A decay rate. optax can compute with it as with a number.

    A program that computed 1 - 0.999 in float32 would be wrong by a hundred-thousandth of the result, so the complement
    is rounded on its own.

    Attributes:
        rate: float32 scalar.
        complement: 1 - rate, float32 scalar.
    """

    rate: Scalar
    complement: Scalar

    def __mul__(self, other: Any) -> Any:
        return self.rate * other

    def __pow__(self, count: Any) -> Any:
        return self.rate**count

    def __rsub__(self, one: float) -> Scalar:
        assert one == 1, f"{one} - decay: only the complement is known"
        return self.complement


@struct.dataclass
class OptimizerNumbers:
    """Settings of `OptimizerConfig` that an optimizer computes with."""

    beta1: Decay
    beta2: Decay
    momentum: Decay
    epsilon: Scalar
    weight_decay: Scalar


@struct.dataclass
class Hyperparameters:
    """Hyperparameters of a training step, float32 scalars: concrete on the host, traced in the step."""

    optimizer: OptimizerNumbers
    schedule: Shape


def read_optimizer_numbers(config: OptimizerConfig) -> OptimizerNumbers:
    """Return the numbers of an optimizer, on the host."""

    def decay(rate: float) -> Decay:
        return Decay(np.float32(rate), np.float32(1 - rate))

    return OptimizerNumbers(
        beta1=decay(config.beta1),
        beta2=decay(config.beta2),
        momentum=decay(config.momentum),
        epsilon=np.float32(config.epsilon),
        weight_decay=np.float32(config.weight_decay),
    )


def read_hyperparameters(config: Config) -> Hyperparameters:
    """Return the hyperparameters of a configuration, on the host."""
    shape = find_shape(config.optimizer.learning_rate, config.schedule, config.training.steps)
    return Hyperparameters(read_optimizer_numbers(config.optimizer), shape)


def place_hyperparameters(values: Hyperparameters | None, sharding: NamedSharding) -> Hyperparameters | None:
    """Return the hyperparameters on all devices, also on those of other processes, which have the same values."""

    def place(value: np.float32) -> jax.Array:
        return jax.make_array_from_callback((), sharding, lambda _: value)

    placed: Hyperparameters | None = jax.tree.map(place, values)
    return placed
