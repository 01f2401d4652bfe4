"""Objectives over the scores of documents: outputs of a small head at the last token of each document.

A row of a batch holds whole documents, and `Batch.labels` the label of each token's document.

    reward      -log σ(c - r - margin) + center_weight·(c + r)²    Bradley & Terry 1952; Ouyang et al. 2022
    classify    with one score: (score - label)²; otherwise the cross-entropy of the class that the label numbers

c and r are the scores of the chosen and of the rejected document of a pair. Its margin is its label or, without labels,
`preference.margin`.

Letters: B batch, S sequence, N scores.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxopt_llm.config.training import PreferenceConfig
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.head import Head
from jaxopt_llm.model.objectives.preference import count_pairs, sum_up_to

# What the objective over pairs reports, as sums over pairs.
OF_PAIRS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracy")


@dataclass(frozen=True)
class Reward:
    """Larger scores of chosen documents than of rejected ones, over pairs as in preference.py."""

    settings: PreferenceConfig
    needs_reference: ClassVar[bool] = False

    def count(self, batch: Batch) -> jax.Array:
        return count_pairs(batch)

    def compute(self, head: Head, batch: Batch, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jnp.where(find_ends(batch), head.scores()[..., 0], 0.0)  # [B, S]
        pair, is_chosen = (batch.segment_ids + 1) // 2, batch.segment_ids % 2 == 1
        chosen = sum_up_to(jnp.where(is_chosen, scores, 0.0), pair)
        rejected = jnp.where(is_chosen, 0.0, scores)  # at the last token of a pair
        margin = self.settings.margin if batch.labels is None else batch.labels
        losses = -jax.nn.log_sigmoid(chosen - rejected - margin)
        losses += self.settings.center_weight * jnp.square(chosen + rejected)
        is_end = find_ends(batch) & ~is_chosen
        reported = losses, chosen, rejected, (chosen > rejected).astype(jnp.float32)
        return _report(reported, is_end, loss_weight)

    def name_metrics(self, means: Any) -> dict[str, Any]:
        named = dict(zip(OF_PAIRS[1:], means[1:], strict=True))
        return named | {"rewards/margin": named["rewards/chosen"] - named["rewards/rejected"]}


@dataclass(frozen=True)
class Classify:
    """The label of each document. scores: number of scores, N."""

    scores: int
    needs_reference: ClassVar[bool] = False

    def count(self, batch: Batch) -> jax.Array:
        return jnp.sum(jnp.max(batch.segment_ids, axis=-1))

    def compute(self, head: Head, batch: Batch, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores, labels = head.scores(), batch.labels
        if self.scores == 1:
            return _report((jnp.square(scores[..., 0] - labels),), find_ends(batch), loss_weight)
        is_label = labels[..., None] == jnp.arange(self.scores, dtype=jnp.float32)  # [B, S, N]
        losses = jax.nn.logsumexp(scores, axis=-1) - jnp.sum(jnp.where(is_label, scores, 0.0), axis=-1)
        is_right = jnp.argmax(scores, axis=-1) == labels
        return _report((losses, is_right.astype(jnp.float32)), find_ends(batch), loss_weight)

    def name_metrics(self, means: Any) -> dict[str, Any]:
        return {} if self.scores == 1 else {"accuracy": means[1]}


def find_ends(batch: Batch) -> jax.Array:
    """Return whether each token is the last one of its document, bool [B, S]."""
    ids = batch.segment_ids
    return (ids > 0) & (ids != jnp.pad(ids[:, 1:], ((0, 0), (0, 1))))


def _report(values: tuple[jax.Array, ...], counts: jax.Array, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what `Objective.compute` does, of values [B, S] where `counts`, [B, S]. The first one is the loss."""
    sums = jnp.stack([jnp.sum(jnp.where(counts, each, 0.0)) for each in values])
    return loss_weight * sums[0], jax.lax.stop_gradient(sums)
