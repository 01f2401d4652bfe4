"""The objective of distillation: the divergence of the model's probabilities from those of a teacher.

kernels/divergence.py has the formulas. The teacher's logits come from the input of its head, `Batch.teacher`, and from
its table, which the head of the model reads too: the logits of both exist only in chunks.

Letters: B batch, S sequence.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.divergence import Divergence
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.head import Head

REPORTED = ("loss", "divergence", "next_token")  # sums over tokens


@dataclass(frozen=True)
class Distillation:
    """The divergence from a teacher at each token, and a part of the next token's cross-entropy."""

    settings: Divergence
    needs_reference: ClassVar[bool] = False

    def count(self, batch: Batch) -> jax.Array:
        return jnp.sum(batch.loss_mask)

    def compute(self, head: Head, batch: Batch, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        objective, divergence, cross_entropy = head.divergence(self.settings, batch.loss_mask, loss_weight)
        loss = divergence + self.settings.next_token_weight * cross_entropy
        return objective, jnp.stack([loss, divergence, cross_entropy])

    def name_metrics(self, means: Any) -> dict[str, Any]:
        return dict(zip(REPORTED[1:], means[1:], strict=True))
