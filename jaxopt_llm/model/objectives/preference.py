"""Objectives over pairs of answers to one prompt: a chosen one and a rejected one.

An objective is a function of the log-probabilities of the tokens, which the head computes in chunks. Its derivative
gives each token a weight, and the head's gradient is that of the cross-entropy with these weights. So no logits wait
for the sums of the documents: their chunks are computed twice.

A row of a batch holds whole pairs. Its documents 1, 3, 5, ... were chosen, and documents 2, 4, 6, ... rejected. In the
formulas, c and r are the sums of the log-probabilities of a chosen and of a rejected answer, c' and r' those of the
reference model, and |c| and |r| the numbers of tokens that count:

    dpo    -log σ(β·((c - c') - (r - r')))                            Rafailov et al. 2023, arXiv:2305.18290
    ipo    (((c - c')/|c| - (r - r')/|r|) - 1/(2β))²                  Azar et al. 2023, arXiv:2310.12036
    hinge  max(0, 1 - β·((c - c') - (r - r')))                        Zhao et al. 2023, arXiv:2305.10425
    cpo    -log σ(β·(c - r))                                          Xu et al. 2024, arXiv:2401.08417
    simpo  -log σ(β·(c/|c| - r/|r|) - margin)                         Meng et al. 2024, arXiv:2405.14734
    orpo   -β·log σ(log odds(c/|c|) - log odds(r/|r|)) - c/|c|        Hong et al. 2024, arXiv:2403.07691

The odds of a mean log-probability p are exp(p)/(1 - exp(p)). With `label_smoothing` ε, -log σ(h) is replaced by
-(1 - ε)·log σ(h) - ε·log σ(-h). `nll_weight`·(-c/|c|) is added to any of them.

Letters: B batch, S sequence.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.config.training import WITH_REFERENCE, PreferenceConfig
from jaxopt_llm.core.tree import Leaf
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.head import Head

BY_MEANS = ("simpo", "orpo")  # they compare log-probabilities per token
# What an objective reports, as sums over pairs.
REPORTED = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracy",
    "log_probabilities/chosen",
    "log_probabilities/rejected",
)


@dataclass(frozen=True)
class Preference:
    """An objective over pairs. name: one of the formulas above. settings: their numbers."""

    name: str
    settings: PreferenceConfig

    @property
    def needs_reference(self) -> bool:
        return self.name in WITH_REFERENCE

    def count(self, batch: Batch) -> jax.Array:
        return count_pairs(batch)

    def zero(self) -> jax.Array:
        return jnp.zeros(len(REPORTED), jnp.float32)

    def compute(self, head: Head, batch: Batch, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights, reported = self.weigh_tokens(head.log_probabilities(), batch)
        return head.cross_entropy(weights, loss_weight)[0], reported

    def name_metrics(self, means: Any) -> dict[str, Any]:
        named = dict(zip(REPORTED[1:], means[1:], strict=True))
        return named | {"rewards/margin": named["rewards/chosen"] - named["rewards/rejected"]}

    def weigh_tokens(self, log_probabilities: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return weights of the tokens' cross-entropy whose gradient is the objective's, and REPORTED, float32.

        log_probabilities: of the targets, [B, S]. batch: fields [B, S]; the weights are [B, S].
        """
        gradient, reported = jax.grad(self._compute, has_aux=True)(log_probabilities, batch)
        return -gradient, reported

    def _compute(self, log_probabilities: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return the objective and REPORTED, summed over pairs."""
        chosen, rejected = sum_sides(log_probabilities, batch)
        lengths = sum_sides(jnp.ones_like(log_probabilities), batch)
        means = chosen / jnp.maximum(lengths[0], 1), rejected / jnp.maximum(lengths[1], 1)
        if self.needs_reference:
            assert batch.reference is not None
            of_reference = sum_sides(batch.reference, batch)
        else:
            of_reference = jnp.zeros_like(chosen), jnp.zeros_like(rejected)
        gains = chosen - of_reference[0], rejected - of_reference[1]
        losses = self._lose(gains, means, lengths) - self.settings.nll_weight * means[0]
        rewards = tuple(self.settings.beta * each for each in (means if self.name in BY_MEANS else gains))
        reported = (losses, *rewards, (rewards[0] > rewards[1]).astype(jnp.float32), chosen, rejected)
        is_end = find_pair_ends(batch)
        sums = jnp.stack([jnp.sum(jnp.where(is_end, each, 0.0)) for each in reported])
        return sums[0], jax.lax.stop_gradient(sums)

    def _lose(self, gains: tuple[Leaf, Leaf], means: tuple[Leaf, Leaf], lengths: tuple[Leaf, Leaf]) -> jax.Array:
        """Return the loss of each pair; see the formulas. gains: c - c' and r - r'."""
        beta, smoothing = self.settings.beta, self.settings.label_smoothing
        if self.name == "ipo":
            chosen, rejected = (gain / jnp.maximum(length, 1) for gain, length in zip(gains, lengths, strict=True))
            return jnp.square(chosen - rejected - 1 / (2 * beta))
        margin = beta * (gains[0] - gains[1])
        if self.name == "hinge":
            return jax.nn.relu(1 - margin)
        scale, offset = 1.0, 0.0
        if self.name == "simpo":
            margin = beta * (means[0] - means[1]) - self.settings.margin
        if self.name == "orpo":
            # A mean of 0 is a probability of 1, whose odds are infinite.
            chosen, rejected = (mean - jnp.log1p(-jnp.exp(jnp.minimum(mean, -1e-6))) for mean in means)
            margin, scale, offset = chosen - rejected, beta, -means[0]
        of_sides = (1 - smoothing) * jax.nn.log_sigmoid(margin) + smoothing * jax.nn.log_sigmoid(-margin)
        return offset - scale * of_sides


def count_pairs(batch: Batch) -> jax.Array:
    """Return the number of pairs of documents in a batch, int32. batch: fields [..., S]."""
    return jnp.sum(jnp.max(batch.segment_ids, axis=-1) // 2)


def find_pair_ends(batch: Batch) -> jax.Array:
    """Return whether each token is the last one of its pair, bool [B, S]."""
    pair = (batch.segment_ids + 1) // 2
    return (pair > 0) & (pair != jnp.pad(pair[:, 1:], ((0, 0), (0, 1))))


def sum_sides(values: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the sums of counted tokens of the first and of the second document of a pair, at the pair's last token.

    values: float32 [B, S], as each result.
    """
    counted, is_first = jnp.where(batch.loss_mask, values, 0.0), batch.segment_ids % 2 == 1
    sides, pair = (jnp.where(is_first, counted, 0.0), jnp.where(is_first, 0.0, counted)), (batch.segment_ids + 1) // 2
    first, second = (sum_up_to(side, pair) for side in sides)
    return first, second


def sum_up_to(values: jax.Array, pair: jax.Array) -> jax.Array:
    """Return for each token the sum of the values of its pair up to it. values: float32 [B, S]; pair: int [B, S].

    Without gathers and scatters, which XLA does not divide inside the stages of a pipeline.
    """
    begins = pair != jnp.pad(pair[:, :-1], ((0, 0), (1, 0)))

    def join(before: tuple[Leaf, Leaf], after: tuple[Leaf, Leaf]) -> tuple[jax.Array, jax.Array]:
        return jnp.where(after[1], after[0], before[0] + after[0]), before[1] | after[1]

    return jax.lax.associative_scan(join, (values, begins), axis=1)[0]
