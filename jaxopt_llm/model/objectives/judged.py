"""The objective over answers that are judged one by one: desirable ones and undesirable ones (kto).

A row of a batch holds pairs of documents. Documents 1, 3, 5, ... are judged: their label is 1 if the answer is
desirable, and 0 if not. Documents 2, 4, 6, ... are mismatched: the prompt of the document before, with the answer to
another prompt. In the formulas (Ethayarajh et al. 2024, arXiv:2402.01306), a and m are the sums of the
log-probabilities of the answers of a judged and of a mismatched document, and a' and m' those of the reference model:

    desirable    desirable_weight·(1 - σ(β·((a - a') - z)))
    undesirable  undesirable_weight·(1 - σ(β·(z - (a - a'))))
    z            max(0, mean of m - m'), without a gradient

The mean is over all mismatched documents of a microbatch, on all devices. It estimates the divergence of the model from
its reference.

Letters: B batch, S sequence.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxopt_llm.config.training import PreferenceConfig
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.head import Head
from jaxopt_llm.model.objectives import weigh_tokens
from jaxopt_llm.model.objectives.preference import count_pairs, find_pair_ends, sum_sides
from jaxopt_llm.parallel.zero import GROUP_AXIS

# What the objective reports, as sums over judged documents.
REPORTED = (
    "loss",
    "kl",
    "desirable",
    "rewards/chosen",
    "rewards/rejected",
    "log_probabilities/chosen",
    "log_probabilities/rejected",
)


@dataclass(frozen=True)
class Judged:
    """Kahneman-Tversky optimisation."""

    settings: PreferenceConfig
    needs_reference: ClassVar[bool] = True

    def count(self, batch: Batch) -> jax.Array:
        return count_pairs(batch)

    def compute(self, head: Head, batch: Batch, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = head.log_probabilities()
        divergence = estimate_divergence(found, batch, head.placement.in_gradient_group)
        weights, reported = weigh_tokens(self.sum_losses, found, batch, divergence)
        return head.cross_entropy(weights, loss_weight)[0], reported

    def name_metrics(self, means: Any) -> dict[str, Any]:
        """Return the metrics. Those of a kind of answers are 0 if there is no such answer."""
        named = dict(zip(REPORTED[1:], means[1:], strict=True))
        shares = {"chosen": (share := named.pop("desirable")), "rejected": 1 - share}
        for name in [each for each in named if "/" in each]:
            share = shares[name.partition("/")[2]]
            named[name] = jnp.where(share > 0, named[name] / jnp.where(share > 0, share, 1), 0.0)
        return named | {"rewards/margin": named["rewards/chosen"] - named["rewards/rejected"]}

    def sum_losses(
        self, log_probabilities: jax.Array, batch: Batch, divergence: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the objective and REPORTED, summed over judged documents.

        log_probabilities: of the targets, [B, S]. batch: fields [B, S]. divergence: z of the formulas, float32 scalar.
        """
        settings = self.settings
        assert batch.reference is not None and batch.labels is not None
        answer, _ = sum_sides(log_probabilities, batch)
        gain, _ = sum_sides(log_probabilities - batch.reference, batch)
        is_end, is_desirable = find_pair_ends(batch), batch.labels > 0.5
        margin = settings.beta * (gain - divergence)
        losses = jnp.where(
            is_desirable,
            settings.desirable_weight * jax.nn.sigmoid(-margin),
            settings.undesirable_weight * jax.nn.sigmoid(margin),
        )
        of_kinds = [
            jnp.where(kind, values, 0.0)
            for values in (settings.beta * gain, answer)
            for kind in (is_desirable, ~is_desirable)
        ]
        reported = losses, jnp.broadcast_to(divergence, losses.shape), is_desirable.astype(jnp.float32), *of_kinds
        sums = jnp.stack([jnp.sum(jnp.where(is_end, each, 0.0)) for each in reported])
        return sums[0], jax.lax.stop_gradient(sums)


def estimate_divergence(log_probabilities: jax.Array, batch: Batch, in_gradient_group: bool) -> jax.Array:
    """Return z of the formulas for a microbatch, float32 scalar without a gradient.

    Args:
        log_probabilities: of the targets, [B, S].
        batch: fields [B, S], those of one gradient group.
        in_gradient_group: whether a `vmap` over gradient groups is around. They have one z.
    """
    assert batch.reference is not None
    _, gain = sum_sides(jax.lax.stop_gradient(log_probabilities - batch.reference), batch)
    total, count = jnp.sum(jnp.where(find_pair_ends(batch), gain, 0.0)), count_pairs(batch)
    if in_gradient_group:
        total, count = jax.lax.psum((total, count), GROUP_AXIS)
    return jnp.maximum(total / jnp.maximum(count, 1), 0.0)
