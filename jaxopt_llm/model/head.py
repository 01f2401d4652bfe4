"""Head of a model: what an objective may ask of the logits, which exist only in chunks, or of the scores.

Letters: B batch, S sequence, D width, V vocabulary (padded), N scores.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.cross_entropy import Classifier
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.linear import vocabulary, weights
from jaxopt_llm.model.linear.weights import Weight
from jaxopt_llm.parallel.activations import to_device_order, to_sequence_order
from jaxopt_llm.parallel.placement import Placement


@dataclass(frozen=True)
class Head:
    """The head over one microbatch. Its methods take and return tokens in the order of the sequence.

    x: the head's input [B, S, D], in the order of the devices, with all positions of a device's sequence.
    table: [V, D]; of a model with scores, [N, D].
    """

    x: jax.Array
    table: Weight
    batch: Batch
    classifier: Classifier
    placement: Placement

    def cross_entropy(self, weights: jax.Array, loss_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return loss_weight × (cross-entropy with z-loss), and the cross-entropy without gradients: sums over tokens.

        weights: of the tokens, bool or float32 [B, S]. loss_weight: float32 scalar.
        """
        tokens = self._targets, to_device_order(weights, self.placement)
        return vocabulary.cross_entropy(self.x, self.table, tokens, loss_weight, self.classifier, self.placement)

    def log_probabilities(self) -> jax.Array:
        """Return the log-probability of each target, float32 [B, S], without gradients."""
        found = vocabulary.log_probabilities(self.x, self.table, self._targets, self.classifier, self.placement)
        return to_sequence_order(found, self.placement)

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
