"""Divergence between the next-token probabilities of two linear classifiers, by chunks of tokens (cross_entropy.py).

With p of the student, q of the teacher, and m = (1 - β)·p + β·q, the divergence of a token is

    β = 0      KL(q || p)                            forward
    β = 1      KL(p || q)                            reverse
    otherwise  β·KL(q || m) + (1 - β)·KL(p || m)     generalised Jensen-Shannon (Agarwal et al. 2023, arXiv:2306.13649)

Its gradient for the student's logits z, with z/T in the softmax, follows from both logits alone, so that the logits of
only one chunk exist, those of the teacher included:

    β = 0      (p - q) / T
    otherwise  c·p·(a - Σ p·a) / T     a = log p - log q, c = 1 at β = 1; else a = log p - log m, c = 1 - β

Letters: T tokens of a chunk, V rows of a table, D columns of a table.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.cross_entropy import Arrays, Chunk, Classifier, Losses, Tokens, form_logits, weigh

# Logit of a class without probability. It is finite, so that its logarithms differ by 0 and not by NaN.
NEVER = -1e30


@dataclass(frozen=True)
class Divergence:
    """Settings of the divergence.

    beta: β above. temperature: divides the logits of both.
    next_token_weight: of the cross-entropy, which is added.
    teacher: the teacher's classifier. Classes that only one of the two has get no probability in either.
    """

    beta: float
    temperature: float
    next_token_weight: float
    teacher: Classifier


@dataclass(frozen=True)
class DistilledChunk:
    """Divergence and cross-entropy of one chunk of tokens."""

    settings: Divergence
    student: Chunk
    log_p: jax.Array  # [T, V], NEVER in columns without probability
    log_q: jax.Array  # [T, V]
    axes: tuple[str, ...]

    @classmethod
    def make(
        cls,
        settings: Divergence,
        teacher_table: jax.Array,
        classifier: Classifier,
        xs: Arrays,
        tables: Arrays,
        tokens: Tokens,
        axes: tuple[str, ...],
    ) -> "DistilledChunk":
        """Return the loss of a chunk. tokens: targets, the tokens that count, and the teacher's input [T, D]."""
        targets, counts, teacher_x = tokens
        student = Chunk.make(classifier, xs, tables, (targets, counts), axes)
        of_teacher, column = form_logits(settings.teacher, (teacher_x,), (teacher_table,), axes)
        classes = min(classifier.vocabulary_size, settings.teacher.vocabulary_size)
        has_padding = classes < of_teacher.shape[-1] * jax.lax.axis_size(axes)

        def normalise(logits: jax.Array) -> jax.Array:
            logits = logits / settings.temperature
            logits = jnp.where(column < classes, logits, NEVER) if has_padding else logits
            peak = jax.lax.pmax(jnp.max(logits, axis=-1, keepdims=True), axes)
            total = jax.lax.psum(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True), axes)
            return jnp.maximum(logits - peak - jnp.log(total), NEVER)

        return cls(settings, student, normalise(student.logits), normalise(of_teacher), axes)

    @property
    def losses(self) -> Losses:
        """Objective, divergence and cross-entropy."""
        beta, p, q = self.settings.beta, jnp.exp(self.log_p), jnp.exp(self.log_q)
        of_class = p * self._difference if beta else -q * self._difference
        if 0 < beta < 1:
            of_class = (1 - beta) * of_class + beta * q * (self.log_q - self._log_mixture)
        divergence = weigh(self.student.counts, jax.lax.psum(jnp.sum(of_class, axis=-1), self.axes))
        cross_entropy = self.student.losses[1]
        return divergence + self.settings.next_token_weight * cross_entropy, divergence, cross_entropy

    def gradient(self, loss_weight: jax.Array) -> jax.Array:
        beta, p = self.settings.beta, jnp.exp(self.log_p)
        if beta == 0:
            gradient = p - jnp.exp(self.log_q)
        else:
            mean = jax.lax.psum(jnp.sum(p * self._difference, axis=-1, keepdims=True), self.axes)
            gradient = (1.0 if beta == 1 else 1 - beta) * p * (self._difference - mean)
        gradient *= weigh(self.student.counts, loss_weight / self.settings.temperature)[:, None]
        if weight := self.settings.next_token_weight:
            gradient += self.student.capped_gradient(loss_weight * weight)
        return self.student.before_softcap(gradient)

    @property
    def _difference(self) -> jax.Array:
        """The difference log p - log q for the two KL divergences, otherwise log p - log m, [T, V]."""
        return self.log_p - (self._log_mixture if 0 < self.settings.beta < 1 else self.log_q)

    @property
    def _log_mixture(self) -> jax.Array:
        beta = self.settings.beta
        return jnp.logaddexp(self.log_p + math.log1p(-beta), self.log_q + math.log(beta))
