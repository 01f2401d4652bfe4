"""Divergence between the next-token probabilities of two linear classifiers, by chunks of tokens (cross_entropy.py).

With p of the student, q of the teacher, and m = (1 - β)·p + β·q, the divergence of a token is

    β = 0      KL(q || p)                            forward
    β = 1      KL(p || q)                            reverse
    otherwise  β·KL(q || m) + (1 - β)·KL(p || m)     generalised Jensen-Shannon (Agarwal et al. 2023, arXiv:2306.13649)

Its gradient for the student's logits z, with z/T in the softmax, follows from both logits alone, so that the logits of
only one chunk exist, those of the teacher included:

    β = 0      (p - q) / T
    otherwise  c·p·(a - Σ p·a) / T     a = log p - log q, c = 1 at β = 1; else a = log p - log m, c = 1 - β

Of a teacher that has read the data before, only the log-probabilities of its K most likely tokens are known, and that
of all others together, the rest. The divergence is then the one between distributions over these K tokens and the rest.
It is 0 where the two agree on all of these, never larger than the divergence over all tokens, and equal to it if K is
the size of the vocabulary. To leave the rest out, and divide by the sum of the K probabilities, would teach a student
to be too certain (Anshumann et al. 2025, arXiv:2503.16870). The formulas above have the same values and gradients, if
the tokens of the rest get a q that is divided among them as the student divides its own probability:

    q = q(rest)·p / p(rest)

Letters: T tokens of a chunk, V rows of a table, D columns of a table, K tokens that are stored of each position.
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

    beta: β above. temperature: divides the logits of both; 1 with stored log-probabilities.
    next_token_weight: of the cross-entropy, which is added.
    teacher: the teacher's classifier. Classes that only one of the two has get no probability in either. Of stored
        log-probabilities only the size of the vocabulary is read.
    """

    beta: float
    temperature: float
    next_token_weight: float
    teacher: Classifier

    def count_classes(self, student: Classifier) -> int:
        """Return the number of classes that both have."""
        return min(student.vocabulary_size, self.teacher.vocabulary_size)


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
        is_class = _find_classes(column, settings.count_classes(classifier), axes)
        log_p, log_q = (
            _normalise(logits / settings.temperature, is_class, axes) for logits in (student.logits, of_teacher)
        )
        return cls(settings, student, log_p, log_q, axes)

    @classmethod
    def from_stored(
        cls,
        settings: Divergence,
        classifier: Classifier,
        xs: Arrays,
        tables: Arrays,
        tokens: Tokens,
        axes: tuple[str, ...],
    ) -> "DistilledChunk":
        """Return the loss of a chunk without a teacher.

        tokens: targets, the tokens that count, and of the teacher the ids [T, K] of its most likely tokens and the
            log-probabilities [T, K + 1] of these and of the rest.
        """
        targets, counts, ids, found = tokens
        student = Chunk.make(classifier, xs, tables, (targets, counts), axes)
        (rows, size), classes = student.logits.shape, settings.count_classes(classifier)
        first = jax.lax.axis_index(axes) * size
        is_class = _find_classes(first + jax.lax.broadcasted_iota(jnp.int32, (rows, size), 1), classes, axes)
        log_p = _normalise(student.logits, is_class, axes)
        # They were rounded when they were stored. Normalised again, they diverge from no equal ones.
        found = jnp.where(jnp.pad(ids, ((0, 0), (0, 1))) < classes, found.astype(jnp.float32), NEVER)
        found = jnp.maximum(jax.nn.log_softmax(jnp.maximum(found, NEVER), axis=-1), NEVER)
        is_local = (ids >= first) & (ids < first + size)
        place = jnp.arange(rows)[:, None], jnp.where(is_local, ids - first, size)
        stored = jnp.full((rows, size), -jnp.inf).at[place].set(found[:, :-1], mode="drop")
        of_rest = found[:, -1:] + _normalise(log_p, stored == -jnp.inf, axes)
        log_q = jnp.where(stored == -jnp.inf, of_rest, stored)
        log_q = log_q if is_class is None else jnp.where(is_class, log_q, NEVER)
        return cls(settings, student, log_p, jnp.maximum(log_q, NEVER), axes)

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


def _find_classes(column: jax.Array, classes: int, axes: tuple[str, ...]) -> jax.Array | None:
    """Return whether the column, int [T, V], of each logit has a class; None: all have."""
    return column < classes if classes < column.shape[1] * jax.lax.axis_size(axes) else None


def _normalise(logits: jax.Array, included: jax.Array | None, axes: tuple[str, ...]) -> jax.Array:
    """Return the log-probabilities of the columns that are included, and NEVER of the others, [T, V].

    included: None for all.
    """
    logits = logits if included is None else jnp.where(included, logits, NEVER)
    peak = jax.lax.pmax(jnp.max(logits, axis=-1, keepdims=True), axes)
    total = jax.lax.psum(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True), axes)
    return jnp.maximum(logits - peak - jnp.log(total), NEVER)
