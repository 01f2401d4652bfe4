"""Initial parameters from weights that are there already, and adapters from a folder of PEFT's; without one they begin
as the initialiser has them."""

from dataclasses import replace
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxopt_llm import tree
from jaxopt_llm.checkpoint.peft import Adapter
from jaxopt_llm.model import leaves
from jaxopt_llm.model.decoder import Params
from jaxopt_llm.model.leaves import CODED, CodedWeight, LoraWeight
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.state import StateSpecs


class Weights(Protocol):
    """Bare parameters that are read by the paths of our leaves: a Hugging Face folder's, or a run's."""

    def dtype(self, path: str) -> np.dtype:
        """Of what is stored of a leaf."""

    def read(self, path: str, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
        """A leaf, or some layers of its stack, as the spec has them."""


def read(weights: Weights, specs: StateSpecs, placement: Placement) -> Params:
    """The parameters as a state holds them, with None for the factors of adapters, which the weights have none of."""

    def leaf(path: tuple[object, ...], spec: tree.Leaf, resting: tree.Leaf) -> tree.Leaf:
        name = tree.path_string(path)
        if isinstance(spec, LoraWeight):
            spec, resting = (replace(each, lora_a=None, lora_b=None) for each in (spec, resting))
            if spec.magnitude is None and isinstance(spec.base, ParamSpec):
                return replace(spec, base=weights.read(name, spec.base, resting.base))
        if isinstance(spec, ParamSpec):
            return weights.read(name, spec, resting)
        return _by_slot(weights, name, spec, resting, placement)

    resting = training_state.shardings(specs, placement)
    return jax.tree_util.tree_map_with_path(
        leaf,
        tree.merge(specs.masters, specs.frozen),
        tree.merge(resting.masters, resting.frozen),
        is_leaf=leaves.is_wrapped,
    )


def read_frozen(weights: Weights, frozen: Params, placement: Placement) -> Params:
    """The parameters that a state does not train, which no checkpoint needs to hold. frozen: their specs."""
    nothing = jax.tree.map(lambda spec: None, frozen)
    return read(weights, StateSpecs(nothing, {}, frozen, {}, {}), placement)


def in_own_dtypes(weights: Weights, frozen: Params) -> Params:
    """The specs of frozen parameters with the dtypes that the weights have them in; codes stay codes."""

    def leaf(path: tuple[object, ...], spec: tree.Leaf) -> tree.Leaf:
        if isinstance(spec, LoraWeight):
            return replace(spec, base=leaf(path, spec.base))
        return replace(spec, dtype=weights.dtype(tree.path_string(path))) if isinstance(spec, ParamSpec) else spec

    return jax.tree_util.tree_map_with_path(leaf, frozen, is_leaf=leaves.is_wrapped)


def with_adapter(given: Params | None, adapter: Adapter, specs: StateSpecs, placement: Placement) -> Params:
    """The same with the folder's adapters."""

    def leaf(path: str, spec: ParamSpec, resting: NamedSharding) -> jax.Array | None:
        return adapter.read(path, spec, resting) if leaves.is_adapter(path) else None

    masters = tree.map_with_path(leaf, specs.masters, training_state.shardings(specs, placement).masters)
    return masters if given is None else tree.merge(masters, given)


def _by_slot(
    weights: Weights, path: str, spec: CodedWeight | LoraWeight, resting: tree.Leaf, placement: Placement
) -> tree.Leaf:
    """A stack that is made of the given one, one slot after the other, each stage its own layer at once: beside what
    rests a device holds one layer of it as it was stored."""
    base = spec.base if isinstance(spec, LoraWeight) else spec
    bare = leaves.bare(spec)
    # Codes are made of the stored dtype, which is often the narrower.
    dtype = weights.dtype(path) if isinstance(base, CODED) else base.dtype
    axis = bare.leading - 1

    def with_slot(stack: tree.Leaf, row: jax.Array, slot: jax.Array) -> tree.Leaf:
        new = offload.store(leaves.over(spec, row), stack)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, slot, axis), stack, new)

    put = jax.jit(with_slot, donate_argnums=0, out_shardings=resting)
    stack = jax.tree.map(_zeros, spec, resting)
    numbers = np.asarray(bare.layers)
    for slot in range(numbers.shape[axis]):
        one = replace(bare.layer().stack(numbers[..., slot : slot + 1]), dtype=dtype)
        stack = jax.block_until_ready(put(stack, weights.read(path, one, placement.parameters(one)), slot))
    return stack


def _zeros(spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
    """By way of the host's memory, where they take none: what rests there need never fit the device."""

    def part(index: Any) -> np.ndarray:
        return np.zeros([len(range(size)[each]) for size, each in zip(spec.shape, index, strict=True)], spec.dtype)

    return jax.make_array_from_callback(spec.shape, sharding, part)
