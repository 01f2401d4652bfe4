"""Dispatch plans: which choice goes to which row of which device. exchange.py carries them out.

A choice is one (token, expert) pair of the router's top-k.

Letters: E experts, k experts per token, R rows of a device, P devices along `expert`. N stacks the local arrays of all
devices.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxopt_llm.config import MoEConfig
from jaxopt_llm.parallel.placement import Placement


@struct.dataclass
class Arrivals:
    """Choices that a device receives in one round, in slots ordered by sender: P × the slots of one sender.

    order: int32 [N, R], the slot of each row.
    place: int32 [N, R], the row of each slot; R for an empty slot.
    """

    order: jax.Array
    place: jax.Array


@struct.dataclass
class DispatchPlan:
    """Rows of each device for one grouped matmul.

    order: int32 [N, R], the choice in each slot that is sent, or in each row if nothing is sent. Choices are numbered
        along the tokens that the device sees.
    place: int32 [N, tokens, k], the inverse: the row or slot of each choice, and R for a choice of another device, of
        another round or of no expert.
    sizes: int32 [N, E of the device], number of rows of each local expert. These rows come first.
    length: tokens of one sequence on a device.
    filled: rows of a device that an even load fills.
    """

    order: jax.Array
    place: jax.Array
    sizes: jax.Array
    arrivals: Arrivals | None
    length: int = struct.field(pytree_node=False)
    filled: int = struct.field(pytree_node=False)


# Size of the rounds after the first, as a share of an even load: what the fullest pair of devices has more than the
# first round's room is little, and all pairs send buffers of this size.
LATER_ROOM = 0.25


@dataclass(frozen=True)
class Rounds:
    """Choices that one device can send to another: in the first round, and in each further one.

    limit: number of rounds that any load fits in.
    """

    first: int
    later: int
    limit: int

    def begin(self, index: Any) -> Any:
        """Return the first choice of a round after the first, of those that a device has for another."""
        return self.first + (index - 1) * self.later

    def count(self, choices: jax.Array) -> jax.Array:
        """Return the number of rounds for the fullest pair of devices, int32."""
        return 1 + -(-jnp.maximum(choices - self.first, 0) // max(self.later, 1))


@struct.dataclass
class SortedChoices:
    """Choices [C] sorted by expert.

    order: int32 [C], the choice at each position; place: int32 [C], the inverse.
    begins: int32 [E + 1], the first position of each expert, and of the choices without an expert.
    """

    order: jax.Array
    place: jax.Array
    begins: jax.Array


def _sort(experts: jax.Array, count: int) -> SortedChoices:
    """Sort choices. experts: int32 [C], below `count`, or `count` for a choice without an expert."""
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    # Compared with all experts, here and below: a binary search would be a loop of small kernels.
    return SortedChoices(order, place, jnp.sum(experts < jnp.arange(count + 1)[:, None], axis=1, dtype=jnp.int32))


def make_gather_plan(experts: jax.Array, moe: MoEConfig, placement: Placement) -> DispatchPlan:
    """Return the plan of `gather`. experts: int32 [B, S, k], moe.experts for a choice without an expert."""
    mesh, local_count = ExpertMesh(placement), moe.experts // placement.size("expert")

    def on_device(experts: jax.Array) -> DispatchPlan:
        experts = mesh.all_gather(experts)
        tokens, count = experts.shape[0] * experts.shape[1], experts.shape[2]
        local = experts.reshape(-1) - mesh.index * local_count
        local = jnp.where((local >= 0) & (local < local_count), local, local_count)  # other devices' choices come last
        by_expert = _sort(local, local_count)
        rows = tokens * min(count, local_count)  # all choices that can be on this device
        place = jnp.where(local < local_count, by_expert.place, rows).reshape(tokens, count)
        plan = DispatchPlan(
            order=by_expert.order[:rows],
            place=place,
            sizes=jnp.diff(by_expert.begins),
            arrivals=None,
            length=experts.shape[1],
            filled=tokens * count // mesh.devices,
        )
        return _stack(plan)

    return placement.shard_map(on_device, mesh.tokens, mesh.local)(experts)


def sort_choices(experts: jax.Array, moe: MoEConfig, placement: Placement) -> SortedChoices:
    """Sort each device's own choices, which all rounds of `all_to_all` send. experts: as for `make_gather_plan`."""
    mesh = ExpertMesh(placement)

    def on_device(experts: jax.Array) -> SortedChoices:
        return _stack(_sort(experts.reshape(-1), moe.experts))

    return placement.shard_map(on_device, mesh.tokens, mesh.local)(experts)


def make_round_plan(
    choices: tuple[jax.Array, SortedChoices],
    begin: Any,
    per_pair: int,
    *,
    moe: MoEConfig,
    placement: Placement,
) -> DispatchPlan:
    """Return the plan of one round of `all_to_all`.

    choices: the experts of each token, int32 [B, S, k], and `sort_choices` of them.
    begin, per_pair: of the choices that a device has for another, the first one that the round sends, and their number.
    """
    mesh, devices = ExpertMesh(placement), placement.size("expert")
    local_count = moe.experts // devices

    def on_device(begin: jax.Array, experts: jax.Array, by_expert: SortedChoices) -> DispatchPlan:
        order, place, begins = by_expert.order[0], by_expert.place[0], by_expert.begins[0]
        count = experts.shape[2]
        slots = jnp.arange(devices * per_pair, dtype=jnp.int32).reshape(devices, per_pair)
        first = begins[:-1:local_count] + begin  # [P], first position of this round's window
        leaving = order[jnp.minimum(first[:, None] + slots[0], order.size - 1)]
        # For each device, the part of the window that belongs to each of its experts.
        edges = begins[local_count * jnp.arange(devices)[:, None] + jnp.arange(local_count + 1)]  # [P, local E + 1]
        sent = jnp.diff(jnp.clip(edges - first[:, None], 0, per_pair), axis=1)
        received = jax.lax.all_to_all(sent, "expert", 0, 0)
        # Each sender's slots are ordered by expert. Rows are ordered by expert first, and by sender within an expert.
        ends = jnp.cumsum(received, axis=1)
        sizes = jnp.sum(received, axis=0)
        rows = jnp.cumsum(sizes) - sizes + jnp.cumsum(received, axis=0) - received  # first row of each part
        expert = jnp.sum(ends[:, None] <= slots[0][:, None], axis=2, dtype=jnp.int32)  # [P, slots]
        shift = jnp.take_along_axis(rows - (ends - received), jnp.minimum(expert, local_count - 1), axis=1)
        row = jnp.where(expert < local_count, slots[0] + shift, slots.size).reshape(-1)
        arrivals = Arrivals(
            order=jnp.zeros_like(row).at[row].set(slots.reshape(-1), mode="drop", unique_indices=True),
            place=row,
        )
        flat = experts.reshape(-1)
        device = jnp.minimum(flat // local_count, devices - 1)
        offset = place - first[device]
        in_round = (offset >= 0) & (offset < per_pair) & (flat < moe.experts)
        plan = DispatchPlan(
            order=leaving.reshape(-1),
            place=jnp.where(in_round, device * per_pair + offset, slots.size).reshape(-1, count),
            sizes=sizes,
            arrivals=arrivals,
            length=experts.shape[1],
            filled=min(order.size, slots.size),
        )
        return _stack(plan)

    run = placement.shard_map(on_device, (PartitionSpec(), mesh.tokens, mesh.local), mesh.local)
    return run(jnp.int32(begin), *choices)


def _stack(plan: Any) -> Any:
    """Add the dimension N, along which the devices' arrays are stacked outside the manual region."""
    return jax.tree.map(lambda array: array[None], plan)


def plan_rounds(moe: MoEConfig, placement: Placement, tokens: int) -> Rounds:
    """Return the rounds of `all_to_all` for a number of tokens per device."""
    devices, count = placement.size("expert"), moe.experts_per_token
    most = tokens * min(count, moe.experts // devices)
    first = min(math.ceil(placement.sharding.expert_room * tokens * count / devices), most)
    later = min(math.ceil(LATER_ROOM * tokens * count / devices), most - first)
    return Rounds(first, later, 1 + (-(-(most - first) // later) if later else 0))


@dataclass(frozen=True)
class ExpertMesh:
    """PartitionSpecs of tokens and of stacked local arrays, and the collectives over `expert` and `tensor`."""

    placement: Placement

    @property
    def tokens(self) -> PartitionSpec:
        return self.placement.activation("batch", "sequence", None).spec

    @property
    def residual(self) -> PartitionSpec:
        """Spec of tokens in the residual stream: differs from `tokens` where `tensor` also divides the sequence."""
        return self.placement.activation("batch", "residual_sequence", None).spec

    @property
    def local(self) -> PartitionSpec:
        """Spec of local arrays stacked along a first dimension [N, ...]."""
        return PartitionSpec(self.placement.device_axes)

    @property
    def devices(self) -> int:
        return self.placement.size("expert")

    @property
    def index(self) -> Any:
        """Index of this device along `expert`."""
        return jax.lax.axis_index("expert") if self.devices > 1 else 0

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Gather x from all devices along `expert`, in its first dimension."""
        return jax.lax.all_gather(x, "expert", axis=0, tiled=True) if self.devices > 1 else x

    def sum_over_tensor(self, x: jax.Array) -> jax.Array:
        """Sum x over `tensor`, whose devices have partial sums, unless they have other tokens."""
        has_parts = self.placement.size("tensor") > 1 and "tensor" not in jax.tree.leaves(tuple(self.tokens))
        return jax.lax.psum(x, "tensor") if has_parts else x
