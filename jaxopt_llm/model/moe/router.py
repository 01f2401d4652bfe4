"""Routers: which experts a token goes to, with which weights, and the auxiliary losses.

Letters: B batch, S sequence, E experts, k experts per token.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxopt_llm.config import MoEConfig
from jaxopt_llm.parallel.placement import Placement

TINY = 1e-18  # a derivative divides by its square, which is still above 0 in float32


class Routing(NamedTuple):
    """Chosen experts of each token and their weights.

    experts: int32 [B, S, k].
    kept: bool [B, S, k], whether the expert takes the token; False for padding and for dropped choices.
    weights: float32 [B, S, k], 0 for choices that are not kept.
    scores: float32 [B, S, E], of all experts.
    """

    experts: jax.Array
    kept: jax.Array
    weights: jax.Array
    scores: jax.Array


def choose_experts(
    logits: jax.Array,
    bias: jax.Array | None,
    rows: jax.Array | None,
    token_mask: jax.Array | None,
    moe: MoEConfig,
    placement: Placement,
    expert_scale: jax.Array | None = None,
) -> Routing:
    """Choose the k experts with the best scores, and among equal scores the first expert. logits: float32 [B, S, E].

    softmax: Jiang et al. 2024, arXiv:2401.04088 (Mixtral); sigmoid: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2.

    bias: float32 [E], added to the scores for the choice but not for the weights; None: no bias.
    rows: int32 [B, S], the position of each token in its sequence, independent of the order on devices; None: no choice
        is dropped.
    token_mask: bool [B, S], False for padding; None: no padding. All padding would choose the same experts, which would
        drop choices of tokens, or exchange the padding in additional rounds.
    expert_scale: float32 [E], factor of each expert's weights; None: 1.
    """
    scores = jax.nn.softmax(logits) if moe.router == "softmax" else jax.nn.sigmoid(logits)
    experts = _top_experts(jax.lax.stop_gradient(scores), bias, moe, placement)
    # Not by indexing: XLA's partitioner aborts on look-ups in a region that is manual over `pipeline`.
    weights = jnp.sum(jnp.where(one_hot(experts, moe), scores[:, :, None], 0), axis=-1)
    if moe.router_renormalises:
        weights = normalise(weights)
    if expert_scale is not None:
        weights = weights * jnp.sum(jnp.where(one_hot(experts, moe), expert_scale, 0), axis=-1)
    kept = jnp.broadcast_to(True if token_mask is None else token_mask[..., None], experts.shape)
    if moe.capacity_factor and rows is not None:
        kept &= within_capacity(jnp.where(kept, experts, moe.experts), rows, moe, placement)
    return Routing(experts, kept, jnp.where(kept, weights * moe.router_scale, 0), scores)


def _top_experts(scores: jax.Array, bias: jax.Array | None, moe: MoEConfig, placement: Placement) -> jax.Array:
    """Return the chosen experts, int32 [B, S, k].

    Each device chooses for its own tokens in a manual region: where `tensor` does not divide the operand of top_k, XLA
    would gather all tokens of the mesh on every device.
    """

    def on_device(scores: jax.Array, bias: jax.Array | None) -> jax.Array:
        return jax.lax.top_k(_selection_scores(scores, bias, moe), moe.experts_per_token)[1]

    tokens = placement.activation("batch", "sequence").spec
    return placement.shard_map(on_device, (tokens, PartitionSpec()), tokens)(scores, bias)


def _selection_scores(scores: jax.Array, bias: jax.Array | None, moe: MoEConfig) -> jax.Array:
    """Return the scores by which experts are chosen, [B, S, E]: -inf for experts of groups that are not chosen.

    DeepSeek-AI 2024, arXiv:2405.04434, section 2.2.2, and arXiv:2412.19437, section 2.1.2.
    """
    biased = scores if bias is None else scores + bias
    if moe.router_groups == 1:
        return biased
    grouped = biased.reshape(*biased.shape[:2], moe.router_groups, -1)  # [B, S, groups, E of a group]
    group_scores = jnp.max(grouped, axis=-1)
    if moe.router == "sigmoid":
        group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, groups = jax.lax.top_k(group_scores, moe.router_groups_per_token)
    chosen = jnp.any(groups[..., None] == jnp.arange(moe.router_groups), axis=-2)
    return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(biased.shape)


def normalise(scores: jax.Array) -> jax.Array:
    """Divide scores by their sum; the sum of sigmoid scores can underflow to 0 in float32."""
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + TINY)


def one_hot(experts: jax.Array, moe: MoEConfig) -> jax.Array:
    """Return bool [B, S, k, E]. XLA fuses it into the sum that reads it, so that it is never in memory."""
    return experts[..., None] == jnp.arange(moe.experts)


def capacity(moe: MoEConfig, length: int) -> int:
    """Return the number of choices that an expert takes of a sequence of `length` tokens.

    Fedus et al. 2022, arXiv:2101.03961, section 2.2. The capacity is per sequence; in the paper it is per device batch.
    So no split of the batch changes which choices are dropped. A token chooses an expert at most once, so `length` is
    an upper bound.
    """
    return min(math.ceil(moe.capacity_factor * length * moe.experts_per_token / moe.experts), length)


def within_capacity(experts: jax.Array, rows: jax.Array, moe: MoEConfig, placement: Placement) -> jax.Array:
    """Return bool [B, S, k], True for the choices that their expert takes.

    In a sequence, all first choices come before all second choices (Lepikhin et al. 2021, arXiv:2006.16668, algorithm
    1), in the order of tokens.
    """
    devices = placement.size("context")

    def on_device(experts: jax.Array, rows: jax.Array) -> jax.Array:
        local_length = experts.shape[1]
        if devices > 1:
            experts, rows = jax.lax.all_gather((experts, rows), "context", axis=1, tiled=True)
        batch, length, count = experts.shape
        queue = experts.reshape(batch, -1)
        turn = (rows[..., None] + length * jnp.arange(count)).reshape(batch, -1)
        order = jnp.lexsort((turn, queue), axis=1)
        queue = jnp.take_along_axis(queue, order, axis=1)  # the queues of all experts, one after the other
        place = jnp.arange(queue.shape[1]) - jax.vmap(jnp.searchsorted)(queue, queue)
        place = jnp.take_along_axis(place, jnp.argsort(order, axis=1), axis=1).reshape(batch, length, count)
        first = jax.lax.axis_index("context") * local_length if devices > 1 else 0
        return jax.lax.dynamic_slice_in_dim(place, first, local_length, axis=1) < capacity(moe, length)

    tokens = placement.activation("batch", "sequence").spec
    return placement.shard_map(on_device, (tokens, tokens), tokens)(experts, rows)


def balance_loss(routing: Routing, loss_mask: jax.Array, moe: MoEConfig) -> jax.Array:
    """Return the load-balancing loss, float32, summed over tokens. An even load gives 1 per token.

    For each sequence, it is the number of tokens × E × the sum over experts of (share of choices × mean score): Fedus
    et al. 2022, arXiv:2101.03961, section 2.2; per sequence as in arXiv:2412.19437, equation 17.

    loss_mask: bool [B, S], the tokens that count.
    """
    tokens = jnp.sum(loss_mask, axis=1, dtype=jnp.float32)  # [B]
    loads = expert_loads(routing, loss_mask, moe)  # [B, E]
    scores, mask = normalise(routing.scores), loss_mask.astype(jnp.float32)
    mean = jnp.einsum("BSE,BS->BE", scores, mask, precision=jax.lax.Precision.HIGHEST)
    per_sequence = moe.experts * jnp.sum(loads * mean, axis=-1)
    return jnp.sum(per_sequence / jnp.maximum(tokens * moe.experts_per_token, 1))


def expert_loads(routing: Routing, loss_mask: jax.Array, moe: MoEConfig) -> jax.Array:
    """Count the choices of each expert, including dropped ones, float32 [B, E]."""
    return jnp.sum(one_hot(routing.experts, moe) & loss_mask[..., None, None], axis=(1, 2), dtype=jnp.float32)


@jax.custom_vjp
def bias_update_loss(bias: jax.Array, load: jax.Array) -> jax.Array:
    """Return 0, whose gradient with respect to the bias [E] is E × (load of each expert - mean load).

    The optimizer's step is by the sign of this gradient (Wang et al. 2024, arXiv:2408.15664, algorithm 1). The gradient
    ignores the factor of the loss: it consists of counts, which float32 sums exactly up to 2^24. So an even load has
    sign 0 for any split over microbatches and devices.

    load: float32 [E].
    """
    return jnp.zeros((), jnp.float32)


def _bias_update_loss_backward(load: jax.Array, d_loss: jax.Array) -> tuple[jax.Array, None]:
    # Stage slots of a pipeline that run without a microbatch have d_loss = 0 and must have no gradient.
    return jnp.where(d_loss == 0, 0, load.size * load - jnp.sum(load)), None


bias_update_loss.defvjp(lambda bias, load: (bias_update_loss(bias, load), load), _bias_update_loss_backward)


def z_loss(logits: jax.Array, loss_mask: jax.Array) -> jax.Array:
    """Return log(Z)² summed over the tokens that count (Zoph et al. 2022, arXiv:2202.08906, equation 5)."""
    return jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * loss_mask)
