"""MoE layer: MLPs (experts) of which a router chooses some for each token.

Every device has the rows of its own experts, sorted by expert, and multiplies them in one grouped matmul. Only the
router's capacity drops choices. exchange.py dispatches rows to the experts' devices and combines the results.

Letters: B batch, S sequence, D width, E experts, R rows of a device.
"""

import jax
import jax.numpy as jnp

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core.metric import Max
from jaxopt_llm.kernels.grouped_matmul import IMPLEMENTATIONS
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.intermediates import constrain, mark
from jaxopt_llm.model.layers import ACTIVATIONS, INPUT_PROJECTIONS, Function, mlp, mlp_specs, recomputed
from jaxopt_llm.model.linear import weights
from jaxopt_llm.model.linear.weights import Weight
from jaxopt_llm.model.model import Auxiliary
from jaxopt_llm.model.moe import exchange, router
from jaxopt_llm.model.moe.dispatch_plan import DispatchPlan
from jaxopt_llm.model.moe.exchange import combine, dispatch, dispatch_weights
from jaxopt_llm.model.param import ParamSpec, normal, zeros

HIGHEST = jax.lax.Precision.HIGHEST  # for the router's matmul: a choice near a tie must not depend on the device


def moe_specs(config: ModelConfig, residual_scale: float) -> dict[str, ParamSpec]:
    count, width, inner = config.moe.experts, config.width, config.moe.expert_width
    inward = ParamSpec((count, width, inner), ("experts", "embed", "expert_mlp"), (1,), normal())
    outward = ParamSpec((count, inner, width), ("experts", "expert_mlp", "embed"), (1,), normal(residual_scale))
    # Exact: all steps of the bias have the same small size, and 16 bits would lose some of them.
    bias = ParamSpec((count,), (None,), init=zeros, exact=True, sign_rate=config.moe.router_bias_rate)
    specs = {
        # A router has no contracting dimension, so that it is never adapted or quantised, and not a matrix for Muon. If
        # it were rounded in some ZeRO stages only, a token near a tie would go to other experts there.
        "router": ParamSpec((width, count), ("embed", None), (), normal(width**-0.5), exact=True),
        **({"router_bias": bias} if config.moe.router_bias else {}),
        **({"gate": inward} if config.has_gate else {}),
        "up": inward,
        "down": outward,
    }
    if shared_width := config.moe.shared_expert_width:
        shared = mlp_specs(width, shared_width, residual_scale, has_gate=config.has_gate, biased=False)
        specs |= {f"shared_{name}": spec for name, spec in shared.items()}
    return specs


def moe_layer(
    params: dict[str, Weight],
    x: jax.Array,
    context: Context,
    layer: jax.Array,
    *,
    norm: Function,
    config: ModelConfig,
    products: str,
) -> tuple[jax.Array, Auxiliary]:
    """Apply the MoE layer to norm(x). x: [B, S, D] -> [B, S, D].

    layer: int32, index of the layer. products: implementation of the grouped matmul (kernels/grouped_matmul.py).
    """
    placement, kernel = context.placement, IMPLEMENTATIONS[products]

    @recomputed
    def compute_logits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = mark(norm(x), "mlp_input", "input", "batch", "residual_sequence", "embed")
        table = weights.materialise(params["router"], jnp.dtype(jnp.float32))
        logits = jnp.einsum("BSD,DE->BSE", x.astype(jnp.float32), table, precision=HIGHEST)
        # Constrained first in the sharding of x: otherwise XLA would gather x.
        logits = placement.constrain(logits, "batch", "residual_sequence", None)
        return x, constrain(placement, logits, "router_logits", "routing", "batch", "sequence", None)

    def apply_experts(
        matrices: dict[str, Weight], x: jax.Array, choice_weights: jax.Array, plan: DispatchPlan
    ) -> jax.Array:
        def project(rows: jax.Array, name: str) -> jax.Array:
            with hlo.filled_rows_scope(plan.filled, rows.shape[1]):
                return weights.grouped_matmul(rows, matrices[name], plan.sizes, kernel, placement)

        @recomputed
        def project_in(rows: jax.Array) -> list[jax.Array]:
            hidden = {name: project(rows, name) for name in INPUT_PROJECTIONS if name in matrices}
            axes = ("devices", "expert_rows", "expert_mlp")
            return [mark(array, f"mlp_{name}", "product", *axes) for name, array in hidden.items()]

        @recomputed
        def project_out(row_weights: jax.Array, *projected: jax.Array) -> jax.Array:
            # Weighted before the matmul: the backward then needs nothing that comes after it.
            hidden = ACTIVATIONS[config.mlp](*projected)
            return project((hidden * row_weights).astype(hidden.dtype), "down")

        rows, row_weights = dispatch(placement, x, plan), dispatch_weights(placement, choice_weights, plan)
        rows = mark(rows, "expert_rows", "routing", "devices", "expert_rows", "embed")
        return combine(placement, project_out(row_weights, *project_in(rows)), plan)

    normed, logits = compute_logits(x)
    bias = weights.materialise(params["router_bias"], jnp.dtype(jnp.float32)) if config.moe.router_bias else None
    # The last key that a token sees is its own row. Generation drops nothing: otherwise the answer to a prompt would
    # depend on the other prompts of the batch.
    rows = None if context.loss_mask is None else context.key_ranges.last
    routing = router.choose_experts(logits, bias, rows, context.token_mask, config.moe, placement)
    experts = jnp.where(routing.kept, routing.experts, config.moe.experts)
    matrices = {name: params[name] for name in ("gate", "up", "down") if name in params}
    inputs = (normed, routing.weights)
    y, rounds = exchange.run_experts(apply_experts, experts, rows is None, matrices, inputs, config.moe, placement)
    if config.moe.shared_expert_width:
        shared = {name.removeprefix("shared_"): param for name, param in params.items() if name.startswith("shared_")}
        y = y + mlp(shared, x, context, norm=norm, kind=config.mlp)
    y = mark(y, "mlp_output", "product", "batch", "residual_sequence", "embed")
    return y, _make_auxiliary(routing, logits, bias, rounds, context, layer, config)


def zero_statistics(config: ModelConfig) -> dict[str, jax.Array]:
    """Return zeros for the statistics, which are sums over tokens and layers.

    expert_load: choices [layers, E], including dropped ones.
    router_tokens: tokens, once per MoE layer.
    router_entropy: entropy of the scores, in nats.
    dropped: dropped choices.
    exchanges: one per MoE layer and per microbatch that has tokens.
    rounds: rounds of these exchanges.
    """
    names = ("router_tokens", "router_entropy", "dropped", "exchanges", "rounds")
    scalars = {name: jnp.zeros((), jnp.float32) for name in names}
    return {"expert_load": jnp.zeros((config.layers, config.moe.experts), jnp.float32), **scalars}


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
    is_layer = jnp.arange(config.layers)[:, None] == layer
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
