"""A mixture of experts: MLPs of which a router chooses some for each token.

Every device takes the rows of its own tokens, or of those that devices along `expert` bring together, sorts them by
expert, and multiplies each expert's rows with its matrices; nothing is dropped that the router did not drop. Between
the dispatch and the way back all arrays are each device's own, stacked along a first dimension N.

Letters: B batch, S sequence, D width, E experts, F an expert's width, k experts per token, R rows of a device.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxopt_llm.kernels.grouped_matmul import IMPLEMENTATIONS
from jaxopt_llm.model import router, weights
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.intermediates import tag
from jaxopt_llm.model.layers import HIDDEN, INWARD, Function, mlp, mlp_specs, recomputed
from jaxopt_llm.model.param import ParamSpec, normal, zeros
from jaxopt_llm.model.weights import Weight
from jaxopt_llm.parallel import hlo
from jaxopt_llm.parallel.sharding import Placement

ROUTER = "/mlp/router"  # how its path ends
HIGHEST = jax.lax.Precision.HIGHEST  # of the router's product: what is near a tie must not depend on the device


def experts_specs(config: ModelConfig, residual_scale: float) -> dict[str, ParamSpec]:
    count, width, inner = config.experts, config.width, config.expert_width
    inward = ParamSpec((count, width, inner), ("experts", "embed", "expert_mlp"), (1,), normal())
    outward = ParamSpec((count, inner, width), ("experts", "expert_mlp", "embed"), (1,), normal(residual_scale))
    bias = ParamSpec((count,), (None,), init=zeros, sign_rate=config.router_bias_rate)
    specs = {
        # It has no contracting dimension: neither adapted nor in fewer bits, and no matrix to Muon.
        "router": ParamSpec((width, count), ("embed", None), (), normal(width**-0.5)),
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

    def by_expert(rows: jax.Array, name: str, sizes: jax.Array) -> jax.Array:
        devices, count = placement.size("expert"), config.experts_per_token
        with hlo.filled(count, devices * min(count, config.experts // devices)):
            return weights.grouped(rows, params[name], sizes, kernel, placement)

    @recomputed
    def route(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = tag(placement.enter(norm(x)), "mlp_input")
        table = weights.materialise(params["router"], jnp.dtype(jnp.float32))
        return x, jnp.einsum("BSD,DE->BSE", x.astype(jnp.float32), table, precision=HIGHEST)

    @recomputed
    def inward(rows: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        hidden = {name: by_expert(rows, name, sizes) for name in INWARD if name in params}
        return [tag(each, INWARD[name]) for name, each in hidden.items()]

    @recomputed
    def outward(sizes: jax.Array, *projected: jax.Array) -> jax.Array:
        return by_expert(HIDDEN[config.mlp](*projected), "down", sizes)

    normed, logits = route(x)
    bias = weights.materialise(params["router_bias"], jnp.dtype(jnp.float32)) if config.router_bias else None
    # A token sees none after itself. With a cache nothing is dropped: what a token is answered would depend on others.
    choice = router.choose(logits, bias, None if context.counts is None else context.spans.last, config, placement)
    plan = make_plan(jnp.where(choice.kept, choice.experts, config.experts), config.experts, placement)
    rows = dispatch(placement, normed, plan)
    y = combine(placement, outward(plan.sizes, *inward(rows, plan.sizes)), choice.weights, plan)
    if config.shared_expert_width:
        shared = {name.removeprefix("shared_"): each for name, each in params.items() if name.startswith("shared_")}
        y = y + mlp(shared, x, context, norm=norm, kind=config.mlp)
    return tag(y, "mlp_output"), _auxiliary(choice, logits, bias, context, layer, config)


def no_statistics(config: ModelConfig) -> dict[str, jax.Array]:
    """Sums over tokens. expert_load: choices [layers, E], what experts drop among them; router_tokens: tokens once for
    each layer with experts; router_entropy: of its scores, in nats; dropped: choices."""
    scalars = {name: jnp.zeros((), jnp.float32) for name in ("router_tokens", "router_entropy", "dropped")}
    return {"expert_load": jnp.zeros((config.layers, config.experts), jnp.float32), **scalars}


def _auxiliary(
    choice: router.Choice,
    logits: jax.Array,
    bias: jax.Array | None,
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
    statistics = {
        "expert_load": jnp.where(own, load, 0),
        "router_tokens": jnp.sum(counts, dtype=jnp.float32),
        "router_entropy": jnp.sum(jnp.sum(jax.scipy.special.entr(router.shares(choice.scores)), axis=-1) * counts),
        "dropped": jnp.sum(~choice.kept & counts[..., None], dtype=jnp.float32),
    }
    return Auxiliary(loss, jax.lax.stop_gradient(statistics))


def seen(statistics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What a step's sums say of its routers, in float32. expert_load: of each expert, relative to an even one, the mean
    over the layers that have experts [E]; expert_imbalance: the largest of any layer; router_entropy: the mean in nats;
    dropped: the share of choices. Empty where there are no experts."""
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
    }


# --- to the experts and back


@struct.dataclass
class Plan:
    """Each device's rows.

    order: int32 [N, R], the choice that a row is of, counted along the tokens that the device sees.
    place: int32 [N, tokens, k], the row of a choice, R where another device has it or nobody.
    sizes: int32 [N, E of the device], the rows of its experts, which come first.
    length: tokens of a sequence that a device has.
    """

    order: jax.Array
    place: jax.Array
    sizes: jax.Array
    length: int = struct.field(pytree_node=False)


def make_plan(experts: jax.Array, count: int, placement: Placement) -> Plan:
    """experts: int32 [B, S, k], `count` where a choice goes nowhere."""
    where, own = _Where(placement), count // placement.size("expert")

    def on_device(experts: jax.Array) -> Plan:
        experts = where.together(experts)
        tokens, per_token = experts.shape[0] * experts.shape[1], experts.shape[2]
        first = jax.lax.axis_index("expert") * own if where.devices > 1 else 0
        local = experts.reshape(-1) - first
        local = jnp.where((local >= 0) & (local < own), local, own)  # what is not here comes last
        order = jnp.argsort(local, stable=True).astype(jnp.int32)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
        sizes = jnp.diff(jnp.searchsorted(local[order], jnp.arange(own + 1))).astype(jnp.int32)
        room = tokens * min(per_token, own)  # were all choices that can be here
        place = jnp.where(local < own, place, room).reshape(tokens, per_token)
        return jax.tree.map(lambda each: each[None], Plan(order[:room], place, sizes, experts.shape[1]))

    return placement.on_each_device(on_device, where.tokens, where.own)(experts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(placement: Placement, x: jax.Array, plan: Plan) -> jax.Array:
    """Tokens [B, S, D] -> each device's rows [N, R, D]."""
    where = _Where(placement)

    def on_device(x: jax.Array, plan: Plan) -> jax.Array:
        tokens = where.together(x).reshape(-1, x.shape[-1])
        return tokens[plan.order[0] // plan.place.shape[2]][None]

    return placement.on_each_device(on_device, (where.tokens, where.own), where.own)(x, plan)


def _dispatch_forward(placement: Placement, x: jax.Array, plan: Plan) -> tuple:
    return dispatch(placement, x, plan), plan


def _dispatch_backward(placement: Placement, plan: Plan, d_rows: jax.Array) -> tuple:
    where = _Where(placement)

    def on_device(d_rows: jax.Array, plan: Plan) -> jax.Array:
        summed = jnp.sum(_of_choices(d_rows[0], plan.place[0]), axis=1, dtype=jnp.float32)
        return where.apart(summed.astype(d_rows.dtype), plan)

    return placement.on_each_device(on_device, (where.own, where.own), where.tokens)(d_rows, plan), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(placement: Placement, rows: jax.Array, mixing: jax.Array, plan: Plan) -> jax.Array:
    """Each device's part of the experts' results, rows [N, R, D], summed with the weights `mixing`, float32 [B, S, k],
    of each token -> [B, S, D]."""
    where = _Where(placement)

    def on_device(rows: jax.Array, mixing: jax.Array, plan: Plan) -> jax.Array:
        place = plan.place[0]
        mixing = where.together(mixing).reshape(place.shape)
        mixed = jnp.einsum("TKD,TK->TD", _of_choices(rows[0], place), mixing)
        return where.apart(mixed.astype(rows.dtype), plan)

    run = placement.on_each_device(on_device, (where.own, where.tokens, where.own), where.tokens)
    return run(rows, mixing, plan)


def _combine_forward(placement: Placement, rows: jax.Array, mixing: jax.Array, plan: Plan) -> tuple:
    return combine(placement, rows, mixing, plan), (rows, mixing, plan)


def _combine_backward(placement: Placement, residuals: tuple, dy: jax.Array) -> tuple:
    where = _Where(placement)

    def on_device(dy: jax.Array, rows: jax.Array, mixing: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
        place, order = plan.place[0], plan.order[0]
        dy, mixing = where.together(dy).reshape(-1, dy.shape[-1]), where.together(mixing).reshape(place.shape)
        d_rows = dy[order // place.shape[1]] * mixing.reshape(-1)[order][:, None]
        d_mixing = jnp.einsum("TKD,TD->TK", _of_choices(rows[0], place), dy.astype(jnp.float32))
        return d_rows.astype(dy.dtype)[None], where.apart(d_mixing, plan)

    run = placement.on_each_device(
        on_device, (where.tokens, where.own, where.tokens, where.own), (where.own, where.tokens)
    )
    return *run(dy, *residuals), None


combine.defvjp(_combine_forward, _combine_backward)


def _of_choices(rows: jax.Array, place: jax.Array) -> jax.Array:
    """The rows [R, D] at places [tokens, k], 0 where there is none: float32 [tokens, k, D]."""
    return rows.at[place].get(mode="fill", fill_value=0).astype(jnp.float32)


@dataclass(frozen=True)
class _Where:
    """How tokens and each device's own arrays are divided, and the exchange along `expert`."""

    placement: Placement

    @property
    def tokens(self) -> PartitionSpec:
        return self.placement.activation("batch", "sequence", None).spec

    @property
    def own(self) -> PartitionSpec:
        return PartitionSpec(self.placement.device_axes)

    @property
    def devices(self) -> int:
        return self.placement.size("expert")

    def together(self, x: jax.Array) -> jax.Array:
        """[B, S, ...] of all devices along `expert`."""
        return jax.lax.all_gather(x, "expert", axis=0, tiled=True) if self.devices > 1 else x

    def apart(self, x: jax.Array, plan: Plan) -> jax.Array:
        """[tokens, X] that each device along `expert` and `tensor` has a part of the sum of -> [B, S, X]."""
        if self.placement.size("tensor") > 1:
            x = jax.lax.psum(x, "tensor")
        if self.devices > 1:
            x = jax.lax.psum_scatter(x, "expert", scatter_dimension=0, tiled=True)
        return x.reshape(-1, plan.length, x.shape[-1])
