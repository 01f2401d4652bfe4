"""Exchange of tokens between devices for expert parallelism: dispatch to the experts' devices and combine.

Between dispatch and combine, all arrays are rows of each device, sorted by expert and stacked along a first dimension
N. There are two exchanges over `expert` (`sharding.expert_exchange`):

gather: every device gets all tokens and takes the rows of its own experts; the partial sums of each token come back.
    Traffic does not grow with the experts per token, but every device has room for all choices.
all_to_all: each choice goes only to the device of its expert, in a buffer between each pair of devices that has room
    for `sharding.expert_room` times an even load. Choices that do not fit go in further, small rounds. An even load
    takes one round, and nothing is dropped.

A choice is one (token, expert) pair of the router's top-k.

Letters: B batch, S sequence, D width, E experts, k experts per token, R rows of a device, P devices along `expert`.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxopt_llm.compiler.instructions import taken_scope_name
from jaxopt_llm.config import MoEConfig, ShardingConfig
from jaxopt_llm.core import tree
from jaxopt_llm.model.linear.weights import cast_to_compute, gather_once
from jaxopt_llm.model.moe import dispatch_plan
from jaxopt_llm.model.moe.dispatch_plan import DispatchPlan, ExpertMesh
from jaxopt_llm.parallel.gathering import split_perturbations, with_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import GROUP_AXIS

Exchange = Literal["gather", "all_to_all"]
ExpertFunction = Callable[..., jax.Array]  # (params, *inputs, plan) -> y [B, S, D]


def get_exchange(sharding: ShardingConfig, devices: int) -> Exchange:
    """Return the configured exchange. devices: along `expert`.

    A run has replaced `auto` by the faster one (planning/exchanges.py). Elsewhere it is the one with fewer
    rows.
    """
    if devices == 1:
        return "gather"
    return "all_to_all" if sharding.expert_exchange == "auto" else sharding.expert_exchange


def describe_exchange(moe: MoEConfig, placement: Placement) -> str:
    """Return a description for people; "" if the model or the mesh has no exchange."""
    devices = placement.size("expert")
    exchange = get_exchange(placement.sharding, devices)
    if not moe.experts or devices == 1:
        return ""
    buffers = f", with buffers for {placement.sharding.expert_room:g} times an even load"
    return f"{exchange} over {devices} devices{'' if exchange == 'gather' else buffers}"


def count_rows(moe: MoEConfig, placement: Placement, tokens: int) -> int:
    """Return the number of rows for which a device has room in the first round, for a number of tokens per device."""
    devices = placement.size("expert")
    if get_exchange(placement.sharding, devices) == "gather":
        return devices * tokens * min(moe.experts_per_token, moe.experts // devices)
    return devices * dispatch_plan.plan_rounds(moe, placement, tokens).first


def run_experts(
    run: ExpertFunction,
    experts: jax.Array,
    has_cache: bool,
    params: tree.Tree,
    inputs: tuple[jax.Array, ...],
    moe: MoEConfig,
    placement: Placement,
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of run(params, *inputs, plan) [B, S, D] over rounds, and the number of rounds, int32.

    run: calls `dispatch` and `combine` with the plan of the round.
    experts: int32 [B, S, k], moe.experts for a choice that goes nowhere.
    has_cache: generation has few tokens, and always gathers them.
    """
    exchange, once = get_exchange(placement.sharding, placement.size("expert")), jnp.int32(1)
    if has_cache or exchange == "gather":
        return run(params, *inputs, dispatch_plan.make_gather_plan(experts, moe, placement)), once
    by_expert = dispatch_plan.sort_choices(experts, moe, placement)
    make_plan = functools.partial(dispatch_plan.make_round_plan, moe=moe, placement=placement)
    tokens = by_expert.order.shape[1] // moe.experts_per_token
    rounds = dispatch_plan.plan_rounds(moe, placement, tokens)
    if rounds.limit == 1:
        return run(params, *inputs, make_plan((experts, by_expert), 0, rounds.first)), once
    to_device = by_expert.begins[:, :: moe.experts // placement.size("expert")]  # [N, P + 1]
    count = rounds.count(jnp.max(jnp.diff(to_device, axis=1)))
    if placement.in_gradient_group:
        count = jax.lax.pmax(count, GROUP_AXIS)
    resting, perturbations = split_perturbations(params)
    return _run_rounds((run, make_plan, rounds), (experts, by_expert), count, resting, perturbations, inputs), count


# --- `dispatch` and `combine` are each other's transposes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(placement: Placement, x: jax.Array, plan: DispatchPlan) -> jax.Array:
    """Send tokens [B, S, D] of the residual stream to the experts: each device's rows [N, R, D]."""
    mesh = ExpertMesh(placement)

    def on_device(x: jax.Array, plan: DispatchPlan) -> jax.Array:
        if mesh.residual != mesh.tokens:
            x = jax.lax.all_gather(x, "tensor", axis=1, tiled=True)
        return _send(mesh, x.reshape(-1, x.shape[-1]), plan.order[0] // plan.place.shape[2], plan)[None]

    return placement.shard_map(on_device, (mesh.residual, mesh.local), mesh.local)(x, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(placement: Placement, rows: jax.Array, plan: DispatchPlan) -> jax.Array:
    """Sum the rows of each token: rows [N, R, D], partial sums over `tensor` -> [B, S, D]."""
    mesh = ExpertMesh(placement)

    def on_device(rows: jax.Array, plan: DispatchPlan) -> jax.Array:
        summed = jnp.sum(_return_to_choices(rows[0], plan), axis=1)
        y = _return_to_tokens(mesh, summed.astype(rows.dtype), plan)
        if mesh.residual != mesh.tokens:
            return jax.lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)
        return mesh.sum_over_tensor(y)

    return placement.shard_map(on_device, (mesh.local, mesh.local), mesh.residual)(rows, plan)


dispatch.defvjp(
    lambda placement, x, plan: (dispatch(placement, x, plan), plan),
    lambda placement, plan, d_rows: (combine(placement, d_rows, plan), None),
)
combine.defvjp(
    lambda placement, rows, plan: (combine(placement, rows, plan), plan),
    lambda placement, plan, dy: (dispatch(placement, dy, plan), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_weights(placement: Placement, choice_weights: jax.Array, plan: DispatchPlan) -> jax.Array:
    """Send the weight of each choice, float32 [B, S, k], to its row: [N, R, 1]."""
    mesh = ExpertMesh(placement)

    def on_device(choice_weights: jax.Array, plan: DispatchPlan) -> jax.Array:
        return _send(mesh, choice_weights.reshape(-1, 1), plan.order[0], plan)[None]

    return placement.shard_map(on_device, (mesh.tokens, mesh.local), mesh.local)(choice_weights, plan)


def _dispatch_weights_backward(placement: Placement, plan: DispatchPlan, d_rows: jax.Array) -> tuple[jax.Array, None]:
    mesh = ExpertMesh(placement)

    def on_device(d_rows: jax.Array, plan: DispatchPlan) -> jax.Array:
        gradient = _return_to_choices(d_rows[0], plan)[..., 0]
        return mesh.sum_over_tensor(_return_to_tokens(mesh, gradient, plan))

    return placement.shard_map(on_device, (mesh.local, mesh.local), mesh.tokens)(d_rows, plan), None


dispatch_weights.defvjp(
    lambda placement, choice_weights, plan: (dispatch_weights(placement, choice_weights, plan), plan),
    _dispatch_weights_backward,
)


def _send(mesh: ExpertMesh, items: jax.Array, index: jax.Array, plan: DispatchPlan) -> jax.Array:
    """Send items[index] to the experts' devices. items: [I, X] of this device; index: int32 [R]. Return rows [R, X]."""
    if plan.arrivals is None:
        return mesh.all_gather(items)[index]
    return _all_to_all(items[index])[plan.arrivals.order[0]]


def _return_to_choices(rows: jax.Array, plan: DispatchPlan) -> jax.Array:
    """Send rows [R, X] back to their choices, float32 [tokens, k, X]; 0 for choices that are in no row."""
    if plan.arrivals is not None:
        rows = _all_to_all(rows.at[plan.arrivals.place[0]].get(mode="fill", fill_value=0))
    return rows.at[plan.place[0]].get(mode="fill", fill_value=0).astype(jnp.float32)


def _return_to_tokens(mesh: ExpertMesh, x: jax.Array, plan: DispatchPlan) -> jax.Array:
    """Reshape [tokens, X] to [B, S, X], after the sum over `expert` if tokens were gathered."""
    if plan.arrivals is None and mesh.devices > 1:
        x = jax.lax.psum_scatter(x, "expert", scatter_dimension=0, tiled=True)
    return x.reshape(-1, plan.length, x.shape[-1])


def _all_to_all(slots: jax.Array) -> jax.Array:
    """Exchange slots [R, X], ordered by device."""
    return jax.lax.all_to_all(slots, "expert", 0, 0, tiled=True)


# --- rounds

# The first round is like a call without rounds: the remat policy selects its residuals, and it can overlap with other
# computation. The backward computes further rounds again from their inputs, because their number is only known at run
# time. Further rounds read weights that are gathered before the loop: a loop holds what it reads, which would be the
# float32 masters.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_rounds(functions, choices, count, resting, perturbations, inputs):
    return _run_rounds_forward(functions, choices, count, resting, perturbations, inputs)[0]


def _make_round(run, plan, weights):
    def run_round(perturbations, inputs):
        return run(with_perturbations(weights, perturbations), *inputs, plan)

    return run_round


def _add_later_rounds(count, resting, of_round, sums):
    """Add of_round(weights, round_index) to the sums for every round after the first.

    The outer loop runs once, or not at all: weights are gathered only if there is a further round. A conditional would
    copy the sums. Without the barriers, XLA moves gathers and all-reduces out of the loops, and they always run.
    """
    narrow = cast_to_compute(resting)

    def repeat(step, state):
        return jax.lax.while_loop(lambda state: state[0] < count, step, state)

    def run_all(state):
        gathered = gather_once(jax.lax.optimization_barrier((narrow, state))[0])

        def run_one(state):
            round_index, sums = state
            further = jax.lax.optimization_barrier(of_round(gathered, round_index))
            return round_index + 1, jax.tree.map(jnp.add, sums, further)

        return repeat(run_one, state)

    with jax.named_scope(taken_scope_name(0, 1)):
        return repeat(run_all, (jnp.int32(1), sums))[1]


def _run_rounds_forward(functions, choices, count, resting, perturbations, inputs):
    run, make_plan, rounds = functions
    y, pull = jax.vjp(_make_round(run, make_plan(choices, 0, rounds.first), resting), perturbations, inputs)

    def of_round(weights, index):
        plan = make_plan(choices, rounds.begin(index), rounds.later)
        return _make_round(run, plan, weights)(perturbations, inputs)

    return _add_later_rounds(count, resting, of_round, y), (pull, choices, count, resting, inputs)


def _run_rounds_backward(functions, residuals, dy):
    run, make_plan, rounds = functions
    pull, choices, count, resting, inputs = residuals
    first = pull(dy)
    perturbations = jax.tree.map(jnp.zeros_like, first[0])

    def of_round(weights, index):
        plan = make_plan(choices, rounds.begin(index), rounds.later)
        _, pull = jax.vjp(_make_round(run, plan, weights), perturbations, inputs)
        return pull(dy)

    d_perturbations, d_inputs = _add_later_rounds(count, resting, of_round, first)
    return None, None, None, d_perturbations, d_inputs


_run_rounds.defvjp(_run_rounds_forward, _run_rounds_backward)
