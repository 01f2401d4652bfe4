"""A mixture of experts: MLPs of which a router chooses some for each token.

Every device has the rows of its own experts, of whatever tokens, sorted by expert, and multiplies each expert's with
its matrices; nothing is dropped that the router did not drop. exchange.py brings them there and back.

Letters: B batch, S sequence, D width, E experts, R rows of a device.
"""

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.grouped_matmul import IMPLEMENTATIONS
from jaxopt_llm.model import exchange, router, weights
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.exchange import collect, dispatch, spread
from jaxopt_llm.model.intermediates import tag
from jaxopt_llm.model.layers import HIDDEN, INWARD, Function, mlp, mlp_specs, recomputed
from jaxopt_llm.model.param import ParamSpec, normal, zeros
from jaxopt_llm.model.routes import Plan
from jaxopt_llm.model.weights import Weight
from jaxopt_llm.parallel import hlo

ROUTER = "/mlp/router"  # how its path ends
HIGHEST = jax.lax.Precision.HIGHEST  # of the router's product: what is near a tie must not depend on the device


def experts_specs(config: ModelConfig, residual_scale: float) -> dict[str, ParamSpec]:
    count, width, inner = config.experts, config.width, config.expert_width
    inward = ParamSpec((count, width, inner), ("experts", "embed", "expert_mlp"), (1,), normal())
    outward = ParamSpec((count, inner, width), ("experts", "expert_mlp", "embed"), (1,), normal(residual_scale))
    # Of its steps, all of one size, 16 bits would lose some.
    bias = ParamSpec((count,), (None,), init=zeros, exact=True, sign_rate=config.router_bias_rate)
    specs = {
        # It has no contracting dimension: neither adapted nor in fewer bits, and no matrix to Muon. Rounded in one ZeRO
        # stage and not in another, it would send a token that is near a tie elsewhere.
        "router": ParamSpec((width, count), ("embed", None), (), normal(width**-0.5), exact=True),
        **({"router_bias": bias} if config.router_bias else {}),
        **({} if config.mlp == "gelu" else {"gate": inward}),
        "up": inward,
        "down": outward,
    }
    if config.shared_expert_width:
        shared = mlp_specs(config.mlp, width, config.shared_expert_width, residual_scale, biased=False)
        specs |= {f"shared_{name}": spec for name, spec in shared.items()}
    return specs


def mixture(
    params: dict[str, Weight],
    x: jax.Array,
    context: Context,
    layer: jax.Array,
    *,
    norm: Function,
    config: ModelConfig,
    products: str,
) -> tuple[jax.Array, Auxiliary]:
    """The mixture of norm(x). x: [B, S, D] -> [B, S, D]; layer: int32, its number; products: the implementation of
    theirs, see kernels/grouped_matmul.py."""
    placement, kernel = context.placement, IMPLEMENTATIONS[products]

    @recomputed
    def route(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = tag(norm(x), "mlp_input")
        table = weights.materialise(params["router"], jnp.dtype(jnp.float32))
        logits = jnp.einsum("BSD,DE->BSE", x.astype(jnp.float32), table, precision=HIGHEST)
        # Pinned first as x is: XLA would gather that instead.
        logits = placement.constrain(logits, "batch", "residual_sequence", None)
        return x, placement.constrain(logits, "batch", "sequence", None)

    def chosen(matrices: dict[str, Weight], x: jax.Array, mixing: jax.Array, plan: Plan) -> jax.Array:
        """What the experts make of x, summed with these weights, of the choices in the plan."""

        def by_expert(rows: jax.Array, name: str) -> jax.Array:
            with hlo.filled(plan.filled, rows.shape[1]):
                return weights.grouped(rows, matrices[name], plan.sizes, kernel, placement)

        @recomputed
        def inward(rows: jax.Array) -> list[jax.Array]:
            hidden = {name: by_expert(rows, name) for name in INWARD if name in matrices}
            return [tag(each, INWARD[name]) for name, each in hidden.items()]

        @recomputed
        def outward(mixing: jax.Array, *projected: jax.Array) -> jax.Array:
            # Weighted before the product: the backward then wants nothing that comes after it.
            hidden = HIDDEN[config.mlp](*projected)
            return by_expert((hidden * mixing).astype(hidden.dtype), "down")

        rows, mixing = dispatch(placement, x, plan), spread(placement, mixing, plan)
        return collect(placement, outward(mixing, *inward(rows)), plan)

    normed, logits = route(x)
    bias = weights.materialise(params["router_bias"], jnp.dtype(jnp.float32)) if config.router_bias else None
    # A token sees none after itself. With a cache nothing is dropped: what a token is answered would depend on others.
    rows = None if context.counts is None else context.spans.last
    choice = router.choose(logits, bias, rows, context.real, config, placement)
    experts = jnp.where(choice.kept, choice.experts, config.experts)
    matrices = {name: params[name] for name in ("gate", "up", "down") if name in params}
    inputs = normed, choice.weights
    y, rounds = exchange.there_and_back(chosen, experts, context.counts is None, matrices, inputs, config, placement)
    if config.shared_expert_width:
        shared = {name.removeprefix("shared_"): each for name, each in params.items() if name.startswith("shared_")}
        y = y + mlp(shared, x, context, norm=norm, kind=config.mlp)
    return tag(y, "mlp_output"), _auxiliary(choice, logits, bias, rounds, context, layer, config)


def no_statistics(config: ModelConfig) -> dict[str, jax.Array]:
    """Sums over tokens. expert_load: choices [layers, E], what experts drop among them; router_tokens: tokens once for
    each layer with experts; router_entropy: of its scores, in nats; dropped: choices; exchanges: one of each layer with
    experts, and of each microbatch that has tokens; rounds: that these took."""
    names = ("router_tokens", "router_entropy", "dropped", "exchanges", "rounds")
    scalars = {name: jnp.zeros((), jnp.float32) for name in names}
    return {"expert_load": jnp.zeros((config.layers, config.experts), jnp.float32), **scalars}


def _auxiliary(
    choice: router.Choice,
    logits: jax.Array,
    bias: jax.Array | None,
    rounds: jax.Array,
    context: Context,
    layer: jax.Array,
    config: ModelConfig,
) -> Auxiliary:
    if context.counts is None:
        return Auxiliary(jnp.zeros((), jnp.float32), no_statistics(config))
    counts = context.counts
    loss = config.balance_loss * router.balance_loss(choice, counts, config)
    loss = loss + config.router_z_loss * router.z_loss(logits, counts)
    # Pinned: for a gradient that is divided XLA would bring all choices to every device.
    load = context.placement.whole(jnp.sum(router.loads(choice, counts, config), axis=0))
    if bias is not None:
        loss = loss + router.follow(bias, load)
    own = jnp.arange(config.layers)[:, None] == layer
    tokens = jnp.sum(counts, dtype=jnp.float32)
    statistics = {
        "expert_load": jnp.where(own, load, 0),
        "router_tokens": tokens,
        "router_entropy": jnp.sum(jnp.sum(jax.scipy.special.entr(router.shares(choice.scores)), axis=-1) * counts),
        "dropped": jnp.sum(~choice.kept & counts[..., None], dtype=jnp.float32),
        "exchanges": (tokens > 0).astype(jnp.float32),
        "rounds": jnp.where(tokens > 0, rounds, 0).astype(jnp.float32),
    }
    return Auxiliary(loss, jax.lax.stop_gradient(statistics))


def seen(statistics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What a step's sums say of its routers, in float32. expert_load: of each expert, relative to an even one, the mean
    over the layers that have experts [E]; expert_imbalance: the largest of any layer; router_entropy: the mean in nats;
    dropped: the share of choices; expert_rounds: that an exchange took, the mean. Empty where there are no experts."""
    if not statistics:
        return {}
    load, tokens = statistics["expert_load"], jnp.maximum(statistics["router_tokens"], 1)
    choices = jnp.sum(load, axis=1, keepdims=True)
    relative = load * load.shape[1] / jnp.maximum(choices, 1)
    return {
        "expert_load": jnp.sum(relative, axis=0) / jnp.maximum(jnp.sum(choices > 0), 1),
        "expert_imbalance": jnp.max(relative),
        "router_entropy": statistics["router_entropy"] / tokens,
        "dropped": statistics["dropped"] / jnp.maximum(jnp.sum(choices), 1),
        "expert_rounds": statistics["rounds"] / jnp.maximum(statistics["exchanges"], 1),
    }
