"""The training state, and where it rests."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from jaxopt_llm import tree
from jaxopt_llm.model import leaves, param
from jaxopt_llm.model.decoder import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import guard, loss_scale, update
from jaxopt_llm.training.guard import Guard
from jaxopt_llm.training.loss_scale import LossScale
from jaxopt_llm.training.update import Optimizers

MADE_AT_ONCE = 2**30  # bytes on each device, of initial values that go to the host; a leaf may be more


@struct.dataclass
class TrainState:
    """step: int32, of the batches seen; masters, moments: of the trainable parameters; compute: their compute copy
    where one rests (ZeRO stages 1 and 2), else None; frozen: the parameters without masters or moments; guard: of the
    steps that were skipped (see guard.py); loss_scale: see loss_scale.py, empty where there is none."""

    step: tree.Leaf
    masters: Params
    moments: Params
    compute: Params | None
    frozen: Params
    guard: Guard
    loss_scale: LossScale

    @property
    def trainable(self) -> Params:
        """What the model reads and is differentiated by."""
        return self.masters if self.compute is None else self.compute

    @property
    def updatable(self) -> update.State:
        """What the optimizer changes."""
        return self.masters, self.moments, self.compute


@dataclass(frozen=True)
class StateSpecs:
    """A ParamSpec for every leaf of the state but `compute`, which is cast from the masters.

    keep_frozen: whether a checkpoint holds the frozen parameters. Without, they are where they came from.
    """

    masters: Params
    moments: Params
    frozen: Params
    guard: Guard
    loss_scale: LossScale
    keep_frozen: bool = True


def state_specs(
    specs: Params, frozen: Params, optimizers: Optimizers, precision: PrecisionConfig, keep_frozen: bool = True
) -> StateSpecs:
    """specs: of the trainable parameters, frozen: of the others: the halves of a `tree.partition`."""
    moments = update.state_specs(optimizers, specs)
    return StateSpecs(specs, moments, frozen, guard.specs(), loss_scale.specs(precision), keep_frozen)


def shardings(specs: StateSpecs, placement: Placement) -> TrainState:
    """Where each leaf of the state rests, as a TrainState of shardings."""
    # Adapters, which are few, stay on the device where the base that they adapt does not.
    trained = placement.parameters if jax.tree.leaves(specs.frozen) else placement.resting_parameters
    return TrainState(
        step=placement.replicated,
        masters=jax.tree.map(placement.optimizer_state if placement.compute_copy else trained, specs.masters),
        moments=jax.tree.map(placement.optimizer_state, specs.moments),
        compute=jax.tree.map(trained, specs.masters) if placement.compute_copy else None,
        frozen=jax.tree.map(placement.resting_parameters, specs.frozen),
        guard=jax.tree.map(lambda spec: placement.replicated, specs.guard),
        loss_scale=jax.tree.map(lambda spec: placement.replicated, specs.loss_scale),
    )


def abstract(specs: StateSpecs, placement: Placement) -> TrainState:
    """The state as ShapeDtypeStructs with shardings: what to compile for, or to restore into."""

    def shape(spec: ParamSpec, dtype: jnp.dtype | str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, dtype)

    def own(tree_of_specs: tree.Tree) -> tree.Tree:
        return jax.tree.map(lambda spec: shape(spec, spec.dtype), tree_of_specs)

    shapes = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        masters=own(specs.masters),
        moments=own(specs.moments),
        compute=jax.tree.map(lambda spec: shape(spec, placement.precision.of(spec).compute_dtype), specs.masters)
        if placement.compute_copy
        else None,
        frozen=own(specs.frozen),
        guard=own(specs.guard),
        loss_scale=own(specs.loss_scale),
    )
    # Devices of a topology have no memories, and shardings over them forget the host's. Over the abstract mesh they do
    # not.
    typed = shardings(specs, replace(placement, mesh=placement.mesh.abstract_mesh))

    def place(leaf: jax.ShapeDtypeStruct, resting: NamedSharding, typed: NamedSharding) -> jax.ShapeDtypeStruct:
        sharding = typed if typed.memory_kind == offload.HOST else resting
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, shardings(specs, placement), typed)


def compute_copies(specs: Params, masters: Params, resting: Params | None, placement: Placement) -> Params | None:
    """The compute copy, where one rests: a leaf at a time, so that the device need not hold it twice."""

    def copy(spec: ParamSpec, resting: NamedSharding, master: jax.Array) -> jax.Array:
        return jax.jit(lambda x: compute_copy(spec, x, placement), out_shardings=resting)(master)

    return None if resting is None else jax.tree.map(copy, specs, resting, masters)


def compute_copy(specs: tree.Tree, masters: tree.Tree, placement: Placement) -> tree.Tree:
    """The parameters the model reads, cast and gathered from the masters; None where it reads the masters."""
    return placement.compute_parameters(specs, offload.fetch(masters)) if placement.compute_copy else None


def initialize(
    specs: StateSpecs, optimizers: Optimizers, seed: int, placement: Placement, given: Params | None = None
) -> TrainState:
    """The state before the first step, each device making its own part.

    given: parameters that come from elsewhere, as they rest, with None for the others: these alone are drawn.
    """

    def make() -> TrainState:
        params = leaves.initialize(tree.merge(specs.masters, specs.frozen), seed)
        masters = tree.restrict(params, specs.masters)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            masters=masters,
            moments=update.init(optimizers, specs.masters, masters),
            compute=None,
            frozen=tree.restrict(params, specs.frozen),
            guard=guard.initialize(),
            loss_scale=loss_scale.initialize(placement.precision),
        )

    resting = shardings(specs, placement)
    where = dict(tree.leaves_with_path(replace(resting, compute=None)))
    halves = {"masters": specs.masters, "frozen": specs.frozen}
    state = dict(tree.leaves_with_path({name: tree.restrict(given, half) for name, half in halves.items()}))

    def made(paths: Sequence[str]) -> dict[str, jax.Array]:
        def some() -> dict[str, jax.Array]:  # XLA leaves out what only the others want
            every = dict(tree.leaves_with_path(make()))
            return {path: every[path] for path in paths}

        return jax.jit(some, out_shardings={path: where[path] for path in paths})()

    # What rests on the host is made by several programs: one has all that it makes on the device before it moves any.
    turns: list[list[str]] = [[]]
    room = 0
    for path, leaf in tree.leaves_with_path(jax.eval_shape(make)):
        if path in state:
            continue
        if where[path].memory_kind != offload.HOST:
            turns[0].append(path)
            continue
        size = math.prod(where[path].shard_shape(leaf.shape)) * leaf.dtype.itemsize
        if size > room:
            turns.append([])
            room = MADE_AT_ONCE
        turns[-1].append(path)
        room -= size
    for turn in turns:
        state |= made(turn)
    whole = jax.tree.unflatten(jax.tree.structure(replace(resting, compute=None)), [state[path] for path in where])
    return replace(whole, compute=compute_copies(specs.masters, whole.masters, resting.compute, placement))


def checkpoint_specs(specs: StateSpecs) -> dict[str, Params]:
    """The trees that a checkpoint holds, in its one layout: stacks by layer, whatever the mesh."""

    def by_layer(spec: ParamSpec) -> ParamSpec:
        return spec if spec.layers is None else spec.layer().stack(param.depth(spec))

    names = ("masters", "moments", *(("frozen",) if specs.keep_frozen else ()), "guard", "loss_scale")
    trees = {name: getattr(specs, name) for name in names}
    return {name: jax.tree.map(by_layer, each) for name, each in trees.items() if jax.tree.leaves(each)}


def kept(specs: StateSpecs, placement: Placement) -> Callable[[TrainState], dict[str, Params]]:
    """The function that gives what a checkpoint holds of a state. A pipeline's comes in the host's memory, a leaf at a
    time: a whole state would not fit twice on the devices."""
    saved = checkpoint_specs(specs)

    def trees(state: TrainState) -> dict[str, Params]:
        return {name: getattr(state, name) for name in saved}

    def by_layer(spec: ParamSpec, array: jax.Array) -> jax.Array:
        """[virtual, stages, slots, ...] -> [repeats, ...]."""
        if spec.leading < 2:
            return array
        places = np.ravel(np.asarray(spec.layers))
        # First off the stages: rows are then taken on each device, not sent.
        rows = spec.layer().stack(places.size)
        flat = jax.lax.with_sharding_constraint(array.reshape(rows.shape), placement.saved(rows))
        return flat[np.argsort(places)[-param.depth(spec) :]]

    @functools.cache
    def convert(resting: ParamSpec, saved: ParamSpec) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(lambda x: by_layer(resting, offload.fetch(x)), out_shardings=placement.saved(saved))

    def to_host(resting: ParamSpec, saved: ParamSpec, array: jax.Array) -> jax.Array:
        converted = convert(_placed(resting), _placed(saved))(array)
        return jax.block_until_ready(jax.device_put(converted, converted.sharding.with_memory_kind(offload.HOST)))

    if placement.size("pipeline") == 1:
        return trees
    return lambda state: {
        name: jax.tree.map(to_host, getattr(specs, name), saved[name], arrays) for name, arrays in trees(state).items()
    }


def _placed(spec: ParamSpec) -> ParamSpec:
    """What says where it is and no more: one program serves all leaves that are alike in that."""
    return replace(spec, contracting=(), init=param.ones)


def resume(
    specs: StateSpecs,
    step: int,
    placement: Placement,
    masters: Params,
    moments: Params,
    guard: Guard,
    frozen: Params | None = None,
    loss_scale: LossScale | None = None,
) -> TrainState:
    """The state at a checkpoint's step, of what `kept` gave; the compute copy is made again. The arrays it is given are
    used up as it goes: a whole state would not fit twice. frozen: may be at rest already."""

    def on_stages(spec: ParamSpec, array: jax.Array) -> jax.Array:
        """[repeats, ...] -> [virtual, stages, slots, ...], zeros where a slot holds no layer."""
        places = np.asarray(spec.layers)
        live = np.reshape(places >= 0, places.shape + (1,) * (array.ndim - 1))
        return jnp.where(live, array[np.maximum(places, 0)], 0)

    def move(resting: NamedSharding, array: jax.Array) -> jax.Array:
        if array.sharding == resting:
            return array
        moved = jax.block_until_ready(jax.device_put(array, resting, may_alias=False))
        array.delete()
        return moved

    @functools.cache
    def convert(spec: ParamSpec, resting: NamedSharding) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(lambda x: on_stages(spec, offload.fetch(x)), out_shardings=resting)

    def to_rest(spec: ParamSpec, resting: NamedSharding, array: jax.Array) -> jax.Array:
        if array.shape == spec.shape:
            return move(resting, array)
        moved = jax.block_until_ready(convert(_placed(spec), resting)(array))
        array.delete()
        return moved

    def make(
        masters: Params,
        moments: Params,
        compute: Params | None,
        frozen: Params,
        guard: Guard,
        loss_scale: LossScale,
    ) -> TrainState:
        return TrainState(jnp.int32(step), masters, moments, compute, frozen, guard, loss_scale)

    resting = shardings(specs, placement)
    frozen = specs.frozen if frozen is None else frozen
    given = {"masters": masters, "moments": moments, "frozen": frozen, "guard": guard, "loss_scale": loss_scale or {}}
    moved = {
        name: jax.tree.map(to_rest, getattr(specs, name), getattr(resting, name), arrays)
        for name, arrays in given.items()
    }
    compute = compute_copies(specs.masters, moved["masters"], resting.compute, placement)
    return jax.jit(make, out_shardings=resting, donate_argnums=(0, 1, 2, 3, 4, 5))(compute=compute, **moved)
