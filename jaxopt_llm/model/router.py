"""Which experts a token goes to, and with which weights; what a router is taught beside the loss.

Letters: B batch, S sequence, E experts, k experts per token.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel.sharding import Placement

TINY = 1e-18  # whose square, by which a derivative divides, float32 still has


class Choice(NamedTuple):
    """experts: int32 [B, S, k]; kept: bool [B, S, k], whether the expert takes the token, which it does of no padding;
    weights: float32 [B, S, k], 0 where not; scores: float32 [B, S, E], of all."""

    experts: jax.Array
    kept: jax.Array
    weights: jax.Array
    scores: jax.Array


def choose(
    logits: jax.Array,
    bias: jax.Array | None,
    rows: jax.Array | None,
    real: jax.Array | None,
    config: ModelConfig,
    placement: Placement,
) -> Choice:
    """Of float32 logits [B, S, E] the k best scores, of equals the first expert's.

    softmax: Jiang et al. 2024, arXiv:2401.04088 (Mixtral); sigmoid: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2.
    bias: float32 [E], which the choice adds to the scores, not the weights; None for none.
    rows: int32 [B, S], the place of each token in its sequence, however that is dealt to devices; None where nothing is
        to be dropped.
    real: bool [B, S], where False is padding; None where there is none. All of it would choose the same experts: they
        would drop others' choices for it, or have it sent in rounds of its own.
    """
    scores = jax.nn.softmax(logits) if config.router == "softmax" else jax.nn.sigmoid(logits)
    experts = _best(jax.lax.stop_gradient(scores), bias, config, placement)
    # Not picked by their numbers: on look-ups in a region that is manual over `pipeline` XLA's partitioner aborts.
    weights = jnp.sum(jnp.where(_is(experts, config), scores[:, :, None], 0), axis=-1)
    if config.router_renormalises:
        weights = shares(weights)
    kept = jnp.broadcast_to(True if real is None else real[..., None], experts.shape)
    if config.expert_capacity and rows is not None:
        kept &= within_capacity(jnp.where(kept, experts, config.experts), rows, config, placement)
    return Choice(experts, kept, jnp.where(kept, weights * config.router_scale, 0), scores)


def _best(scores: jax.Array, bias: jax.Array | None, config: ModelConfig, placement: Placement) -> jax.Array:
    """The chosen experts, int32 [B, S, k]. On each device of its own tokens: where `tensor` divides none of a top_k's
    operand XLA would bring all tokens of the mesh to every device."""

    def on_device(scores: jax.Array, bias: jax.Array | None) -> jax.Array:
        return jax.lax.top_k(_merits(scores, bias, config), config.experts_per_token)[1]

    tokens = placement.activation("batch", "sequence").spec
    return placement.on_each_device(on_device, (tokens, PartitionSpec()), tokens)(scores, bias)


def _merits(scores: jax.Array, bias: jax.Array | None, config: ModelConfig) -> jax.Array:
    """What experts are chosen by, [B, S, E]: -inf in groups that are not (DeepSeek-AI 2024, arXiv:2405.04434, section
    2.2.2, and arXiv:2412.19437, section 2.1.2)."""
    merits = scores if bias is None else scores + bias
    if config.router_groups == 1:
        return merits
    grouped = merits.reshape(*merits.shape[:2], config.router_groups, -1)  # [B, S, groups, E of a group]
    of_groups = jnp.max(grouped, axis=-1)
    if config.router == "sigmoid":
        of_groups = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, groups = jax.lax.top_k(of_groups, config.router_groups_per_token)
    chosen = jnp.any(groups[..., None] == jnp.arange(config.router_groups), axis=-2)
    return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(merits.shape)


def shares(scores: jax.Array) -> jax.Array:
    """Of their sum, which of sigmoids can be 0 in float32."""
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + TINY)


def _is(experts: jax.Array, config: ModelConfig) -> jax.Array:
    """bool [B, S, k, E], which XLA forms within a sum and never whole."""
    return experts[..., None] == jnp.arange(config.experts)


def capacity(config: ModelConfig, length: int) -> int:
    """Choices that an expert takes of a sequence of so many tokens (Fedus et al. 2022, arXiv:2101.03961, section 2.2).

    Of the sequence, where the paper has it of a device's batch: no split of the batch changes what is dropped. A token
    chooses an expert once: none takes more of them than there are.
    """
    return min(math.ceil(config.expert_capacity * length * config.experts_per_token / config.experts), length)


def within_capacity(experts: jax.Array, rows: jax.Array, config: ModelConfig, placement: Placement) -> jax.Array:
    """bool [B, S, k]: a sequence's first choices come before all its second ones (Lepikhin et al. 2021,
    arXiv:2006.16668, algorithm 1), and in the order of tokens."""
    devices = placement.size("context")

    def on_device(experts: jax.Array, rows: jax.Array) -> jax.Array:
        own = experts.shape[1]
        if devices > 1:
            experts, rows = jax.lax.all_gather((experts, rows), "context", axis=1, tiled=True)
        batch, length, count = experts.shape
        queue = experts.reshape(batch, -1)
        turn = (rows[..., None] + length * jnp.arange(count)).reshape(batch, -1)
        order = jnp.lexsort((turn, queue), axis=1)
        queue = jnp.take_along_axis(queue, order, axis=1)  # for one expert after the other
        place = jnp.arange(queue.shape[1]) - jax.vmap(jnp.searchsorted)(queue, queue)
        place = jnp.take_along_axis(place, jnp.argsort(order, axis=1), axis=1).reshape(batch, length, count)
        first = jax.lax.axis_index("context") * own if devices > 1 else 0
        return jax.lax.dynamic_slice_in_dim(place, first, own, axis=1) < capacity(config, length)

    tokens = placement.activation("batch", "sequence").spec
    return placement.on_each_device(on_device, (tokens, tokens), tokens)(experts, rows)


def balance_loss(choice: Choice, counts: jax.Array, config: ModelConfig) -> jax.Array:
    """Summed over tokens, float32: of each sequence, times its tokens, E × the sum over experts of the share of choices
    and the mean score (Fedus et al. 2022, arXiv:2101.03961, section 2.2; of each sequence as in arXiv:2412.19437,
    equation 17). 1 a token where all is even. counts: bool [B, S], the tokens that count."""
    tokens = jnp.sum(counts, axis=1, dtype=jnp.float32)  # [B]
    chosen = loads(choice, counts, config)  # [B, E]
    mean = jnp.einsum("BSE,BS->BE", shares(choice.scores), counts.astype(jnp.float32))
    per_sequence = config.experts * jnp.sum(chosen * mean, axis=-1)
    return jnp.sum(per_sequence / jnp.maximum(tokens * config.experts_per_token, 1))


def loads(choice: Choice, counts: jax.Array, config: ModelConfig) -> jax.Array:
    """How many choices fall on each expert, what it drops among them, float32 [B, E]."""
    return jnp.sum(_is(choice.experts, config) & counts[..., None, None], axis=(1, 2), dtype=jnp.float32)


@jax.custom_vjp
def follow(bias: jax.Array, load: jax.Array) -> jax.Array:
    """0, from which a bias [E] has as its gradient how far the load [E] of each expert is above the mean, times E
    (Wang et al. 2024, arXiv:2408.15664, algorithm 1, whose steps are by its sign).

    Whatever the loss is multiplied by: the gradient is counts, which float32 sums exactly up to 2^24, so that a load
    that is even has sign 0 however microbatches and devices divide it.
    """
    return jnp.zeros((), jnp.float32)


def _follow_forward(bias: jax.Array, load: jax.Array) -> tuple[jax.Array, jax.Array]:
    return follow(bias, load), load


def _follow_backward(load: jax.Array, d_loss: jax.Array) -> tuple[jax.Array, None]:
    # Of what a pipeline runs to no avail there is no gradient.
    return jnp.where(d_loss == 0, 0, load.size * load - jnp.sum(load)), None


follow.defvjp(_follow_forward, _follow_backward)


def z_loss(logits: jax.Array, counts: jax.Array) -> jax.Array:
    """log(Z)² summed over the tokens that count (Zoph et al. 2022, arXiv:2202.08906, equation 5)."""
    return jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * counts)
