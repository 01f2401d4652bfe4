"""MoE layer: for each token a router chooses some of many MLPs (experts).

Every device has the rows of its own experts, sorted by expert, and multiplies them in one grouped matmul. Only the
router's capacity drops choices. exchange.py dispatches rows to the experts' devices and combines the results.

Letters: B batch, S sequence, D width, E experts, k experts per token, R rows of a device.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import ModelConfig, MoEConfig
from jaxopt_llm.core.metric import Max
from jaxopt_llm.kernels.grouped_matmul import IMPLEMENTATIONS, ONE_BY_ONE, Implementation, OneByOne
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.layers import (
    ACTIVATIONS,
    INPUT_PROJECTIONS,
    Function,
    mlp,
    mlp_specs,
    recomputed,
    with_biases,
)
from jaxopt_llm.model.linear import weights
from jaxopt_llm.model.linear.weights import Weight
from jaxopt_llm.model.model import AUXILIARY_LOSS, Sums
from jaxopt_llm.model.moe import exchange
from jaxopt_llm.model.moe.dispatch_plan import DispatchPlan
from jaxopt_llm.model.moe.exchange import combine, dispatch, dispatch_weights
from jaxopt_llm.model.param import ParamSpec, normal, zeros
from jaxopt_llm.parallel.activations import to_residual_order, to_token_order
from jaxopt_llm.parallel.placement import Placement, constrain, mark

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


SHARED = "shared_"  # start of the names of the shared expert's projections
HIGHEST = jax.lax.Precision.HIGHEST  # for the router's matmul: a choice near a tie must not depend on the device


def moe_specs(config: ModelConfig, residual_scale: float) -> dict[str, ParamSpec]:
    count, width, inner = config.moe.experts, config.width, config.moe.expert_width
    inward = ParamSpec((count, width, inner), ("experts", "embed", "expert_mlp"), (1,), normal())
    outward = ParamSpec((count, inner, width), ("experts", "expert_mlp", "embed"), (1,), normal(residual_scale))
    # Exact: all steps of the bias have the same small size, and 16 bits would lose some of them.
    load_bias = ParamSpec((count,), (None,), init=zeros, exact=True, sign_rate=config.moe.router_bias_rate)
    biased = config.biases in ("mlp", "all")

    def router_spec(outputs: int) -> ParamSpec:
        # A router has no contracting dimension, so that it is never adapted or quantised, and not a matrix for Muon. If
        # it were rounded in some ZeRO stages only, a token near a tie would go to other experts there.
        return ParamSpec((width, outputs), ("embed", None), (), normal(width**-0.5), exact=True)

    specs = {
        "router": router_spec(count),
        **({"logit_bias": ParamSpec((count,), (None,), init=zeros, exact=True)} if biased else {}),
        **({"router_bias": load_bias} if config.moe.router_bias else {}),
        **({"expert_scale": ParamSpec((count,), (None,))} if config.moe.expert_scales else {}),
        **({"gate": inward} if config.has_gate else {}),
        "up": inward,
        "down": outward,
    }
    if biased:
        specs = with_biases(specs, *(name for name in (*INPUT_PROJECTIONS, "down") if name in specs))
    if shared_width := config.moe.shared_expert_width:
        shared = mlp_specs(width, shared_width, residual_scale, has_gate=config.has_gate, biased=biased)
        specs |= {f"{SHARED}{name}": spec for name, spec in shared.items()}
        specs |= {"router_of_shared": router_spec(1)} if config.moe.shared_expert_gate else {}
    return specs


class Norms(NamedTuple):
    """Norms of the parts of an MoE layer.

    experts, shared: of the inputs of the experts and of the shared expert. experts_post, shared_post: of their outputs.
    router: of the router's input, with `moe.own_norms`; None: the router reads the experts' input.
    """

    experts: Function
    experts_post: Function
    shared: Function
    shared_post: Function
    router: Function | None


def moe_layer(
    params: dict[str, Weight],
    x: jax.Array,
    context: Context,
    layer: jax.Array,
    *,
    norms: Norms,
    config: ModelConfig,
    products: str,
) -> tuple[jax.Array, Sums]:
    """Apply the MoE layer. x: [B, S, D] -> [B, S, D].

    layer: int32, index of the layer. products: implementation of the grouped matmul (kernels/grouped_matmul.py), or
        `ONE_BY_ONE`.
    """
    placement = context.placement
    kernel = OneByOne() if products == ONE_BY_ONE else IMPLEMENTATIONS[products]

    @recomputed
    def compute_logits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        read = None if norms.router is None else norms.router(x).astype(jnp.float32) * config.width**-0.5
        x = mark(norms.experts(x), "mlp_input", "input", "batch", "residual_sequence", "embed")
        logits = _project_to_router(params, x if read is None else read, "router", placement)
        logits = to_token_order(logits, placement)
        return x, constrain(placement, logits, "router_logits", "routing", "batch", "sequence", None)

    normed, logits = compute_logits(x)
    bias, scale = (
        weights.materialise(params[name], jnp.dtype(jnp.float32)) if name in params else None
        for name in ("router_bias", "expert_scale")
    )
    # The last key that a token sees is its own row. Generation drops nothing: otherwise the answer to a prompt would
    # depend on the other prompts of the batch.
    rows = None if context.loss_mask is None else context.key_ranges.last
    routing = choose_experts(logits, bias, rows, context.token_mask, config.moe, placement, scale)
    placed = Routing(*(to_residual_order(each, placement) for each in routing))
    experts = jnp.where(placed.kept, placed.experts, config.moe.experts)
    matrices = {name: params[name] for name in ("gate", "gate_bias", "up", "up_bias", "down") if name in params}
    inputs = (normed, placed.weights)
    run = functools.partial(_apply_experts, kernel, placement, config)
    y, rounds = exchange.run_experts(run, experts, rows is None, matrices, inputs, config.moe, placement)
    if "down_bias" in params:
        y = _add_output_biases(y, params["down_bias"], placed, config, placement)
    y = norms.experts_post(y)
    if config.moe.shared_expert_width:
        y = y + _apply_shared_expert(params, x, normed, context, norms, config)
    y = mark(y, "mlp_output", "product", "batch", "residual_sequence", "embed")
    return y, _make_sums(routing, logits, bias, rounds, context, layer, config)


def _apply_experts(
    kernel: Implementation | OneByOne,
    placement: Placement,
    config: ModelConfig,
    matrices: dict[str, Weight],
    x: jax.Array,
    choice_weights: jax.Array,
    plan: DispatchPlan,
) -> jax.Array:
    """Return the weighted sum of the experts' outputs, [B, S, D], for the choices of a plan, from x [B, S, D]."""

    def project(rows: jax.Array, name: str) -> jax.Array:
        with hlo.filled_rows_scope(plan.filled, rows.shape[1]):
            y = weights.grouped_matmul(rows, matrices[name], plan.sizes, kernel, placement)
        bias = matrices.get(f"{name}_bias")
        return y if bias is None else weights.add_grouped_bias(y, bias, plan.sizes, placement)

    def weigh(x: jax.Array, row_weights: jax.Array, what: str) -> jax.Array:
        return (x * row_weights).astype(x.dtype) if config.moe.router_weighs == what else x

    @recomputed
    def project_in(rows: jax.Array, row_weights: jax.Array) -> list[jax.Array]:
        rows = weigh(rows, row_weights, "inputs")
        hidden = {name: project(rows, name) for name in INPUT_PROJECTIONS if name in matrices}
        axes = ("devices", "expert_rows", "expert_mlp")
        return [mark(array, f"mlp_{name}", "product", *axes) for name, array in hidden.items()]

    @recomputed
    def project_out(row_weights: jax.Array, *projected: jax.Array) -> jax.Array:
        # Weighted before the matmul: the backward then needs nothing that comes after it.
        return project(weigh(ACTIVATIONS[config.mlp](*projected), row_weights, "outputs"), "down")

    rows, row_weights = dispatch(placement, x, plan), dispatch_weights(placement, choice_weights, plan)
    rows = mark(rows, "expert_rows", "routing", "devices", "expert_rows", "embed")
    return combine(placement, project_out(row_weights, *project_in(rows, row_weights)), plan)


def _project_to_router(params: dict[str, Weight], x: jax.Array, name: str, placement: Placement) -> jax.Array:
    """Return the logits of the router with this name, float32 [B, S, E], for x [B, S, D]."""
    table = weights.materialise(params[name], jnp.dtype(jnp.float32))
    logits = jnp.einsum("BSD,DE->BSE", x.astype(jnp.float32), table, precision=HIGHEST)
    if name == "router" and "logit_bias" in params:
        logits = logits + weights.materialise(params["logit_bias"], jnp.dtype(jnp.float32))
    # Constrained first in the sharding of x: otherwise XLA would gather x.
    return placement.constrain(logits, "batch", "residual_sequence", None)


def _apply_shared_expert(
    params: dict[str, Weight], x: jax.Array, normed: jax.Array, context: Context, norms: Norms, config: ModelConfig
) -> jax.Array:
    """Apply the shared expert to x [B, S, D]. normed: the input of the experts, which its gate reads."""

    @recomputed
    def weigh(y: jax.Array, normed: jax.Array) -> jax.Array:
        logits = _project_to_router(params, normed, "router_of_shared", context.placement)
        logits = mark(logits, "shared_logits", "routing", "batch", "residual_sequence", None)
        return (y * jax.nn.sigmoid(logits)).astype(y.dtype)

    shared = {name.removeprefix(SHARED): param for name, param in params.items() if name.startswith(SHARED)}
    y = norms.shared_post(mlp(shared, x, context, norm=norms.shared, kind=config.mlp))
    return weigh(y, normed) if config.moe.shared_expert_gate else y


def _add_output_biases(
    y: jax.Array, biases: Weight, routing: Routing, config: ModelConfig, placement: Placement
) -> jax.Array:
    """Add the biases [E, D] of the chosen experts' outputs, times their weights, to y [B, S, D].

    Not in the rows of the experts: there are k times as many, and their products are partial sums over `tensor`.
    """

    @recomputed
    def add(y: jax.Array, experts: jax.Array, choice_weights: jax.Array) -> jax.Array:
        mixing = jnp.sum(jnp.where(one_hot(experts, config.moe), choice_weights[..., None], 0), axis=2)
        mixing = placement.constrain(mixing, "batch", "residual_sequence", None)
        # Replicated, and with it the gradient: for one that `expert` divides, XLA would gather the tokens.
        table = placement.replicate(weights.materialise(biases, jnp.dtype(jnp.float32)))
        return (y + jnp.einsum("BSE,ED->BSD", mixing, table)).astype(y.dtype)

    return add(y, routing.experts, routing.weights)


def zero_statistics(config: ModelConfig) -> Sums:
    """Return zeros for the statistics, which are sums over tokens and layers.

    expert_load: choices [blocks, E], including dropped ones.
    router_tokens: tokens, once per MoE layer.
    router_entropy: entropy of the scores, in nats.
    dropped: dropped choices.
    exchanges: one per MoE layer and per microbatch that has tokens.
    rounds: rounds of these exchanges.
    """
    names = ("router_tokens", "router_entropy", "dropped", "exchanges", "rounds")
    scalars = {name: jnp.zeros((), jnp.float32) for name in names}
    return {"expert_load": jnp.zeros((config.blocks, config.moe.experts), jnp.float32), **scalars}


def _make_sums(
    routing: Routing,
    logits: jax.Array,
    bias: jax.Array | None,
    rounds: jax.Array,
    context: Context,
    layer: jax.Array,
    config: ModelConfig,
) -> Sums:
    if context.loss_mask is None:
        return {AUXILIARY_LOSS: jnp.zeros((), jnp.float32), **zero_statistics(config)}
    loss_mask = context.loss_mask
    loss = config.moe.balance_loss * balance_loss(routing, loss_mask, config.moe)
    loss = loss + config.moe.router_z_loss * z_loss(logits, loss_mask)
    # Constrained: for a divided gradient XLA would gather all choices on every device.
    load = context.placement.replicate(jnp.sum(expert_loads(routing, loss_mask, config.moe), axis=0))
    if bias is not None:
        loss = loss + bias_update_loss(bias, load)
    is_layer = jnp.arange(config.blocks)[:, None] == layer
    tokens = jnp.sum(loss_mask, dtype=jnp.float32)
    statistics = {
        "expert_load": jnp.where(is_layer, load, 0),
        "router_tokens": tokens,
        "router_entropy": jnp.sum(jnp.sum(jax.scipy.special.entr(normalise(routing.scores)), axis=-1) * loss_mask),
        "dropped": jnp.sum(~routing.kept & loss_mask[..., None], dtype=jnp.float32),
        "exchanges": (tokens > 0).astype(jnp.float32),
        "rounds": jnp.where(tokens > 0, rounds, 0).astype(jnp.float32),
    }
    return {AUXILIARY_LOSS: loss, **jax.lax.stop_gradient(statistics)}


def router_metrics(statistics: Sums) -> dict[str, jax.Array | Max]:
    """Return the metrics of a step's routers, float32, from the sums of `zero_statistics`; {} without experts.

    expert_load: load of each expert relative to an even one, mean over MoE layers [E].
    expert_imbalance: the largest relative load of any layer and expert.
    router_entropy: mean, in nats.
    dropped: share of the choices.
    expert_rounds: mean rounds per exchange.
    """
    if "expert_load" not in statistics:
        return {}
    load, tokens = statistics["expert_load"], jnp.maximum(statistics["router_tokens"], 1)
    choices = jnp.sum(load, axis=1, keepdims=True)
    relative = load * load.shape[1] / jnp.maximum(choices, 1)
    return {
        "expert_load": jnp.sum(relative, axis=0) / jnp.maximum(jnp.sum(choices > 0), 1),
        "expert_imbalance": Max(jnp.max(relative)),
        "router_entropy": statistics["router_entropy"] / tokens,
        "dropped": statistics["dropped"] / jnp.maximum(jnp.sum(choices), 1),
        "expert_rounds": statistics["rounds"] / jnp.maximum(statistics["exchanges"], 1),
    }
