"""Training state, its sharding, and its conversion to checkpoint trees and back.

The layout of a checkpoint is the same for every mesh.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from jaxopt_llm.compiler import xla_options
from jaxopt_llm.config import PrecisionConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution.by_layer import Rows, gather_periods, share_stack, split_stack
from jaxopt_llm.model import param
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.linear.quantised import find_largest
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload, zero
from jaxopt_llm.parallel.gathering import cast_masters
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step import update
from jaxopt_llm.step.guard import (
    Guard,
    LossScale,
    guard_specs,
    initialize_guard,
    initialize_loss_scale,
    loss_scale_specs,
)
from jaxopt_llm.step.update import Optimizers

# Bytes per device of initial values in host memory that one program makes. One larger leaf has a program of its own.
HOST_BYTES_PER_PROGRAM = 2**30
# The fields of the state that have specs.
STORED = ("masters", "moments", "average", "frozen", "guard", "loss_scale", "variables", "groups")
# The fields that each group of devices has for itself with local steps.
GROUP_FIELDS = ("masters", "moments", "guard", "loss_scale")


@struct.dataclass
class TrainState:
    """State of the training.

    Attributes:
        step: int32, number of batches read.
        masters: master weights of the trainable parameters.
        moments: optimizer state of the trainable parameters.
        compute: compute copy of the trainable parameters, kept between steps (zero.has_compute_copy); otherwise None.
        frozen: parameters without master weights or moments.
        guard: see guard.py.
        loss_scale: see guard.py; empty without loss scaling.
            With several losses (program.py), `moments`, `guard` and `loss_scale` are dicts by the name of the loss.
        variables: the model's variables that are not parameters, such as running means; empty for the decoder.
        average: average of the masters, placed as the moments (update.py); None without `training.ema_decay`.
        groups: GROUP_FIELDS of each group of devices, [G, ...]; empty without local steps (local_steps.py), which give
            `masters` and `moments` another meaning.
        largest: largest magnitude of each master that fp8 rounds, from which comes the scale of its codes: the update
            finds it, and no other kernel reads the masters for it. None where the step does not need it.
        teacher: parameters of the model that the trained one learns from (teacher.py); None without a teacher.
    """

    step: tree.Leaf
    masters: Params
    moments: Params
    compute: Params | None
    frozen: Params
    guard: Guard
    loss_scale: LossScale
    variables: Params = field(default_factory=dict)
    average: Params | None = None
    groups: dict[str, tree.Tree] = field(default_factory=dict)
    largest: Params | None = None
    teacher: Params | None = None

    @property
    def trainable(self) -> Params:
        """Values of the trained parameters that the model reads: the compute copy if there is one, else the masters."""
        return self.masters if self.compute is None else self.compute

    @property
    def all_parameters(self) -> tree.Tree:
        """Parameters in all their copies, and those of the teacher."""
        return self.masters, self.compute, self.frozen, self.groups.get("masters"), self.teacher

    @property
    def optimizer_state(self) -> tree.Tree:
        """State that belongs to the trained parameters and that only the update reads."""
        return self.moments, self.average, self.groups.get("moments")

    @property
    def updatable(self) -> update.Updatable:
        """Return the part that the update changes."""
        return update.Updatable(self.masters, self.moments, self.compute, self.average, self.largest)

    @property
    def averaged_masters(self) -> Params:
        """Values of the trained parameters to use outside of training: their average if there is one."""
        return self.masters if self.average is None else self.average


@dataclass(frozen=True)
class StateSpecs:
    """ParamSpecs of all leaves of the state, except for `compute`, which is a cast of the masters.

    Attributes:
        keep_frozen: checkpoints also hold the frozen parameters. If False, a resume reads them from their source.
        one_group: with local steps, specs of the state of one group; otherwise None.
        largest: None if the state has none. Checkpoints never hold them: a resume finds them in the masters.
        teacher: None without a teacher. Checkpoints never hold it: it is read from its folder.
    """

    masters: Params
    moments: Params
    frozen: Params
    guard: Guard
    loss_scale: LossScale
    keep_frozen: bool = True
    variables: Params = field(default_factory=dict)
    average: Params | None = None
    groups: dict[str, tree.Tree] = field(default_factory=dict)
    one_group: "StateSpecs | None" = None
    largest: Params | None = None
    teacher: Params | None = None


def make_state_specs(
    specs: Params,
    frozen: Params,
    optimizers: Optimizers,
    precision: PrecisionConfig,
    keep_frozen: bool = True,
    averages: bool = False,
) -> StateSpecs:
    """Return the specs of the state.

    Args:
        specs, frozen: specs of the trainable and of the frozen parameters, the two halves of a `tree.partition`.
        averages: whether there is an average of the trainable parameters.
    """
    moments = update.moment_specs(optimizers, specs)
    average = specs if averages else None
    guard = update.for_each_loss(optimizers, guard_specs)
    loss_scale = update.for_each_loss(optimizers, functools.partial(loss_scale_specs, precision))
    return StateSpecs(specs, moments, frozen, guard, loss_scale, keep_frozen, average=average)


def state_shardings(specs: StateSpecs, placement: Placement) -> TrainState:
    """Return the sharding of each leaf of the state between steps, as a TrainState of shardings."""
    # Adapters are small and stay on the device even if their base is offloaded.
    trained_sharding = zero.parameter_sharding if jax.tree.leaves(specs.frozen) else zero.resting_parameter_sharding
    moments_sharding = zero.scattered_sharding if specs.groups else zero.optimizer_state_sharding
    update_sharding = zero.optimizer_state_sharding if zero.has_compute_copy(placement) else trained_sharding
    return TrainState(
        step=placement.replicated,
        masters=update_sharding(specs.masters, placement),
        moments=moments_sharding(specs.moments, placement),
        compute=trained_sharding(specs.masters, placement) if zero.has_compute_copy(placement) else None,
        frozen=zero.resting_parameter_sharding(specs.frozen, placement),
        guard=jax.tree.map(lambda spec: placement.replicated, specs.guard),
        loss_scale=jax.tree.map(lambda spec: placement.replicated, specs.loss_scale),
        variables=zero.variable_sharding(specs.variables, placement),
        average=zero.optimizer_state_sharding(specs.average, placement),
        groups=zero.master_sharding(specs.groups, placement),
        largest=zero.parameter_sharding(specs.largest, placement),
        teacher=zero.resting_parameter_sharding(specs.teacher, placement),
    )


def abstract_state(specs: StateSpecs, placement: Placement) -> TrainState:
    """Return the state as ShapeDtypeStructs with shardings, for compilation or as the target of a restore."""

    def shape(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype)

    def copy_shape(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, placement.precision.for_param(spec).compute_dtype)

    compute = jax.tree.map(copy_shape, specs.masters) if zero.has_compute_copy(placement) else None
    stored = {name: jax.tree.map(shape, getattr(specs, name)) for name in STORED}
    stored |= {name: jax.tree.map(shape, getattr(specs, name)) for name in ("largest", "teacher")}
    state = TrainState(step=jax.ShapeDtypeStruct((), jnp.int32), compute=compute, **stored)
    # Devices of a topology have no memory spaces, and a sharding over them loses the host memory kind. A sharding over
    # the abstract mesh keeps it.
    concrete, mesh = state_shardings(specs, placement), placement.mesh.abstract_mesh
    abstract = concrete if placement.mesh is mesh else state_shardings(specs, replace(placement, mesh=mesh))

    def add_sharding(leaf: jax.ShapeDtypeStruct, concrete: NamedSharding, abstract: NamedSharding) -> tree.Leaf:
        return leaf.update(sharding=abstract if abstract.memory_kind == offload.HOST else concrete)

    return jax.tree.map(add_sharding, state, concrete, abstract)


def _convert_masters(
    convert: Callable[[ParamSpec, jax.Array], jax.Array], specs: tree.Tree, masters: Params, shardings: Params | None
) -> Params | None:
    """Return what a function of spec and array makes of each master; None if `shardings` is None.

    It converts one leaf at a time, so that the device does not hold the whole twice.
    """

    def convert_leaf(spec: ParamSpec, sharding: NamedSharding, master: jax.Array) -> jax.Array:
        def run(master: jax.Array) -> jax.Array:
            return convert(spec, offload.fetch_to_device(master))

        return jax.jit(run, out_shardings=sharding)(master)

    return None if shardings is None else jax.tree.map(convert_leaf, specs, shardings, masters)


def _derive_from_masters(
    specs: StateSpecs, masters: Params, shardings: TrainState, placement: Placement
) -> dict[str, Params | None]:
    """Return the parts of a state that are functions of its masters: the compute copy, and the largest magnitudes."""

    def cast(spec: ParamSpec, master: jax.Array) -> jax.Array:
        return cast_masters(spec, master, placement)

    def find(spec: ParamSpec, master: jax.Array) -> jax.Array:
        return find_largest(master, spec.leading)

    rounded = masters if specs.largest is None else tree.restrict(masters, specs.largest)
    return {
        "compute": _convert_masters(cast, specs.masters, masters, shardings.compute),
        "largest": _convert_masters(find, specs.largest, rounded, shardings.largest),  # None without specs
    }


def use_average(state: TrainState, specs: StateSpecs, placement: Placement) -> TrainState:
    """Return the state with the average, if there is one, in place of the masters and in their compute copy.

    It copies the average only where it rests in another memory than the masters, and for a compute copy.
    """
    if state.average is None:
        return state
    shardings = state_shardings(specs, placement)
    masters = jax.tree.map(jax.device_put, state.average, shardings.masters)
    compute = _derive_from_masters(replace(specs, largest=None), masters, shardings, placement)["compute"]
    return replace(state, masters=masters, compute=compute)


def initialize_state(
    specs: StateSpecs,
    optimizers: Optimizers,
    seed: int,
    placement: Placement,
    given: Params | None = None,
    make_values: Callable[[], tuple[Params, Params]] | None = None,
) -> TrainState:
    """Return the state before the first step, without the teacher. Each device makes its own shards.

    Args:
        given: parameters from another source, with their final sharding, and None for those that are drawn at random.
        make_values: traced function that returns the initial parameters and variables; by default parameters are drawn
            as their specs say, and there are no variables.
    """

    def make(given: Params) -> TrainState:
        params, variables = (
            make_values() if make_values else (leaves.initialize(tree.merge(specs.masters, specs.frozen), seed), {})
        )
        # Moments may depend on the masters, such as averages of them.
        masters = tree.merge(offload.fetch_to_device(given), tree.restrict(params, specs.masters))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            masters=masters,
            moments=update.initialize_moments(optimizers, specs.masters, masters),
            compute=None,
            frozen=tree.restrict(params, specs.frozen),
            guard=update.for_each_loss(optimizers, initialize_guard),
            loss_scale=update.for_each_loss(optimizers, functools.partial(initialize_loss_scale, placement.precision)),
            variables=variables,
        )

    shardings = state_shardings(specs, placement)
    drawn = replace(shardings, compute=None, average=None, largest=None, teacher=None)
    sharding_by_path = dict(tree.leaves_with_path(drawn))
    given_halves = {"masters": tree.restrict(given, specs.masters), "frozen": tree.restrict(given, specs.frozen)}
    state = dict(tree.leaves_with_path(given_halves))

    def make_leaves(paths: Sequence[str]) -> dict[str, jax.Array]:
        def make_selected(given: Params) -> dict[str, jax.Array]:  # XLA removes what only the other leaves need
            by_path = dict(tree.leaves_with_path(make(given)))
            return {path: by_path[path] for path in paths}

        selected = jax.jit(
            make_selected,
            out_shardings={path: sharding_by_path[path] for path in paths},
            compiler_options=xla_options.initialization_options(placement.mesh),
        )
        made: dict[str, jax.Array] = selected(given_halves["masters"])
        return made

    made = jax.eval_shape(make, given_halves["masters"])
    shapes = {path: leaf for path, leaf in tree.leaves_with_path(made) if path not in state}
    for paths in _divide_into_programs(shapes, sharding_by_path):
        state |= make_leaves(paths)
    whole = jax.tree.unflatten(jax.tree.structure(drawn), [state[path] for path in sharding_by_path])
    # jit would return its argument itself.
    average = _convert_masters(lambda _, x: jnp.copy(x), specs.masters, whole.masters, shardings.average)
    return replace(whole, average=average, **_derive_from_masters(specs, whole.masters, shardings, placement))


def _divide_into_programs(
    shapes: Mapping[str, jax.ShapeDtypeStruct], shardings: Mapping[str, NamedSharding]
) -> list[list[str]]:
    """Return the paths of the leaves that each program makes.

    Several programs make the leaves in host memory: a program holds all its outputs on the device before it moves any.
    """
    programs: list[list[str]] = [[]]
    room = 0
    for path, leaf in shapes.items():
        if shardings[path].memory_kind != offload.HOST:
            programs[0].append(path)
            continue
        size = math.prod(shardings[path].shard_shape(leaf.shape)) * leaf.dtype.itemsize
        if size > room:
            programs.append([])
            room = HOST_BYTES_PER_PROGRAM
        programs[-1].append(path)
        room -= size
    return programs


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

    It has no teacher, which comes from its own folder.

    It deletes the arrays that it receives one by one, because the devices cannot hold the state twice.

    Args:
        trees: the trees of `checkpoint_specs`. If the checkpoint does not hold the frozen parameters, they are given
            too, and may already have their final sharding and layout.
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

    shardings = replace(state_shardings(specs, placement), teacher=None)
    converted = {name: convert_tree(name) for name in STORED}
    state = converted | _derive_from_masters(specs, converted["masters"], shardings, placement)
    return jax.jit(make, out_shardings=shardings, donate_argnums=0)(state)
