"""Conversion of the training state to and from checkpoint trees, whose layout is the same for every mesh."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxopt_llm.core import tree
from jaxopt_llm.execution.by_layer import Rows, gather_periods, share_stack, split_stack
from jaxopt_llm.model import param
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload, zero
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.training.state import (
    STORED,
    StateSpecs,
    TrainState,
    find_largest_masters,
    make_compute_copy,
    state_shardings,
)


def checkpoint_specs(specs: StateSpecs) -> dict[str, Params]:
    """Return the specs of the checkpoint trees. Their layout is the same for every mesh: stacks by layer."""

    def stack_by_layer(spec: ParamSpec) -> ParamSpec:
        return spec if spec.layers is None else spec.unstack().stack(param.count_layers(spec))

    trees = {name: getattr(specs, name) for name in STORED if name != "frozen" or specs.keep_frozen}
    return {name: jax.tree.map(stack_by_layer, each) for name, each in trees.items() if jax.tree.leaves(each)}


def make_checkpoint_converter(specs: StateSpecs, placement: Placement) -> Callable[[TrainState], dict[str, Params]]:
    """Return a function from a state to its checkpoint trees.

    With a pipeline the trees are in host memory, converted one leaf at a time: the devices cannot hold the state twice.
    """
    saved_specs = checkpoint_specs(specs)

    def select(state: TrainState) -> dict[str, Params]:
        return {name: getattr(state, name) for name in saved_specs}

    @functools.cache
    def make_conversion(spec: ParamSpec, saved_spec: ParamSpec) -> Callable[[jax.Array], jax.Array]:
        def convert(array: jax.Array) -> jax.Array:
            return _stack_by_layer(spec, offload.fetch_to_device(array), placement)

        return jax.jit(convert, out_shardings=zero.checkpoint_sharding(saved_spec, placement))

    def to_host(spec: ParamSpec, saved_spec: ParamSpec, array: jax.Array) -> jax.Array:
        converted = make_conversion(_layout_only(spec), _layout_only(saved_spec))(array)
        return jax.block_until_ready(jax.device_put(converted, converted.sharding.with_memory_kind(offload.HOST)))

    if placement.size("pipeline") == 1:
        return select
    return lambda state: {
        name: jax.tree.map(to_host, getattr(specs, name), saved_specs[name], arrays)
        for name, arrays in select(state).items()
    }


def make_weight_reader(specs: StateSpecs, placement: Placement, target: Placement) -> Callable[[TrainState], Params]:
    """Return a function from a state to the model's parameters by layer, as `target` holds them.

    Arrays that rest in the state as `target` holds them are not copied. A copy of a master weight has the compute
    dtype. With an average, it is read in place of the masters.

    Args:
        target: a placement on the same devices, in the same order.
    """
    saved_specs = checkpoint_specs(replace(specs, keep_frozen=True))

    @functools.cache
    def make_conversion(
        spec: ParamSpec, dtype: np.dtype[Any], sharding: NamedSharding
    ) -> Callable[[jax.Array], jax.Array]:
        def convert(array: jax.Array) -> jax.Array:
            return _stack_by_layer(spec, offload.fetch_to_device(array), placement).astype(dtype)

        return jax.jit(convert, out_shardings=sharding)

    def read(spec: ParamSpec, saved_spec: ParamSpec, array: jax.Array, dtype: np.dtype[Any]) -> jax.Array | Rows:
        sharding = zero.resting_parameter_sharding(saved_spec, target)
        if spec.leading < 2 and array.sharding.is_equivalent_to(sharding, array.ndim):
            return share_stack(array) if spec.leading else array
        array = make_conversion(_layout_only(spec), dtype, sharding)(array)
        return split_stack(array) if spec.leading else array

    def read_master(spec: ParamSpec, saved_spec: ParamSpec, array: jax.Array) -> jax.Array | Rows:
        return read(spec, saved_spec, array, np.dtype(target.precision.for_param(spec).compute_dtype))

    def read_frozen(spec: ParamSpec, saved_spec: ParamSpec, array: jax.Array) -> jax.Array | Rows:
        return read(spec, saved_spec, array, array.dtype)

    def read_all(state: TrainState) -> Params:
        masters = jax.tree.map(read_master, specs.masters, saved_specs["masters"], state.averaged_masters)
        if "frozen" not in saved_specs:
            return gather_periods(masters)
        frozen = jax.tree.map(read_frozen, specs.frozen, saved_specs["frozen"], state.frozen)
        return gather_periods(tree.merge(masters, frozen))

    return read_all


def _stack_by_layer(spec: ParamSpec, array: jax.Array, placement: Placement) -> jax.Array:
    """Stack an array by layer within a program: [virtual, stages, slots, ...] -> [repeats, ...]."""
    if spec.leading < 2:
        return array
    layers = np.ravel(np.asarray(spec.layers))
    # Remove the stage sharding first: each device then selects rows locally, without communication.
    rows = spec.unstack().stack(layers.size)
    flat = jax.lax.with_sharding_constraint(array.reshape(rows.shape), zero.checkpoint_sharding(rows, placement))
    return flat[np.argsort(layers)[-param.count_layers(spec) :]]


def _layout_only(spec: ParamSpec) -> ParamSpec:
    """Return the spec without the fields that do not affect its layout, so that similar leaves share one program."""
    return replace(spec, contracting=(), init=param.ones)


def resume_state(specs: StateSpecs, step: int, placement: Placement, **trees: tree.Tree) -> TrainState:
    """Return the state after `step` from its checkpoint trees, and make again what is a function of the masters.

    It deletes the arrays that it receives one by one, because the devices cannot hold the state twice.

    Args:
        trees: those of `checkpoint_specs`, and the frozen parameters if the checkpoint does not hold them, which may
            already have their final sharding and layout.
    """

    def stack_by_stage(spec: ParamSpec, array: jax.Array) -> jax.Array:
        """Stack an array by stage: [repeats, ...] -> [virtual, stages, slots, ...], zeros in slots without a layer."""
        layers = np.asarray(spec.layers)
        live = np.reshape(layers >= 0, layers.shape + (1,) * (array.ndim - 1))
        return jnp.where(live, array[np.maximum(layers, 0)], 0)

    def move(sharding: NamedSharding, array: jax.Array) -> jax.Array:
        if array.sharding == sharding:
            return array
        moved = jax.block_until_ready(jax.device_put(array, sharding, may_alias=False))
        array.delete()
        return moved

    @functools.cache
    def make_conversion(spec: ParamSpec, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(lambda array: stack_by_stage(spec, offload.fetch_to_device(array)), out_shardings=sharding)

    def convert(spec: ParamSpec, sharding: NamedSharding, array: jax.Array) -> jax.Array:
        if array.shape == spec.shape:
            return move(sharding, array)
        converted = jax.block_until_ready(make_conversion(_layout_only(spec), sharding)(array))
        array.delete()
        return converted

    def make(trees: dict[str, tree.Tree]) -> TrainState:
        return TrainState(step=jnp.int32(step), **trees)

    def convert_tree(name: str) -> tree.Tree:
        expected = getattr(specs, name)  # without leaves if the checkpoint has no such tree
        return jax.tree.map(convert, expected, getattr(shardings, name), trees.get(name, expected))

    shardings = state_shardings(specs, placement)
    converted = {name: convert_tree(name) for name in STORED}
    compute = make_compute_copy(specs.masters, converted["masters"], shardings.compute, placement)
    largest = find_largest_masters(specs, converted["masters"], shardings.largest)
    state = {**converted, "compute": compute, "largest": largest}
    return jax.jit(make, out_shardings=shardings, donate_argnums=0)(state)
