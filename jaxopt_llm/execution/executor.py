"""Executor: the functions by which the folders above this one run a model."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.placement import Placement


@dataclass(frozen=True)
class Executor:
    """The two functions that run a model.

    loss_and_gradients: (model, trainable, frozen, batch, loss_weight, placement)
        -> (loss, tokens, auxiliary, gradients).
    loss: (model, params, batch, placement) -> (loss, auxiliary).

    trainable, frozen: the two halves of a `tree.partition` of the parameters; no gradient is formed for `frozen`.
    batch: fields [M, B, S], M microbatches.
    loss_weight: float32 scalar, 1 / tokens for the gradient of the mean, times the loss scale if there is one.

    The loss is the cross-entropy, summed over the tokens where `loss_mask` is True; `tokens` is their number. The
    gradients are those of the objective, d(loss_weight × (cross-entropy + z-loss + auxiliary losses))/d(trainable).
    With gradient groups they have the sharding of the masters, otherwise that of `zero.gradient_sharding`.
    """

    loss_and_gradients: Callable[
        [Model, Params, Params, Batch, jax.Array, Placement], tuple[jax.Array, jax.Array, Auxiliary, Params]
    ]
    loss: Callable[[Model, Params, Batch, Placement], tuple[jax.Array, Auxiliary]]
