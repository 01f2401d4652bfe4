"""How a model is run: what every executor offers, and all that the rooms above know of one."""

from dataclasses import dataclass
from typing import Protocol

import jax

from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Params, Parts
from jaxopt_llm.parallel.sharding import Placement


class LossAndGradients(Protocol):
    def __call__(
        self,
        parts: Parts,
        trainable: Params,
        frozen: Params,
        batch: Batch,
        cotangent: jax.Array,
        placement: Placement,
    ) -> tuple[jax.Array, jax.Array, Auxiliary, Params]:
        """The loss summed over real tokens, their number, the auxiliary sums, and d(cotangent × losses)/d(trainable).

        trainable, frozen: the two halves of a `tree.partition` of the parameters; no gradient is formed for `frozen`.
        batch: fields [M, B, S]. cotangent: float32 scalar, 1 / tokens for the gradient of the mean, times the loss
        scale where there is one. Gradients are placed as the masters are.
        """


class Loss(Protocol):
    def __call__(self, parts: Parts, params: Params, batch: Batch, placement: Placement) -> tuple[jax.Array, Auxiliary]:
        """The loss summed over real tokens, fields [M, B, S], and the auxiliary sums."""


@dataclass(frozen=True)
class Executor:
    loss_and_gradients: LossAndGradients
    loss: Loss
