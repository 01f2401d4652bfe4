"""Cross-entropy that copes with a vocabulary split over devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(logits: jax.Array, targets: jax.Array, vocabulary_size: int) -> jax.Array:
    """-log softmax(logits)[target] for every token.

    logits: float32 [B, S, V], V padded; targets: int [B, S]. Columns from `vocabulary_size` on have probability 0.
    Returns float32 [B, S].

    Keeps the logits and each token's log-sum for the backward, and no second array of the logits' size.
    """
    return _forward(logits, targets, vocabulary_size)[0]


def _forward(logits: jax.Array, targets: jax.Array, vocabulary_size: int) -> tuple[jax.Array, Any]:
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # Where nothing is padded the comparison would still be computed, and on CPUs a second array of the logits' size.
    real = logits if logits.shape[-1] == vocabulary_size else jnp.where(column < vocabulary_size, logits, -jnp.inf)
    log_sum = jax.nn.logsumexp(real, axis=-1)
    # By comparison: a gather along a split dimension would bring the whole row to every device.
    label = jnp.sum(jnp.where(column == targets[..., None], logits, 0.0), axis=-1)
    return log_sum - label, (logits, targets, log_sum)


def _backward(vocabulary_size: int, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, log_sum = residuals
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    probability = jnp.where(column < vocabulary_size, jnp.exp(logits - log_sum[..., None]), 0.0)
    return gradient[..., None] * (probability - (column == targets[..., None])), None


cross_entropy.defvjp(_forward, _backward)
