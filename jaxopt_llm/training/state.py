"""The training state, and where it rests."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding

from jaxopt_llm import tree
from jaxopt_llm.model import leaves, param
from jaxopt_llm.model.decoder import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import guard, update
from jaxopt_llm.training.guard import Guard
from jaxopt_llm.training.update import Optimizers


@struct.dataclass
class TrainState:
    """step: int32, of the batches seen; masters, moments: of the trainable parameters; compute: their compute copy
    where one rests (ZeRO stages 1 and 2), else None; frozen: the parameters without masters or moments; guard: of the
    steps that were skipped (see guard.py)."""

    step: tree.Leaf
    masters: Params
    moments: Params
    compute: Params | None
    frozen: Params
    guard: Guard

    @property
    def trainable(self) -> Params:
        """What the model reads and is differentiated by."""
        return self.masters if self.compute is None else self.compute


@dataclass(frozen=True)
class StateSpecs:
    """A ParamSpec for every leaf of the state but `compute`, which is cast from the masters."""

    masters: Params
    moments: Params
    frozen: Params
    guard: Guard


def state_specs(specs: Params, frozen: Params, optimizers: Optimizers) -> StateSpecs:
    """specs: of the trainable parameters, frozen: of the others: the halves of a `tree.partition`."""
    return StateSpecs(specs, update.state_specs(optimizers, specs), frozen, guard.specs())


def shardings(specs: StateSpecs, placement: Placement) -> TrainState:
    """Where each leaf of the state rests, as a TrainState of shardings."""
    return TrainState(
        step=placement.replicated,
        masters=jax.tree.map(placement.masters, specs.masters),
        moments=jax.tree.map(placement.masters, specs.moments),
        compute=jax.tree.map(placement.parameters, specs.masters) if placement.compute_copy else None,
        frozen=jax.tree.map(placement.parameters, specs.frozen),
        guard=jax.tree.map(lambda spec: placement.replicated, specs.guard),
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
        compute=jax.tree.map(lambda spec: shape(spec, placement.precision.compute_dtype), specs.masters)
        if placement.compute_copy
        else None,
        frozen=own(specs.frozen),
        guard=own(specs.guard),
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(specs, placement),
    )


def compute_copy(specs: Params, masters: Params, placement: Placement) -> Params | None:
    """The parameters the model reads, cast and gathered from the masters; None where it reads the masters."""
    return placement.compute_parameters(specs, masters) if placement.compute_copy else None


def initialize(specs: StateSpecs, optimizers: Optimizers, seed: int, placement: Placement) -> TrainState:
    """The state before the first step, each device making its own part."""

    def make() -> TrainState:
        params = leaves.initialize(tree.merge(specs.masters, specs.frozen), seed)
        masters = tree.restrict(params, specs.masters)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            masters=masters,
            moments=update.init(optimizers, specs.masters, masters),
            compute=compute_copy(specs.masters, masters, placement),
            frozen=tree.restrict(params, specs.frozen),
            guard=guard.initialize(),
        )

    return jax.jit(make, out_shardings=shardings(specs, placement))()


def checkpoint_specs(specs: StateSpecs) -> dict[str, Params]:
    """The trees that a checkpoint holds, in its one layout: stacks by layer, whatever the mesh."""

    def by_layer(spec: ParamSpec) -> ParamSpec:
        return spec if spec.layers is None else spec.layer().stack(param.depth(spec))

    trees = {"masters": specs.masters, "moments": specs.moments, "frozen": specs.frozen, "guard": specs.guard}
    return {name: jax.tree.map(by_layer, each) for name, each in trees.items() if jax.tree.leaves(each)}


def kept(specs: StateSpecs, placement: Placement) -> Callable[[TrainState], dict[str, Params]]:
    """The function that gives what a checkpoint holds of a state. A pipeline's comes in the host's memory, a section at
    a time: a whole state would not fit twice on the devices."""
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
    def convert(name: str, section: str) -> Callable[[Params], Params]:
        resting = getattr(specs, name)[section]
        shardings = jax.tree.map(placement.saved, saved[name][section])
        return jax.jit(lambda arrays: jax.tree.map(by_layer, resting, arrays), out_shardings=shardings)

    def to_host(name: str, section: str, arrays: Params) -> Params:
        converted = convert(name, section)(arrays)
        on_host = jax.tree.map(lambda x: x.sharding.with_memory_kind("pinned_host"), converted)
        return jax.block_until_ready(jax.device_put(converted, on_host))

    if placement.size("pipeline") == 1:
        return trees
    return lambda state: {
        name: {section: to_host(name, section, arrays) for section, arrays in sections.items()}
        for name, sections in trees(state).items()
    }


def resume(
    specs: StateSpecs,
    step: int,
    placement: Placement,
    masters: Params,
    moments: Params,
    guard: Guard,
    frozen: Params | None = None,
) -> TrainState:
    """The state at a checkpoint's step, of what `kept` gave; the compute copy is made again. The arrays it is given are
    used up as it goes: a whole state would not fit twice."""

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

    def to_rest(specs: Params, resting: Params, arrays: Params) -> Params:
        """Of one section."""
        layers = param.layers(specs)
        if layers is None or layers.ndim == 1:
            return jax.tree.map(move, resting, arrays)
        moved = jax.jit(lambda x: jax.tree.map(on_stages, specs, x), out_shardings=resting)(arrays)
        jax.block_until_ready(moved)
        for array in jax.tree.leaves(arrays):
            array.delete()
        return moved

    def make(masters: Params, moments: Params, frozen: Params, guard: Guard) -> TrainState:
        return TrainState(
            step=jnp.int32(step),
            masters=masters,
            moments=moments,
            compute=compute_copy(specs.masters, masters, placement),
            frozen=frozen,
            guard=guard,
        )

    resting = shardings(specs, placement)
    frozen = specs.frozen if frozen is None else frozen
    given = {"masters": masters, "moments": moments, "frozen": frozen, "guard": guard}
    moved = {
        name: {
            section: to_rest(getattr(specs, name)[section], getattr(resting, name)[section], arrays)
            for section, arrays in sections.items()
        }
        for name, sections in given.items()
    }
    return jax.jit(make, out_shardings=resting, donate_argnums=(0, 1, 2, 3))(**moved)
