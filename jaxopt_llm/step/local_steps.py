"""Local steps: each group of devices trains by itself, and the groups are averaged from time to time.

The method is DiLoCo (Douillard et al. 2023, arXiv:2311.08105). A group is one index along `data`. In a local step each
group updates its own masters with its own moments and its share of the batch, and sends nothing to the others but a few
numbers for the records. After every `training.local_steps` steps an outer step follows:

    change   = mean over the groups of (masters - the group's masters)
    momentum = optimizer.outer_momentum × momentum + change
    masters  = masters - optimizer.outer_learning_rate × (change + optimizer.outer_momentum × momentum)

and every group continues from the new masters. `sharding.data_gradients` sets the format in which the changes are sent,
and in which the outer updates come back.

State: `masters` are those of the last outer step, which evaluation, samples and exports read; `moments` is the momentum
of the outer step; `groups` is the state of the groups, [G, ...], divided over `data`.

Letters: G groups, M microbatches, B batch, S sequence.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.config import Config
from jaxopt_llm.core import tree
from jaxopt_llm.core.metric import Metric
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload, zero
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.parallel.gathering import gather_over_data, sum_over_data
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import LOCAL_GROUPS
from jaxopt_llm.step.hyperparameters import Hyperparameters
from jaxopt_llm.step.state import GROUP_FIELDS, StateSpecs, TrainState, initialize_state, state_shardings
from jaxopt_llm.step.step import Metrics, Step
from jaxopt_llm.step.update import Optimizers

OUTER_STEP = "outer_step"  # named scope of the outer step in compiled programs and profiles


def make_group_specs(one_group: StateSpecs, groups: int) -> StateSpecs:
    """Return the specs of a state with groups, from the specs of one group's state."""
    return StateSpecs(
        masters=one_group.masters,
        moments=one_group.masters,
        frozen=one_group.frozen,
        guard={},
        loss_scale={},
        keep_frozen=one_group.keep_frozen,
        groups=repeat_specs({name: getattr(one_group, name) for name in GROUP_FIELDS}, groups),
        one_group=one_group,
    )


def repeat_specs(specs: Mapping[str, tree.Tree], groups: int) -> dict[str, tree.Tree]:
    """Return the specs of `groups`, arrays [G, ...], from the specs of arrays [...] of one group.

    A field that a checkpoint leaves out, because it has no arrays, is empty.
    """

    def repeat(spec: ParamSpec) -> ParamSpec:
        # Without `layers`: a loop over layers is inside the groups.
        contracting = tuple(dim + 1 for dim in spec.contracting)
        shape, axes = (groups, *spec.shape), ("groups", *spec.axes)
        return replace(spec, shape=shape, axes=axes, contracting=contracting, layers=None)

    return {name: jax.tree.map(repeat, specs.get(name, {})) for name in GROUP_FIELDS}


def initialize_groups(
    specs: StateSpecs, optimizers: Optimizers, seed: int, placement: Placement, given: Params | None = None
) -> TrainState:
    """Return the state before the first step: `initialize_state`, and with local steps the same state in all groups."""
    state = initialize_state(specs.one_group or specs, optimizers, seed, placement, given)
    return begin_groups(state, specs, placement) if specs.one_group else state


def begin_groups(state: TrainState, specs: StateSpecs, placement: Placement) -> TrainState:
    """Return the state in which every group has the given state. It donates that state.

    state: of one group, equal on all of them.
    """

    def begin(state: TrainState, scalars: dict[str, tree.Tree]) -> TrainState:
        of_group = {"masters": state.masters, "moments": state.moments, **scalars}
        return replace(
            state,
            moments=jax.tree.map(jnp.zeros_like, state.masters),
            groups={name: _repeat(of_group[name], specs.groups[name]) for name in GROUP_FIELDS},
        )

    jitted = jax.jit(begin, out_shardings=state_shardings(specs, placement), donate_argnums=0)
    scalars = {"guard": state.guard, "loss_scale": state.loss_scale}
    started: TrainState = jitted(replace(state, guard={}, loss_scale={}), scalars)
    return started


def count_groups(arrays: Mapping[str, Mapping[str, str]]) -> int:
    """Return the number of groups of a checkpoint; 0 without local steps. arrays: the arrays of its record."""
    # The description of a leaf is its dtype and shape, as in float32[2,3]. The groups are the first dimension.
    described = next(iter(arrays.get("groups", {}).values()), "[0]")
    return int(described.partition("[")[2].rstrip("]").split(",")[0])


def abstract_groups(specs: dict[str, tree.Tree], count: int, placement: Placement) -> dict[str, tree.Tree]:
    """Return the saved state of `count` groups as ShapeDtypeStructs, to restore it.

    All axes divide an array, whatever the ZeRO stage is: the devices may be fewer than those that wrote the groups.

    specs: of the groups of this run, whose number may be another one.
    """

    def describe(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        saved = replace(spec, shape=(count, *spec.shape[1:]), axes=(None, *spec.axes[1:]))
        sharding = placement.parameter(saved, STORAGE_AXES, ("data",), ("pipeline",))
        return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=zero.restore_memory(sharding, placement))

    return jax.tree.map(describe, specs)


def merge_groups(
    groups: dict[str, tree.Tree], specs: Mapping[str, tree.Tree], placement: Placement
) -> dict[str, tree.Tree]:
    """Return the state of one group, [...], from that of all groups, [G, ...].

    The masters are the mean of the groups, as after an outer step with the default settings. Everything else is that of
    group 0: codes of moments have no mean. It deletes the arrays that it receives one by one.

    specs: of the trees of a checkpoint without groups.
    """

    def merge(name: str, spec: ParamSpec, leaf: jax.Array) -> jax.Array:
        def compute(leaf: jax.Array) -> jax.Array:
            leaf = offload.fetch_to_device(leaf)
            return leaf.mean(axis=0) if name == "masters" else leaf[0]

        sharding = zero.checkpoint_sharding(spec, placement)
        merged = jax.jit(compute, out_shardings=sharding)(leaf)
        merged = jax.block_until_ready(jax.device_put(merged, zero.restore_memory(sharding, placement)))
        leaf.delete()
        return merged

    return {
        name: jax.tree.map(functools.partial(merge, name), specs[name], groups[name])
        for name in GROUP_FIELDS
        if name in specs
    }


def resize_groups(
    groups: dict[str, tree.Tree], specs: dict[str, tree.Tree], placement: Placement
) -> dict[str, tree.Tree]:
    """Return the state of another number of groups: group i continues from group i modulo the saved number.

    Groups that are gone take no part in the next outer step. New groups begin as copies. It deletes the arrays that it
    receives one by one.

    specs: of the result.
    """

    def resize(spec: ParamSpec, leaf: jax.Array) -> jax.Array:
        chosen = np.arange(spec.shape[0]) % leaf.shape[0]
        select = jax.jit(lambda leaf: leaf[chosen], out_shardings=zero.master_sharding(spec, placement))
        resized = jax.block_until_ready(select(leaf))
        leaf.delete()
        return resized

    return jax.tree.map(resize, specs, groups)


def _repeat(leaves: tree.Tree, specs: tree.Tree) -> tree.Tree:
    """Repeat leaves [...] for each group: [G, ...]. specs: of the result."""
    return jax.tree.map(lambda spec, leaf: jnp.broadcast_to(leaf, spec.shape), specs, leaves)


@dataclass(frozen=True, eq=False)
class LocalStep:
    """A step of all groups. step_of_group: the step of one group; its batch has its share of the rows."""

    step_of_group: Step
    placement: Placement

    def step(
        self, state: TrainState, batch: Any, hyperparameters: Hyperparameters | None
    ) -> tuple[TrainState, Metrics]:
        # Compiled programs are named after this method: jit_step.
        count = self.placement.size("data")
        grouped = jax.tree.map(lambda x: x.reshape(x.shape[0], count, -1, x.shape[-1]), batch)  # [M, G, B / G, S]

        def step_group(group: dict[str, tree.Tree], batch: Any) -> tuple[dict[str, tree.Tree], Metrics]:
            one = TrainState(state.step, compute=None, frozen=state.frozen, variables={}, **group)
            new, metrics = self.step_of_group(one, batch, hyperparameters)
            return {name: getattr(new, name) for name in GROUP_FIELDS}, metrics

        mapped = jax.vmap(step_group, in_axes=(0, 1), axis_name=LOCAL_GROUPS, spmd_axis_name="data")
        groups, metrics = mapped(state.groups, grouped)
        combined = {name: _combine(name, metric) for name, metric in metrics.items()}
        return replace(state, step=state.step + 1, groups=groups), combined


def _combine(name: str, metric: Any) -> Any:
    """Combine a metric [G, ...] of the groups.

    It is the mean, unless it says otherwise. The smallest loss scale is that of the group in trouble. A step is
    skipped, or overflows, if it does in all groups; `skipped` is that of the group with most such steps.
    """
    if name == "skipped":
        return jnp.max(metric, axis=0)
    if name in ("loss_scale", "skipped_in_a_row", "overflow"):
        return jnp.min(metric, axis=0)
    return metric.join() if isinstance(metric, Metric) else jnp.mean(metric, axis=0)


@dataclass(frozen=True, eq=False)
class OuterStep:
    """The outer step. config: of the run."""

    config: Config
    specs: StateSpecs
    placement: Placement

    @jax.named_scope(OUTER_STEP)
    def outer_step(self, state: TrainState) -> TrainState:
        # Compiled programs are named after this method: jit_outer_step.
        updated = jax.tree.map(self._update, self.specs.masters, state.masters, state.moments, state.groups["masters"])
        masters, momentum = (jax.tree.map(lambda _, pair, i=i: pair[i], self.specs.masters, updated) for i in (0, 1))
        groups = state.groups | {"masters": _repeat(masters, self.specs.groups["masters"])}
        return replace(state, masters=masters, moments=momentum, groups=groups)

    def _update(
        self, spec: ParamSpec, masters: jax.Array, momentum: jax.Array, of_groups: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the masters and the momentum of one parameter after an outer step. of_groups: [G, ...]."""
        optimizer = self.config.optimizer
        change = sum_over_data(spec, masters - of_groups, self.placement) / self.placement.size("data")
        momentum = optimizer.outer_momentum * momentum + change
        update = optimizer.outer_learning_rate * (change + optimizer.outer_momentum * momentum)
        return masters - gather_over_data(spec, update, self.placement), momentum


def jit_outer_step(config: Config, specs: StateSpecs, placement: Placement) -> Any:
    """Return the jitted outer step, state -> state. It donates the state."""
    shardings = state_shardings(specs, placement)
    step = OuterStep(config, specs, placement).outer_step
    return jax.jit(step, in_shardings=(shardings,), out_shardings=shardings, donate_argnums=0)


def has_groups(config: Config) -> bool:
    """Return whether the run has groups that train on their own."""
    return config.training.local_steps > 1


def ends_round(config: Config, step: int) -> bool:
    """Return whether an outer step follows step `step`."""
    return has_groups(config) and step % config.training.local_steps == 0


def place_groups(config: Config, placement: Placement) -> Placement:
    """Return the placement of a run: `data` divides groups that train on their own, if it has local steps."""
    return replace(placement, independent=("data",)) if has_groups(config) else placement


def inside_group(placement: Placement) -> Placement:
    """Return the placement inside a `vmap` over the groups."""
    return replace(placement, grouped=placement.independent)
