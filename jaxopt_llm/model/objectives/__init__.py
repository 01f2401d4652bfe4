"""Objectives: what is minimised, as functions of the head's output and of the batch.

An executor knows no objective. It differentiates what `Objective.compute` returns, and adds up what it reports. The
head computes its logits in chunks, so an objective asks it for numbers of the tokens, and never for all logits.

Letters: B batch, S sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.head import Head


class Objective(Protocol):
    """An objective of training. Its sums are over units: tokens, documents, or pairs of documents.

    needs_reference: whether it reads `Batch.reference`.
    """

    @property
    def needs_reference(self) -> bool: ...

    def count(self, batch: Batch) -> jax.Array:
        """Return the number of units in a batch, int32. batch: fields [..., S]."""

    def compute(self, head: Head, batch: Batch, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return what is differentiated, and sums to report, float32. batch: fields [B, S].

        What is differentiated is loss_weight, float32 scalar, times the sum of the losses of all units, and includes
        the z-loss. The sums have no gradient. They are the sum of the losses, or a row that begins with it.
        """

    def name_metrics(self, means: Any) -> dict[str, Any]:
        """Return the metrics besides the loss. means: the reported sums, divided by the number of units."""


@dataclass(frozen=True)
class NextToken:
    """The cross-entropy of the token that follows each token. It reports the loss alone."""

    needs_reference: ClassVar[bool] = False

    def count(self, batch: Batch) -> jax.Array:
        return jnp.sum(batch.loss_mask)

    def compute(self, head: Head, batch: Batch, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return head.cross_entropy(batch.loss_mask, loss_weight)

    def name_metrics(self, means: Any) -> dict[str, Any]:
        return {}


def weigh_tokens(
    sum_losses: Callable[..., tuple[jax.Array, jax.Array]], log_probabilities: jax.Array, *arguments: Any
) -> tuple[jax.Array, jax.Array]:
    """Return weights of the tokens' cross-entropy, and what is reported, float32.

    With these weights, the gradient of the cross-entropy is that of the objective.

    Args:
        sum_losses: (log_probabilities, *arguments) -> (the objective, what is reported).
        log_probabilities: of the targets, [B, S], as the weights.
    """
    gradient, reported = jax.grad(sum_losses, has_aux=True)(log_probabilities, *arguments)
    return -gradient, reported


def split_loss(objective: Objective, means: Any) -> tuple[Any, dict[str, Any]]:
    """Return the loss and the other metrics of an objective. means: its sums, divided by the number of units."""
    return means if means.ndim == 0 else means[0], objective.name_metrics(means)
