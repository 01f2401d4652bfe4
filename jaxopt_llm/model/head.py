"""Head of a model: what an objective may ask of the logits, which exist only in chunks, or of the scores.

Letters: B batch, S sequence, D width, V vocabulary (padded), N scores.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.cross_entropy import Classifier
from jaxopt_llm.kernels.divergence import Divergence
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.linear import vocabulary, weights
from jaxopt_llm.model.linear.weights import Weight
from jaxopt_llm.parallel.activations import all_gather_sequence, to_device_order, to_sequence_order
from jaxopt_llm.parallel.placement import Placement


@dataclass(frozen=True)
class Head:
    """The head over one microbatch. Its methods take and return tokens in the order of the sequence.

    x: the head's input [B, S, D], in the order of the devices, with all positions of a device's sequence.
    table: [V, D]; of a model with scores, [N, D]. teacher_table: of the teacher, with its own D; None without one on
        the devices.
    """

    x: jax.Array
    table: Weight
    batch: Batch
    classifier: Classifier
    placement: Placement
    teacher_table: Weight | None = None

    def cross_entropy(self, weights: jax.Array, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return loss_weight × (cross-entropy with z-loss), and the cross-entropy without gradients: sums over tokens.

        weights: of the tokens, bool or float32 [B, S]. loss_weight: float32 scalar.
        """
        tokens = self._targets, to_device_order(weights, self.placement)
        objective, loss = vocabulary.cross_entropy(
            self.x, self.table, tokens, loss_weight, self.classifier, self.placement
        )
        return objective, loss

    def divergence(
        self, settings: Divergence, weights: jax.Array, loss_weight: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return loss_weight × (divergence with a part of the cross-entropy), the divergence and the cross-entropy.

        They are sums over tokens. Only the first has gradients. Arguments as in `cross_entropy`.
        """
        tokens = self._targets, to_device_order(weights, self.placement)
        teacher: vocabulary.TeacherOperands
        if self.teacher_table is None:
            stored = self.batch.teacher_ids, self.batch.teacher_log_probabilities
            ids, log_probabilities = (to_device_order(each, self.placement) for each in stored)
            teacher = vocabulary.StoredLogProbabilities(ids, log_probabilities, settings)
        else:  # its input rests as the residual stream, already in the order of the devices
            x = all_gather_sequence(self.batch.teacher, self.placement)
            teacher = vocabulary.TeacherLogits(x, self.teacher_table, settings)
        objective, divergence, cross_entropy = vocabulary.cross_entropy(
            self.x, self.table, tokens, loss_weight, self.classifier, self.placement, teacher
        )
        return objective, divergence, cross_entropy

    def log_probabilities(self) -> jax.Array:
        """Return the log-probability of each target, float32 [B, S], without gradients."""
        return self.read_targets()[0]

    def read_targets(self) -> tuple[jax.Array, jax.Array]:
        """Return the log-probability of each target, and whether no token is more likely, [B, S], without gradients."""
        found, is_best = vocabulary.read_targets(self.x, self.table, self._targets, self.classifier, self.placement)
        return to_sequence_order(found, self.placement), to_sequence_order(is_best, self.placement)

    def read_most_likely(self, count: int) -> tuple[jax.Array, jax.Array]:
        """Return the most likely next tokens, int32 [B, S, K], and log-probabilities, float32 [B, S, K + 1].

        The last one is that of all other tokens together. They have no gradients.
        """
        found = vocabulary.read_most_likely(self.x, self.table, count, self.classifier, self.placement)
        ids, log_probabilities = (to_sequence_order(each, self.placement) for each in found)
        return ids, log_probabilities

    def scores(self) -> jax.Array:
        """Return the scores of each token, float32 [B, S, N].

        Every stage of a pipeline computes all of them, and the executor adds up the gradients of the stages. So each
        gives its share of the gradient.
        """
        found = weights.einsum("BSD,ND->BSN", self.x, self.table, jnp.dtype(jnp.float32))
        if (stages := self.placement.size("pipeline")) > 1:
            share = found / stages
            found = jax.lax.stop_gradient(found) + (share - jax.lax.stop_gradient(share))
        return to_sequence_order(found, self.placement)

    @property
    def _targets(self) -> jax.Array:
        return to_device_order(self.batch.targets, self.placement)
