"""Leaf classes: what a weight can be beside one array.

Each is a pair of functions, spec -> tree of specs and array -> leaf, so that its leaves shard, scan, checkpoint and
count like any other. The fields hold whatever the tree holds: specs, arrays, shardings, `Placed` weights, None.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxopt_llm import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.param import FLOAT32, Initializer, ParamSpec, normal, zeros

INT8 = np.dtype(np.int8)


@struct.dataclass
class Int8Weight:
    """codes × scales: int8 codes of the weight's shape, and a float32 scale per output channel, [1] where a product
    sums, so that the error of a value is at most a 254th of its channel's largest."""

    codes: tree.Leaf
    scales: tree.Leaf


@struct.dataclass
class LoraWeight:
    """base + scale × A·B (Hu et al. 2021, arXiv:2106.09685).

    base: a leaf, or an Int8Weight.
    lora_a: [the dimensions that a product sums over, rank]; lora_b: [the others, rank]. The rank comes last in both: a
        stack divided along its minor dimension is transposed around the loop over it.
    """

    base: tree.Leaf
    lora_a: tree.Leaf
    lora_b: tree.Leaf
    scale: float = struct.field(pytree_node=False)


def is_adapter(path: str) -> bool:
    return path.endswith(("/lora_a", "/lora_b"))


# --- spec -> specs


def int8_specs(spec: ParamSpec) -> Int8Weight:
    summed = [dim in spec.contracting for dim in range(len(spec.shape))]
    scales = ParamSpec(
        shape=tuple(1 if each else size for each, size in zip(summed, spec.shape, strict=True)),
        axes=tuple(None if each else axis for each, axis in zip(summed, spec.axes, strict=True)),
        layers=spec.layers,
    )
    return Int8Weight(codes=replace(spec, dtype=INT8), scales=scales)


def lora_specs(spec: ParamSpec, rank: int, alpha: float) -> LoraWeight:
    """A starts random and B at zero: at first the weight is its base."""
    stack = tuple(range(spec.leading))
    others = tuple(dim for dim in range(len(spec.shape)) if dim not in (*stack, *spec.contracting))

    def factor(dims: tuple[int, ...], contracting: tuple[int, ...], init: Initializer) -> ParamSpec:
        shape = *(spec.shape[dim] for dim in (*stack, *dims)), rank
        axes = *(spec.axes[dim] for dim in (*stack, *dims)), None
        return ParamSpec(shape, axes, tuple(len(stack) + dim for dim in contracting), init, layers=spec.layers)

    summed = tuple(sorted(spec.contracting))
    return LoraWeight(
        base=spec,
        lora_a=factor(summed, tuple(range(len(summed))), normal()),
        lora_b=factor(others, (len(others),), zeros),
        scale=alpha / rank,
    )


def bare(specs: tree.Tree) -> tree.Tree:
    """The specs under what wraps them, and so under their bare paths."""

    def leaf(spec: ParamSpec | Int8Weight | LoraWeight) -> ParamSpec:
        if isinstance(spec, LoraWeight):
            return leaf(spec.base)
        return replace(spec.codes, dtype=FLOAT32) if isinstance(spec, Int8Weight) else spec

    return jax.tree.map(leaf, specs, is_leaf=is_wrapped)


def count(specs: tree.Tree) -> int:
    """Parameters: the bare ones and the adapters'. The scales of a quantised one are not more of them."""
    return param.count(bare(specs)) + param.count(tree.partition(specs, is_adapter)[0])


# --- array -> leaf


def quantise(array: jax.Array, contracting: tuple[int, ...]) -> Int8Weight:
    """Symmetric, to the nearest code: a channel's largest value is ±127."""
    array = array.astype(jnp.float32)
    scales = jnp.max(jnp.abs(array), axis=contracting, keepdims=True) / 127
    codes = jnp.round(array / jnp.where(scales > 0, scales, 1))
    return Int8Weight(codes.astype(jnp.int8), scales)


def dequantise(weight: Int8Weight) -> jax.Array:
    """float32."""
    return weight.codes.astype(jnp.float32) * weight.scales


def initialize(specs: tree.Tree, seed: int) -> tree.Tree:
    """Initial values. A base's are those of its bare path: adapters and quantisation draw no other."""
    return wrap(specs, param.initialize(bare(specs), seed), seed)


def wrap(specs: tree.Tree, arrays: tree.Tree, seed: int) -> tree.Tree:
    """The leaves of `specs` over given arrays of `bare(specs)`, with fresh adapters."""

    def leaf(spec: ParamSpec | Int8Weight | LoraWeight, array: jax.Array) -> tree.Leaf:
        if isinstance(spec, LoraWeight):
            return LoraWeight(leaf(spec.base, array), None, None, spec.scale)
        if isinstance(spec, Int8Weight):
            return quantise(array, spec.codes.contracting)
        return array.astype(spec.dtype)

    bases = jax.tree.map(leaf, specs, arrays, is_leaf=is_wrapped)
    adapters, _ = tree.partition(specs, is_adapter)
    return tree.merge(param.initialize(adapters, seed), bases)


def is_wrapped(leaf: tree.Leaf) -> bool:
    """Whether it stands, with several leaves, for one bare parameter."""
    return isinstance(leaf, (Int8Weight, LoraWeight))


def dtype(weight: tree.Leaf) -> np.dtype:
    """Of what it stands for: a base's own; float32 where that is codes."""
    if isinstance(weight, LoraWeight):
        return dtype(weight.base)
    return FLOAT32 if is_wrapped(weight) else np.dtype(weight.dtype)


def merged(weight: tree.Leaf, contracting: tuple[int, ...]) -> jax.Array:
    """What a weight outside stacks stands for, as one array: codes widened and adapters folded in, in float32.

    contracting: the dimensions that a product sums over.
    """
    if not isinstance(weight, LoraWeight):
        return dequantise(weight) if is_wrapped(weight) else weight
    base = merged(weight.base, contracting).astype(jnp.float32)
    others = [dim for dim in range(base.ndim) if dim not in contracting]
    rank = base.ndim
    product = jnp.einsum(
        *(weight.lora_a.astype(jnp.float32), [*sorted(contracting), rank]),
        *(weight.lora_b.astype(jnp.float32), [*others, rank]),
        list(range(base.ndim)),
        precision="highest",
    )
    return base + weight.scale * product
