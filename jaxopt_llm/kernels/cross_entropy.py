"""Cross-entropy of a linear classifier by chunks of tokens, with its gradients computed in the forward pass.

The logits of only one chunk exist at a time. The gradient of the logits needs nothing but the logits. So the forward
pass computes it immediately, and with it the gradients of the classifier and its input. Only these two are kept for the
backward (Hsu et al. 2024, arXiv:2410.10989).

Letters: B batch, S sequence, T tokens of a chunk, V rows of a table, D columns of a table.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels import products

# Targets, int [B, S]; the tokens that count: bool, or float32 weights, [B, S]; what else a loss reads of each token.
Tokens = tuple[jax.Array, ...]
# Objective and what is reported, such as the cross-entropy: float32 [B, S], times the tokens' weights; 0 for tokens
# that do not count.
Losses = tuple[jax.Array, ...]
Arrays = Sequence[jax.Array]  # an input or a table each


@dataclass(frozen=True)
class Classifier:
    """Settings of the classifier and its loss.

    vocabulary_size: number of classes; the further rows of the tables are padding, with probability 0.
    softcap: bound of the logits, applied as softcap × tanh(logit / softcap); 0 does not bound them.
    z_loss: coefficient of log(Z)², where Z is the softmax sum, added to the cross-entropy in the objective (Chowdhery
        et al. 2022, arXiv:2204.02311).
    chunk: number of tokens whose logits exist at a time; 0: all tokens.
    on_one_cpu: whether the products run on one CPU device (products.py).
    """

    vocabulary_size: int
    softcap: float
    z_loss: float
    chunk: int
    on_one_cpu: bool = False


class Loss(Protocol):
    """The loss of one chunk of tokens."""

    @property
    def losses(self) -> Losses:
        """Objective and what is reported, each [T]."""

    def gradient(self, loss_weight: jax.Array) -> jax.Array:
        """Return the gradient of loss_weight × objective for the logits before the soft-cap, float32 [T, V]."""


# (classifier, xs, tables, tokens, axes) of a chunk -> its loss
MakeLoss = Callable[[Classifier, Arrays, Arrays, Tokens, tuple[str, ...]], Loss]


def compute_losses(
    classifier: Classifier,
    xs: Arrays,
    tables: Arrays,
    tokens: Tokens,
    axes: tuple[str, ...] = (),
    make_loss: MakeLoss | None = None,
) -> Losses:
    """Compute the objective and what is reported. The logits are the sum of the matmuls of each x with its table.

    xs: [B, S, D], each with its own D; tables: [V, D].
    axes: mesh axes that split the rows of the tables; empty if they are not split.
    make_loss: the loss of a chunk; by default the cross-entropy, which is also what is reported.
    """
    make_loss = make_loss or Chunk.make

    def chunk(_: None, arrays: Any) -> tuple[None, Losses]:
        xs, tokens = arrays
        return None, make_loss(classifier, xs, tables, tokens, axes).losses

    _, losses = _scan_chunks(classifier.chunk, chunk, None, (tuple(xs), tokens))
    return losses


def read_targets(
    classifier: Classifier, xs: Arrays, tables: Arrays, targets: jax.Array, axes: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each target, float32 [B, S], and whether no token is more likely, bool [B, S].

    Arguments as in `compute_losses`; targets: int [B, S].
    """

    def chunk(_: None, arrays: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        xs, targets = arrays
        part = Chunk.make(classifier, xs, tables, (targets, jnp.ones(targets.shape, jnp.bool)), axes)
        return None, (part.label_logit - part.log_sum, part.label_logit >= part.peak)

    _, scores = _scan_chunks(classifier.chunk, chunk, None, (tuple(xs), targets))
    return scores


def read_most_likely(
    classifier: Classifier, xs: Arrays, tables: Arrays, count: int, axes: tuple[str, ...] = ()
) -> tuple[jax.Array, jax.Array]:
    """Return the most likely classes, the largest first, their log-probabilities, and that of all others together.

    Arguments as in `compute_losses`; count: K, at most the size of the vocabulary.

    Returns:
        The classes, int32 [B, S, K], and the log-probabilities, float32 [B, S, K + 1].
    """

    def chunk(_: None, xs: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        logits, column = form_logits(classifier, xs, tables, axes)
        size = logits.shape[1]
        largest, place = jax.lax.top_k(logits, min(count, size))  # of this device's rows of the tables
        ids = jnp.take_along_axis(column, place, axis=1)
        if axes:
            largest, ids = (jax.lax.all_gather(each, axes, axis=1, tiled=True) for each in (largest, ids))
            largest, place = jax.lax.top_k(largest, count)
            ids = jnp.take_along_axis(ids, place, axis=1)
        # Not as 1 - Σ: most of the rest would be lost to rounding.
        first = column[:, :1]
        is_local = (ids >= first) & (ids < first + size)
        is_rest = jnp.ones(logits.shape, jnp.bool)
        is_rest = is_rest.at[jnp.arange(len(ids))[:, None], jnp.where(is_local, ids - first, size)].set(
            False, mode="drop"
        )
        peak = largest[:, :1]
        rest = jax.lax.psum(jnp.sum(jnp.where(is_rest, jnp.exp(logits - peak), 0.0), axis=1, keepdims=True), axes)
        shifted = jnp.concatenate([largest - peak, jnp.log(rest)], axis=1)
        return None, (ids, shifted - jax.nn.logsumexp(shifted, axis=1, keepdims=True))

    _, found = _scan_chunks(classifier.chunk, chunk, None, tuple(xs))
    return found


def compute_losses_and_gradients(
    classifier: Classifier,
    xs: Arrays,
    tables: Arrays,
    needs_gradient: Sequence[bool],
    tokens: Tokens,
    loss_weight: jax.Array,
    axes: tuple[str, ...] = (),
    make_loss: MakeLoss | None = None,
) -> tuple[Losses, tuple[jax.Array, ...], tuple[jax.Array | None, ...]]:
    """Compute the losses and the gradients of loss_weight × the sum of the objective.

    Arguments as in `compute_losses`; needs_gradient: of each table.

    Returns:
        The losses; the gradients of the xs, in their dtypes; and the gradients of the tables, float32, None for a table
        that needs none. The gradients of the xs are the contribution of this device's rows of the tables.
    """
    make_loss = make_loss or Chunk.make

    def chunk(totals: Any, arrays: Any) -> Any:
        xs, tokens = arrays
        part = make_loss(classifier, xs, tables, tokens, axes)
        gradient = part.gradient(loss_weight).astype(xs[0].dtype)
        d_xs = tuple(
            products.einsum("TV,VD->TD", gradient, table, table.dtype, classifier.on_one_cpu) for table in tables
        )
        totals = tuple(
            None if total is None else total + products.sum_over_rows(gradient, x, jnp.float32, classifier.on_one_cpu)
            for total, x in zip(totals, xs, strict=True)
        )
        return totals, (part.losses, d_xs)

    zeros = tuple(
        jnp.zeros(table.shape, jnp.float32) if needed else None
        for table, needed in zip(tables, needs_gradient, strict=True)
    )
    d_tables, (losses, d_xs) = _scan_chunks(classifier.chunk, chunk, zeros, (tuple(xs), tokens))
    return losses, d_xs, d_tables


def form_logits(
    classifier: Classifier, xs: Arrays, tables: Arrays, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return the logits of a chunk, float32 [T, V], -inf in columns of padding; and the index of each column."""
    terms = (
        jnp.einsum("TD,VD->TV", x, table, preferred_element_type=jnp.float32)
        for x, table in zip(xs, tables, strict=True)
    )
    logits = functools.reduce(operator.add, terms)
    if classifier.softcap:
        logits = classifier.softcap * jnp.tanh(logits / classifier.softcap)
    first = jax.lax.axis_index(axes) * logits.shape[-1]
    column = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    # Without padding, XLA would still compute the comparison.
    if classifier.vocabulary_size < logits.shape[-1] * jax.lax.axis_size(axes):
        logits = jnp.where(column < classifier.vocabulary_size, logits, -jnp.inf)
    return logits, column


def weigh(counts: jax.Array, values: jax.Array) -> jax.Array:
    """Return values of tokens times their weights. The value of a token that does not count may be anything.

    counts: bool, or float32 weights.
    """
    if counts.dtype == jnp.bool:
        return jnp.where(counts, values, 0.0)
    return jnp.where(counts != 0, counts * values, 0.0)


@dataclass(frozen=True)
class Chunk:
    """Logits and cross-entropy of one chunk of tokens."""

    classifier: Classifier
    logits: jax.Array  # [T, V], -inf in columns of padding
    is_label: jax.Array  # bool [T, V]
    counts: jax.Array  # [T], tokens that count, bool or float32 weights
    peak: jax.Array  # [T], largest logit of the whole vocabulary
    log_sum: jax.Array  # [T], log of the softmax sum over the whole vocabulary
    label_logit: jax.Array  # [T]

    @classmethod
    def make(cls, classifier: Classifier, xs: Arrays, tables: Arrays, tokens: Tokens, axes: tuple[str, ...]) -> "Chunk":
        targets, counts = tokens
        logits, column = form_logits(classifier, xs, tables, axes)
        # By comparison: with a gather, every device would ask for columns of other devices.
        is_label = column == targets[:, None]
        peak = jax.lax.pmax(jnp.max(logits, axis=-1), axes)
        sums = jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1), jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
        total, label_logit = jax.lax.psum(sums, axes)
        return cls(classifier, logits, is_label, counts, peak, peak + jnp.log(total), label_logit)

    @property
    def losses(self) -> Losses:
        loss = self.log_sum - self.label_logit
        objective = loss + self.classifier.z_loss * jnp.square(self.log_sum) if self.classifier.z_loss else loss
        return weigh(self.counts, objective), weigh(self.counts, loss)

    def gradient(self, loss_weight: jax.Array) -> jax.Array:
        """Return the gradient of loss_weight × objective for the logits before the soft-cap, float32 [T, V]."""
        return self.before_softcap(self.capped_gradient(loss_weight))

    def capped_gradient(self, loss_weight: jax.Array) -> jax.Array:
        """Return the gradient of loss_weight × objective for the logits, float32 [T, V]."""
        d_loss = weigh(self.counts, loss_weight)
        d_log_sum = d_loss * (1 + 2 * self.classifier.z_loss * self.log_sum)
        gradient = d_log_sum[:, None] * jnp.exp(self.logits - self.log_sum[:, None])
        return gradient - jnp.where(self.is_label, d_loss[:, None], 0.0)

    def before_softcap(self, gradient: jax.Array) -> jax.Array:
        """Return the gradient for the logits before the soft-cap, of that for the logits; both [T, V]."""
        if not self.classifier.softcap:
            return gradient
        slope = 1 - jnp.square(self.logits / self.classifier.softcap)
        return gradient * jnp.maximum(slope, 0.0)  # in columns of padding the slope is -inf


def _scan_chunks(size: int, chunk: Any, carry: Any, arrays: Any) -> tuple[Any, Any]:
    """Run `lax.scan` over arrays [B, S, ...] by chunks of `size` tokens: chunk(carry, [T, ...]) -> (carry, [T, ...]).

    The last chunk is padded with zeros, which are tokens that do not count.
    """
    batch, sequence = jax.tree.leaves(arrays)[0].shape[:2]
    tokens = batch * sequence
    chunks = -(-tokens // size) if size else 1
    rows = -(-tokens // chunks)

    def split(x: jax.Array) -> jax.Array:
        flat = x.reshape(tokens, *x.shape[2:])
        if chunks * rows > tokens:
            flat = jnp.pad(flat, [(0, chunks * rows - tokens)] + [(0, 0)] * (flat.ndim - 1))
        return flat.reshape(chunks, rows, *x.shape[2:])

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])[:tokens].reshape(batch, sequence, *x.shape[2:])

    split_arrays = jax.tree.map(split, arrays)
    carry, outputs = jax.lax.scan(chunk, carry, split_arrays)
    return carry, jax.tree.map(join, outputs)
