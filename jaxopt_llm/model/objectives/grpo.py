"""The objective over groups of answers that the model drew itself: GRPO and its variants.

In the formulas, p is the log-probability of a token, q that by the sampler, and r that by the reference. A is the
advantage of the token's answer, n the number of tokens of the answer, and N the constant `max_new_tokens`:

    ratio   exp(p - q), or with level=sequence exp of the mean of p - q over the answer    GSPO, arXiv:2507.18071
    gain    min(min(ratio, max_ratio)·A, clip(ratio, 1 - epsilon, 1 + epsilon_high)·A)     DAPO, arXiv:2503.14476
    loss    -gain + beta·(exp(r - p) - (r - p) - 1)                                        GRPO, arXiv:2402.03300

The mean is over tokens (DAPO); over answers of the mean over their tokens (GRPO); or over answers of their sum over
tokens divided by N (Dr. GRPO, arXiv:2503.20783). As in preference.py, the derivative of the loss by the tokens'
log-probabilities weighs the head's cross-entropy, so that no logits wait for the sums of the answers.

Letters: B batch, S sequence.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.config.training import GrpoConfig
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.head import Head
from jaxopt_llm.model.objectives import weigh_tokens
from jaxopt_llm.model.objectives.preference import sum_up_to

# What is reported, as sums over tokens or answers. clipped: whether the gain of a token is clipped. kl: the divergence
# from the reference. sampler_kl: that of the sampler from the model. entropy: -p of what was drawn, which has the
# entropy as its mean.
REPORTED = ("loss", "clipped", "kl", "sampler_kl", "entropy")


@dataclass(frozen=True)
class Grpo:
    """The clipped gain of answers with their advantages, `Batch.labels`, against the sampler, `Batch.sampled`.

    max_new_tokens: N of the docstring above.
    """

    settings: GrpoConfig
    max_new_tokens: int

    @property
    def needs_reference(self) -> bool:
        return self.settings.beta > 0

    def count(self, batch: Batch) -> jax.Array:
        if self.settings.normalisation == "token":
            return jnp.sum(batch.loss_mask)
        return jnp.sum(jnp.max(batch.segment_ids, axis=-1))

    def compute(self, head: Head, batch: Batch, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights, reported = weigh_tokens(self.sum_losses, head.log_probabilities(), batch)
        return head.cross_entropy(weights, loss_weight)[0], reported

    def name_metrics(self, means: Any) -> dict[str, Any]:
        named = dict(zip(REPORTED[1:], means[1:], strict=True))
        return named if self.needs_reference else {name: value for name, value in named.items() if name != "kl"}

    def sum_losses(self, log_probabilities: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return the objective and REPORTED, summed over tokens or answers.

        log_probabilities: of the targets, [B, S]. batch: fields [B, S].
        """
        settings, counts = self.settings, batch.loss_mask
        lengths = jnp.maximum(_sum_answers(counts.astype(jnp.float32), batch), 1)
        change = jnp.where(counts, log_probabilities - batch.sampled, 0.0)
        ratio = jnp.exp(_sum_answers(change, batch) / lengths if settings.level == "sequence" else change)
        free = jnp.minimum(ratio, settings.max_ratio) * batch.labels
        clipped = jnp.clip(ratio, 1 - settings.epsilon, 1 + settings.epsilon_high) * batch.labels
        losses, kl = -jnp.minimum(free, clipped), jnp.zeros_like(change)
        if self.needs_reference:
            assert batch.reference is not None
            distance = jnp.where(counts, batch.reference - log_probabilities, 0.0)
            kl = jnp.expm1(distance) - distance
            losses += settings.beta * kl
        share = 1.0 if settings.normalisation == "token" else 1 / lengths  # of a token in what is reported
        of_loss = 1 / self.max_new_tokens if settings.normalisation == "constant" else share
        of_sampler = jnp.exp(change) - 1 - change
        reported = (clipped < free).astype(jnp.float32), kl, of_sampler, -log_probabilities
        sums = [jnp.sum(jnp.where(counts, share * each, 0.0)) for each in reported]
        loss = jnp.sum(jnp.where(counts, of_loss * losses, 0.0))
        return loss, jax.lax.stop_gradient(jnp.stack([loss, *sums]))


def _sum_answers(values: jax.Array, batch: Batch) -> jax.Array:
    """Return for each token the sum of the values of its document, float32 [B, S]."""
    before = sum_up_to(values, batch.segment_ids)
    after = jnp.flip(sum_up_to(jnp.flip(values, 1), jnp.flip(batch.segment_ids, 1)), 1)
    return before + after - values
