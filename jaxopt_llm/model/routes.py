"""Which choice goes to which row of which device: the plans that exchange.py carries out.

Letters: E experts, k experts per token, R rows of a device, P devices along `expert`.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.parallel.sharding import Placement


@struct.dataclass
class Arrivals:
    """What a device gets of a round, in slots by the device that sends: P × as many as one may send.

    order: int32 [N, R], the slot of a row; place: int32 [N, R], the row of a slot, R of one that is not filled.
    sent, received: int32 [N, P], the slots that are filled for and by each device.
    """

    order: jax.Array
    place: jax.Array
    sent: jax.Array
    received: jax.Array
    ragged: bool = struct.field(pytree_node=False)


@struct.dataclass
class Plan:
    """Each device's rows.

    order: int32 [N, R], the choice in each slot that leaves, or in each row where none do, counted along the tokens
        that the device sees.
    place: int32 [N, tokens, k], the inverse: where a choice is, R where another device has it, another round or nobody.
    sizes: int32 [N, E of the device], the rows of its experts, which come first.
    length: tokens of a sequence that a device has.
    filled: rows of a device where the load is even.
    """

    order: jax.Array
    place: jax.Array
    sizes: jax.Array
    arrivals: Arrivals | None
    length: int = struct.field(pytree_node=False)
    filled: int = struct.field(pytree_node=False)


@struct.dataclass
class Sorted:
    """Choices [C] by expert. order: int32 [C], the choice at each place; place: int32 [C], the inverse; begins: int32
    [E + 1], where each expert's begin, and what is of none."""

    order: jax.Array
    place: jax.Array
    begins: jax.Array


def _sorted(experts: jax.Array, count: int) -> Sorted:
    """experts: int32 [C], `count` of a choice that goes nowhere."""
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    # Compared with all, here and below: a search is a loop of small kernels.
    return Sorted(order, place, jnp.sum(experts < jnp.arange(count + 1)[:, None], axis=1, dtype=jnp.int32))


def gathered(experts: jax.Array, config: ModelConfig, placement: Placement) -> Plan:
    """The plan of `gather`."""
    where, own = Devices(placement), config.experts // placement.size("expert")

    def on_device(experts: jax.Array) -> Plan:
        experts = where.together(experts)
        tokens, count = experts.shape[0] * experts.shape[1], experts.shape[2]
        local = experts.reshape(-1) - where.number * own
        local = jnp.where((local >= 0) & (local < own), local, own)  # what is not here comes last
        by_expert = _sorted(local, own)
        rows = tokens * min(count, own)  # were all choices that can be here
        place = jnp.where(local < own, by_expert.place, rows).reshape(tokens, count)
        plan = Plan(
            order=by_expert.order[:rows],
            place=place,
            sizes=jnp.diff(by_expert.begins),
            arrivals=None,
            length=experts.shape[1],
            filled=tokens * count // where.devices,
        )
        return _stacked(plan)

    return placement.on_each_device(on_device, where.tokens, where.own)(experts)


def in_order(experts: jax.Array, config: ModelConfig, placement: Placement) -> Sorted:
    """Each device's own choices, which all rounds of `all_to_all` send."""
    where = Devices(placement)

    def on_device(experts: jax.Array) -> Sorted:
        return _stacked(_sorted(experts.reshape(-1), config.experts))

    return placement.on_each_device(on_device, where.tokens, where.own)(experts)


def of_round(
    choices: tuple[jax.Array, Sorted], number: Any, *, ragged: bool, config: ModelConfig, placement: Placement
) -> Plan:
    """The plan of one round of `all_to_all`. choices: each token's experts, and what `in_order` makes of them; number:
    int32, from 0 on."""
    where, devices = Devices(placement), placement.size("expert")
    own = config.experts // devices

    def on_device(number: jax.Array, experts: jax.Array, by_expert: Sorted) -> Plan:
        order, place, begins = by_expert.order[0], by_expert.place[0], by_expert.begins[0]
        count = experts.shape[2]
        each, _ = room(config, placement, order.size // count)
        slots = jnp.arange(devices * each, dtype=jnp.int32).reshape(devices, each)
        first = begins[:-1:own] + number * each  # [P], of this round
        leaving = order[jnp.minimum(first[:, None] + slots[0], order.size - 1)]
        # Of each device its experts' part of the window.
        edges = begins[own * jnp.arange(devices)[:, None] + jnp.arange(own + 1)]  # [P, E of the device + 1]
        sent = jnp.diff(jnp.clip(edges - first[:, None], 0, each), axis=1)
        received = jax.lax.all_to_all(sent, "expert", 0, 0)
        # Of the slots that each device fills, in the order of experts, the rows: those of an expert lie by device.
        ends = jnp.cumsum(received, axis=1)
        sizes = jnp.sum(received, axis=0)
        rows = jnp.cumsum(sizes) - sizes + jnp.cumsum(received, axis=0) - received  # where each part begins
        expert = jnp.sum(ends[:, None] <= slots[0][:, None], axis=2, dtype=jnp.int32)  # [P, slots]
        shift = jnp.take_along_axis(rows - (ends - received), jnp.minimum(expert, own - 1), axis=1)
        row = jnp.where(expert < own, slots[0] + shift, slots.size).reshape(-1)
        arrivals = Arrivals(
            order=jnp.zeros_like(row).at[row].set(slots.reshape(-1), mode="drop", unique_indices=True),
            place=row,
            sent=jnp.sum(sent, axis=1),
            received=ends[:, -1],
            ragged=ragged,
        )
        flat = experts.reshape(-1)
        device = jnp.minimum(flat // own, devices - 1)
        offset = place - first[device]
        here = (offset >= 0) & (offset < each) & (flat < config.experts)
        plan = Plan(
            order=leaving.reshape(-1),
            place=jnp.where(here, device * each + offset, slots.size).reshape(-1, count),
            sizes=sizes,
            arrivals=arrivals,
            length=experts.shape[1],
            filled=order.size,
        )
        return _stacked(plan)

    run = placement.on_each_device(on_device, (PartitionSpec(), where.tokens, where.own), where.own)
    return run(jnp.int32(number), *choices)


def _stacked(plan: Any) -> Any:
    return jax.tree.map(lambda each: each[None], plan)


def room(config: ModelConfig, placement: Placement, tokens: int) -> tuple[int, int]:
    """Of a round of all_to_all: the choices that go from one device to another, and after how many rounds all have,
    whatever the load. tokens: of a device."""
    devices, count = placement.size("expert"), config.experts_per_token
    most = tokens * min(count, config.experts // devices)
    each = min(math.ceil(placement.sharding.expert_room * tokens * count / devices), most)
    return each, -(-most // each)


@dataclass(frozen=True)
class Devices:
    """How tokens and each device's own arrays are divided, and what goes along `expert`."""

    placement: Placement

    @property
    def tokens(self) -> PartitionSpec:
        return self.placement.activation("batch", "sequence", None).spec

    @property
    def residual(self) -> PartitionSpec:
        """Likewise, as the residual stream has them: other than `tokens` where `tensor` divides the sequence, too."""
        return self.placement.activation("batch", "residual_sequence", None).spec

    @property
    def own(self) -> PartitionSpec:
        return PartitionSpec(self.placement.device_axes)

    @property
    def devices(self) -> int:
        return self.placement.size("expert")

    @property
    def number(self) -> Any:
        return jax.lax.axis_index("expert") if self.devices > 1 else 0

    def together(self, x: jax.Array) -> jax.Array:
        """Of all devices along `expert`, by its first dimension."""
        return jax.lax.all_gather(x, "expert", axis=0, tiled=True) if self.devices > 1 else x

    def summed(self, x: jax.Array) -> jax.Array:
        """Over `tensor`, which has parts of it."""
        return jax.lax.psum(x, "tensor") if self.placement.size("tensor") > 1 else x
