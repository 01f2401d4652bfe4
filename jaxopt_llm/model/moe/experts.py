"""MoE layer: MLPs (experts) of which a router chooses some for each token.

Every device has the rows of its own experts, sorted by expert, and multiplies them in one grouped matmul. Only the
router's capacity drops choices. exchange.py dispatches rows to the experts' devices and combines the results.

Letters: B batch, S sequence, D width, E experts, R rows of a device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core.metric import Max
from jaxopt_llm.kernels.grouped_matmul import IMPLEMENTATIONS, ONE_BY_ONE, OneByOne
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
from jaxopt_llm.model.model import Auxiliary
from jaxopt_llm.model.moe import exchange, router
from jaxopt_llm.model.moe.dispatch_plan import DispatchPlan
from jaxopt_llm.model.moe.exchange import combine, dispatch, dispatch_weights
from jaxopt_llm.model.param import ParamSpec, normal, zeros
from jaxopt_llm.parallel.activations import to_residual_order, to_token_order
from jaxopt_llm.parallel.placement import Placement, constrain, mark

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
) -> tuple[jax.Array, Auxiliary]:
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

    def apply_experts(
        matrices: dict[str, Weight], x: jax.Array, choice_weights: jax.Array, plan: DispatchPlan
    ) -> jax.Array:
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

    normed, logits = compute_logits(x)
    bias, scale = (
        weights.materialise(params[name], jnp.dtype(jnp.float32)) if name in params else None
        for name in ("router_bias", "expert_scale")
    )
    # The last key that a token sees is its own row. Generation drops nothing: otherwise the answer to a prompt would
    # depend on the other prompts of the batch.
    rows = None if context.loss_mask is None else context.key_ranges.last
    routing = router.choose_experts(logits, bias, rows, context.token_mask, config.moe, placement, scale)
    placed = router.Routing(*(to_residual_order(each, placement) for each in routing))
    experts = jnp.where(placed.kept, placed.experts, config.moe.experts)
    matrices = {name: params[name] for name in ("gate", "gate_bias", "up", "up_bias", "down") if name in params}
    inputs = (normed, placed.weights)
    y, rounds = exchange.run_experts(apply_experts, experts, rows is None, matrices, inputs, config.moe, placement)
    if "down_bias" in params:
        y = _add_output_biases(y, params["down_bias"], placed, config, placement)
    y = norms.experts_post(y)
    if config.moe.shared_expert_width:
        y = y + _apply_shared_expert(params, x, normed, context, norms, config)
    y = mark(y, "mlp_output", "product", "batch", "residual_sequence", "embed")
    return y, _make_auxiliary(routing, logits, bias, rounds, context, layer, config)


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
    y: jax.Array, biases: Weight, routing: router.Routing, config: ModelConfig, placement: Placement
) -> jax.Array:
    """Add the biases [E, D] of the chosen experts' outputs, times their weights, to y [B, S, D].

    Not in the rows of the experts: there are k times as many, and their products are partial sums over `tensor`.
    """

    @recomputed
    def add(y: jax.Array, experts: jax.Array, choice_weights: jax.Array) -> jax.Array:
        mixing = jnp.sum(jnp.where(router.one_hot(experts, config.moe), choice_weights[..., None], 0), axis=2)
        mixing = placement.constrain(mixing, "batch", "residual_sequence", None)
        # Replicated, and with it the gradient: for one that `expert` divides, XLA would gather the tokens.
        table = placement.replicate(weights.materialise(biases, jnp.dtype(jnp.float32)))
        return (y + jnp.einsum("BSE,ED->BSD", mixing, table)).astype(y.dtype)

    return add(y, routing.experts, routing.weights)


def zero_statistics(config: ModelConfig) -> dict[str, jax.Array]:
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


def _make_auxiliary(
    routing: router.Routing,
    logits: jax.Array,
    bias: jax.Array | None,
    rounds: jax.Array,
    context: Context,
    layer: jax.Array,
    config: ModelConfig,
) -> Auxiliary:
    if context.loss_mask is None:
        return Auxiliary(jnp.zeros((), jnp.float32), zero_statistics(config))
    loss_mask = context.loss_mask
    loss = config.moe.balance_loss * router.balance_loss(routing, loss_mask, config.moe)
    loss = loss + config.moe.router_z_loss * router.z_loss(logits, loss_mask)
    # Constrained: for a divided gradient XLA would gather all choices on every device.
    load = context.placement.replicate(jnp.sum(router.expert_loads(routing, loss_mask, config.moe), axis=0))
    if bias is not None:
        loss = loss + router.bias_update_loss(bias, load)
    is_layer = jnp.arange(config.blocks)[:, None] == layer
    tokens = jnp.sum(loss_mask, dtype=jnp.float32)
    statistics = {
        "expert_load": jnp.where(is_layer, load, 0),
        "router_tokens": tokens,
        "router_entropy": jnp.sum(
            jnp.sum(jax.scipy.special.entr(router.normalise(routing.scores)), axis=-1) * loss_mask
        ),
        "dropped": jnp.sum(~routing.kept & loss_mask[..., None], dtype=jnp.float32),
        "exchanges": (tokens > 0).astype(jnp.float32),
        "rounds": jnp.where(tokens > 0, rounds, 0).astype(jnp.float32),
    }
    return Auxiliary(loss, jax.lax.stop_gradient(statistics))


def router_metrics(statistics: dict[str, jax.Array]) -> dict[str, jax.Array | Max]:
    """Return the metrics of a step's routers, float32, from the sums of `zero_statistics`; {} without experts.

    expert_load: load of each expert relative to an even one, mean over MoE layers [E].
    expert_imbalance: the largest relative load of any layer and expert.
    router_entropy: mean, in nats.
    dropped: share of the choices.
    expert_rounds: mean rounds per exchange.
    """
    if not statistics:
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
