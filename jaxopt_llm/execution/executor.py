"""Executor: the functions by which the packages above this one run a model."""

from dataclasses import dataclass
from typing import Protocol

import jax

from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.placement import Placement


class LossAndGradients(Protocol):
    def __call__(
        self,
        model: Model,
        trainable: Params,
        frozen: Params,
        batch: Batch,
        loss_weight: jax.Array,
        placement: Placement,
    ) -> tuple[jax.Array, jax.Array, Auxiliary, Params]:
        """Return the loss and the gradients of a batch.

        trainable, frozen: the two halves of a `tree.partition` of the parameters; no gradient is formed for `frozen`.
        batch: fields [M, B, S], M microbatches.
        loss_weight: float32 scalar, 1 / tokens for the gradient of the mean, times the loss scale if there is one.

        Returns the loss summed over real tokens, their number, the auxiliary sums, and the gradients
        d(loss_weight × losses)/d(trainable), with the sharding of the masters.
        """


class Loss(Protocol):
    def __call__(self, model: Model, params: Params, batch: Batch, placement: Placement) -> tuple[jax.Array, Auxiliary]:
        """Return the loss of a batch, fields [M, B, S], summed over real tokens, and the auxiliary sums."""


@dataclass(frozen=True)
class Executor:
    loss_and_gradients: LossAndGradients
    loss: Loss
