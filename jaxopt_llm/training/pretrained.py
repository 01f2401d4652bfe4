"""Initial parameters from a Hugging Face folder, and adapters from one of PEFT's; without it they begin as the
initialiser has them."""

import functools
from dataclasses import replace

import jax
from jax.sharding import NamedSharding

from jaxopt_llm import tree
from jaxopt_llm.checkpoint.huggingface import Folder
from jaxopt_llm.checkpoint.peft import Adapter
from jaxopt_llm.model import leaves
from jaxopt_llm.model.leaves import CodedWeight, LoraWeight
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.state import StateSpecs, TrainState


def put(folder: Folder, state: TrainState, specs: StateSpecs, placement: Placement) -> TrainState:
    """An initial state with the folder's parameters. A leaf at a time, and the one that it replaces goes first: a whole
    state would not fit twice."""

    def base(path: str, spec: tree.Leaf, resting: tree.Leaf, old: tree.Leaf) -> tree.Leaf:
        jax.tree.map(lambda x: x.delete(), old)
        if isinstance(spec, ParamSpec):
            return folder.read(path, spec, resting)
        # In the folder's own dtype, which is often the narrower: no float32 copy of a stack exists.
        held = replace(leaves.bare(spec), dtype=folder.dtype(path))
        array = folder.read(path, held, placement.parameters(held))
        quantise = jax.jit(lambda x: leaves.quantise(x, spec), out_shardings=resting)
        codes: CodedWeight = quantise(array)
        return codes

    def leaf(path: tuple[object, ...], spec: tree.Leaf, resting: tree.Leaf, old: tree.Leaf) -> tree.Leaf:
        name = tree.path_string(path)
        if isinstance(spec, LoraWeight):
            array = base(name, spec.base, resting.base, old.base)
            if spec.magnitude is None:
                return replace(old, base=array)
            length = jax.jit(functools.partial(leaves.magnitude, spec), out_shardings=resting.magnitude)
            return replace(old, base=array, magnitude=length(array))
        return base(name, spec, resting, old)

    resting = training_state.shardings(specs, placement)
    params = jax.tree_util.tree_map_with_path(
        leaf,
        tree.merge(specs.masters, specs.frozen),
        tree.merge(resting.masters, resting.frozen),
        tree.merge(state.masters, state.frozen),
        is_leaf=leaves.is_wrapped,
    )
    masters, frozen = (tree.restrict(params, half) for half in (specs.masters, specs.frozen))
    jax.tree.map(lambda x: x.delete(), state.compute)
    compute = training_state.compute_copies(specs.masters, masters, resting.compute, placement)
    return replace(state, masters=masters, frozen=frozen, compute=compute)


def put_adapter(adapter: Adapter, state: TrainState, specs: StateSpecs, placement: Placement) -> TrainState:
    """An initial state with the folder's adapters."""

    def leaf(path: str, spec: ParamSpec, resting: NamedSharding, old: jax.Array) -> jax.Array:
        return adapter.read(path, spec, resting) if leaves.is_adapter(path) else old

    resting = training_state.shardings(specs, placement)
    masters = tree.map_with_path(leaf, specs.masters, resting.masters, state.masters)
    compute = training_state.compute_copies(specs.masters, masters, resting.compute, placement)
    return replace(state, masters=masters, compute=compute)
