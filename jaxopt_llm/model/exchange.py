"""Tokens on their way to the devices of the experts that they are given, and back.

Between the two all arrays are each device's own rows, sorted by expert, stacked along a first dimension N. What differs
is what goes over `expert`:

gather: all tokens, to all of its devices, each of which takes the rows of its own experts; the parts of a token's sum
    come back. Traffic does not grow with the experts per token, but every device has room for all choices.
all_to_all: each choice, to its expert's device alone; so many from one device to another as sharding.expert_room has
    room for, and what is left in further rounds. An even load takes one, and any load some: nothing is dropped.
ragged: likewise, but of the room only what is filled.

Letters: B batch, S sequence, D width, E experts, k experts per token, R rows of a device, P devices along `expert`.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxopt_llm import tree
from jaxopt_llm.model import routes, weights
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.routes import Devices, Plan
from jaxopt_llm.parallel.instructions import sometimes
from jaxopt_llm.parallel.sharding import GROUPS, Placement, ShardingConfig

Form = Literal["gather", "all_to_all", "ragged"]
Run = Callable[..., jax.Array]  # (params, *inputs, Plan) -> y [B, S, D]


def form(config: ModelConfig, sharding: ShardingConfig, devices: int) -> Form:
    """The one that was asked for, or that sends the fewest bytes. devices: along `expert`."""
    if devices == 1:
        return "gather"
    if sharding.expert_exchange != "auto":
        return sharding.expert_exchange
    return "all_to_all" if sharding.expert_room * config.experts_per_token < devices else "gather"


def said(config: ModelConfig, placement: Placement) -> str:
    """What goes between experts' devices, in words; "" where nothing does."""
    devices = placement.size("expert")
    by = form(config, placement.sharding, devices)
    if not config.experts or devices == 1:
        return ""
    of_rounds = f", with room for {placement.sharding.expert_room:g} times an even load at a time"
    return f"{by} over {devices} devices{'' if by == 'gather' else of_rounds}"


def rows(config: ModelConfig, placement: Placement, tokens: int) -> int:
    """That a device has room for, of a round. tokens: of a device."""
    devices = placement.size("expert")
    if form(config, placement.sharding, devices) == "gather":
        return devices * tokens * min(config.experts_per_token, config.experts // devices)
    return devices * routes.room(config, placement, tokens)[0]


def there_and_back(
    run: Run,
    experts: jax.Array,
    cached: bool,
    params: tree.Tree,
    inputs: tuple[jax.Array, ...],
    config: ModelConfig,
    placement: Placement,
) -> tuple[jax.Array, jax.Array]:
    """run(params, *inputs, plan) [B, S, D], which is to `dispatch` and `collect`, summed over the plans that it takes;
    and how many these are, int32.

    experts: int32 [B, S, k], config.experts where a choice goes nowhere.
    cached: whether there is a cache: tokens are few then, and gathered.
    """
    by, once = form(config, placement.sharding, placement.size("expert")), jnp.int32(1)
    if cached or by == "gather":
        return run(params, *inputs, routes.gathered(experts, config, placement)), once
    by_expert = routes.in_order(experts, config, placement)
    plan = functools.partial(routes.of_round, ragged=by == "ragged", config=config, placement=placement)
    each, most = routes.room(config, placement, by_expert.order.shape[1] // config.experts_per_token)
    if most == 1:
        return run(params, *inputs, plan((experts, by_expert), 0)), once
    to_device = by_expert.begins[:, :: config.experts // placement.size("expert")]  # [N, P + 1]
    count = jnp.maximum(-(-jnp.max(jnp.diff(to_device, axis=1)) // each), 1)
    if placement.grouped:
        count = jax.lax.pmax(count, GROUPS)
    return _in_rounds(run, plan, (experts, by_expert), count, *weights.split_taps(params), inputs), count


# --- there and back: `dispatch` and `collect` are each other's transposes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(placement: Placement, x: jax.Array, plan: Plan) -> jax.Array:
    """Tokens [B, S, D] as the residual stream has them -> each device's rows [N, R, D]."""
    where = Devices(placement)

    def on_device(x: jax.Array, plan: Plan) -> jax.Array:
        if where.residual != where.tokens:
            x = jax.lax.all_gather(x, "tensor", axis=1, tiled=True)
        return _to_experts(where, x.reshape(-1, x.shape[-1]), plan.order[0] // plan.place.shape[2], plan)[None]

    return placement.on_each_device(on_device, (where.residual, where.own), where.own)(x, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def collect(placement: Placement, rows: jax.Array, plan: Plan) -> jax.Array:
    """Each device's rows [N, R, D], of which `tensor` has parts of the sums -> the sum of each token's [B, S, D]."""
    where = Devices(placement)

    def on_device(rows: jax.Array, plan: Plan) -> jax.Array:
        summed = jnp.sum(_of_choices(where, rows[0], plan), axis=1)
        y = _home(where, summed.astype(rows.dtype), plan)
        if where.residual != where.tokens:
            return jax.lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)
        return where.summed(y)

    return placement.on_each_device(on_device, (where.own, where.own), where.residual)(rows, plan)


dispatch.defvjp(
    lambda placement, x, plan: (dispatch(placement, x, plan), plan),
    lambda placement, plan, d_rows: (collect(placement, d_rows, plan), None),
)
collect.defvjp(
    lambda placement, rows, plan: (collect(placement, rows, plan), plan),
    lambda placement, plan, dy: (dispatch(placement, dy, plan), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread(placement: Placement, choices: jax.Array, plan: Plan) -> jax.Array:
    """A number of each choice, float32 [B, S, k], of each device's rows [N, R, 1]."""
    where = Devices(placement)

    def on_device(choices: jax.Array, plan: Plan) -> jax.Array:
        return _to_experts(where, choices.reshape(-1, 1), plan.order[0], plan)[None]

    return placement.on_each_device(on_device, (where.tokens, where.own), where.own)(choices, plan)


def _spread_backward(placement: Placement, plan: Plan, d_rows: jax.Array) -> tuple[jax.Array, None]:
    where = Devices(placement)

    def on_device(d_rows: jax.Array, plan: Plan) -> jax.Array:
        return where.summed(_home(where, _of_choices(where, d_rows[0], plan)[..., 0], plan))

    return placement.on_each_device(on_device, (where.own, where.own), where.tokens)(d_rows, plan), None


spread.defvjp(lambda placement, choices, plan: (spread(placement, choices, plan), plan), _spread_backward)


def _to_experts(where: Devices, items: jax.Array, index: jax.Array, plan: Plan) -> jax.Array:
    """Of items [I, X] of this device those with these indices, int32 [R], as rows [R, X]."""
    if plan.arrivals is None:
        return where.together(items)[index]
    arrivals = plan.arrivals
    return _swapped(where, items[index], arrivals.sent, arrivals.received, arrivals.ragged)[arrivals.order[0]]


def _of_choices(where: Devices, rows: jax.Array, plan: Plan) -> jax.Array:
    """Rows [R, X] where their tokens are, 0 of those that are not: float32 [tokens, k, X]."""
    if plan.arrivals is not None:
        arrivals = plan.arrivals
        slots = rows.at[arrivals.place[0]].get(mode="fill", fill_value=0)
        rows = _swapped(where, slots, arrivals.received, arrivals.sent, arrivals.ragged)
    return rows.at[plan.place[0]].get(mode="fill", fill_value=0).astype(jnp.float32)


def _home(where: Devices, x: jax.Array, plan: Plan) -> jax.Array:
    """[tokens, X] -> [B, S, X], of what came together summed over `expert`."""
    if plan.arrivals is None and where.devices > 1:
        x = jax.lax.psum_scatter(x, "expert", scatter_dimension=0, tiled=True)
    return x.reshape(-1, plan.length, x.shape[-1])


def _swapped(where: Devices, slots: jax.Array, sent: jax.Array, received: jax.Array, ragged: bool) -> jax.Array:
    """Slots [R, X] by device, each to its own."""
    if not ragged:
        return jax.lax.all_to_all(slots, "expert", 0, 0, tiled=True)
    each = slots.shape[0] // where.devices
    begins = each * jnp.arange(where.devices, dtype=jnp.int32)
    there = jnp.full_like(begins, each * where.number)
    return jax.lax.ragged_all_to_all(
        slots, jnp.zeros_like(slots), begins, sent[0], there, received[0], axis_name="expert"
    )


# --- rounds

# The first is as if alone: the rematerialisation policy says what is kept of it, and it can overlap with what is beside
# it. Of the others the backward computes everything again: how many there are is known only as they run.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_rounds(run, plan, choices, count, resting, taps, inputs):
    return _in_rounds_forward(run, plan, choices, count, resting, taps, inputs)[0]


def _round(run, plan, choices, resting, number):
    return lambda taps, inputs: run(weights.with_taps(resting, taps), *inputs, plan(choices, number))


def _after_the_first(count, add, sums):
    """add(number, sums) for every round but the first."""

    def step(state):
        number, sums = state
        return number + 1, add(number, sums)

    with jax.named_scope(sometimes(0, 1)):
        return jax.lax.while_loop(lambda state: state[0] < count, step, (jnp.int32(1), sums))[1]


def _in_rounds_forward(run, plan, choices, count, resting, taps, inputs):
    one = functools.partial(_round, run, plan, choices, resting)
    y, pull = jax.vjp(one(0), taps, inputs)
    y = _after_the_first(count, lambda number, y: y + one(number)(taps, inputs), y)
    return y, (pull, choices, count, resting, inputs)


def _in_rounds_backward(run, plan, residuals, dy):
    pull, choices, count, resting, inputs = residuals
    first = pull(dy)
    taps = jax.tree.map(jnp.zeros_like, first[0])

    def add(number, sums):
        _, pull = jax.vjp(_round(run, plan, choices, resting, number), taps, inputs)
        return jax.tree.map(jnp.add, sums, pull(dy))

    d_taps, d_inputs = _after_the_first(count, add, first)
    return None, None, None, d_taps, d_inputs


_in_rounds.defvjp(_in_rounds_forward, _in_rounds_backward)
