"""Which experts a token goes to, and with which weights; what a router is taught beside the loss.

Letters: B batch, S sequence, E experts, k experts per token.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxopt_llm.model.config import ModelConfig


class Choice(NamedTuple):
    """experts: int32 [B, S, k]; kept: bool [B, S, k], whether the expert takes the token; weights: float32 [B, S, k], 0
    where not; scores: float32 [B, S, E], of all."""

    experts: jax.Array
    kept: jax.Array
    weights: jax.Array
    scores: jax.Array


def choose(logits: jax.Array, config: ModelConfig) -> Choice:
    """Of float32 logits [B, S, E] the k best scores, of equals the first expert's.

    softmax: Jiang et al. 2024, arXiv:2401.04088 (Mixtral); sigmoid: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2.
    """
    scores = jax.nn.softmax(logits) if config.router == "softmax" else jax.nn.sigmoid(logits)
    weights, experts = jax.lax.top_k(scores, config.experts_per_token)
    if config.router_renormalises:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights * config.router_scale
    kept = _within_capacity(experts, config) if config.expert_capacity else jnp.ones(experts.shape, jnp.bool)
    return Choice(experts, kept, jnp.where(kept, weights, 0), scores)


def capacity(config: ModelConfig, length: int) -> int:
    """Choices that an expert takes of a sequence of so many tokens (Fedus et al. 2022, arXiv:2101.03961, section 2.2).

    Of the sequence, where the paper has it of a device's batch: no split of the batch changes what is dropped.
    """
    return math.ceil(config.expert_capacity * length * config.experts_per_token / config.experts)


def _within_capacity(experts: jax.Array, config: ModelConfig) -> jax.Array:
    """bool [B, S, k]: a sequence's first choices come before all its second ones (Lepikhin et al. 2021,
    arXiv:2006.16668, algorithm 1), and in the order of tokens."""
    batch, length, count = experts.shape
    queue = jnp.swapaxes(experts, 1, 2).reshape(batch, -1)  # [B, k S]
    order = jnp.argsort(queue, axis=1, stable=True)
    ordered = jnp.take_along_axis(queue, order, axis=1)
    first = jax.vmap(lambda row: jnp.searchsorted(row, row, side="left"))(ordered)
    place = jnp.arange(queue.shape[1]) - first  # in the queue for its expert
    place = jnp.take_along_axis(place, jnp.argsort(order, axis=1), axis=1)
    return jnp.swapaxes((place < capacity(config, length)).reshape(batch, count, length), 1, 2)


def balance_loss(choice: Choice, counts: jax.Array, config: ModelConfig) -> jax.Array:
    """Summed over tokens, float32: of each sequence, times its tokens, E × the sum over experts of the share of choices
    and the mean score (Fedus et al. 2022, arXiv:2101.03961, section 2.2; of each sequence as in arXiv:2412.19437,
    equation 17). 1 a token where all is even. counts: bool [B, S], the tokens that count."""
    tokens = jnp.sum(counts, axis=1, dtype=jnp.float32)  # [B]
    chosen = loads(choice, counts, config)  # [B, E]
    scores = choice.scores / jnp.sum(choice.scores, axis=-1, keepdims=True)
    mean = jnp.einsum("BSE,BS->BE", scores, counts.astype(jnp.float32))
    per_sequence = config.experts * jnp.sum(chosen * mean, axis=-1)
    return jnp.sum(per_sequence / jnp.maximum(tokens * config.experts_per_token, 1))


def loads(choice: Choice, counts: jax.Array, config: ModelConfig) -> jax.Array:
    """How many choices fall on each expert, what it drops among them, float32 [B, E]."""
    batch = choice.experts.shape[0]
    taken = jnp.where(counts[..., None], choice.experts, config.experts).reshape(batch, -1)
    rows = jnp.sort(taken, axis=1)
    ends = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(config.experts + 1), side="left"))(rows)
    return jnp.diff(ends, axis=1).astype(jnp.float32)


def z_loss(logits: jax.Array, counts: jax.Array) -> jax.Array:
    """log(Z)² summed over the tokens that count (Zoph et al. 2022, arXiv:2202.08906, equation 5)."""
    return jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * counts)
