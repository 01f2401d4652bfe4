"""Leaf classes: what a weight can be beside one array.

Each is a pair of functions, spec -> tree of specs and array -> leaf, so that its leaves shard, scan, checkpoint and
count like any other. The fields hold whatever the tree holds: specs, arrays, shardings, `Placed` weights, None.
"""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxopt_llm import tree
from jaxopt_llm.model import nf4, param
from jaxopt_llm.model.param import FLOAT32, Initializer, ParamSpec, normal, ones, zeros

INT8, UINT8 = np.dtype(np.int8), np.dtype(np.uint8)
FACTORS = ("/lora_a", "/lora_b")
ADAPTERS = (*FACTORS, "/magnitude")  # how the paths of what is trained beside a base end


@struct.dataclass
class Int8Weight:
    """codes × scales: int8 codes of the weight's shape, and a float32 scale per output channel, [1] where a product
    sums, so that the error of a value is at most a 254th of its channel's largest."""

    codes: tree.Leaf
    scales: tree.Leaf


@struct.dataclass
class Nf4Weight:
    """4-bit codes, scales of blocks, and with double quantisation what these are relative to (see nf4.py), along `dim`,
    counted from the end: the model's width or the rank of a latent, of which each matrix of a block has one, and which
    `tensor` never splits."""

    codes: tree.Leaf
    scales: tree.Leaf
    tops: tree.Leaf
    dim: int = struct.field(pytree_node=False)


CodedWeight = Int8Weight | Nf4Weight
CODED = (Int8Weight, Nf4Weight)


@struct.dataclass
class LoraWeight:
    """base + scale × A·B (Hu et al. 2021, arXiv:2106.09685); with a magnitude each output channel of that sum brought
    to the length that it says (DoRA: Liu et al. 2024, arXiv:2402.09353).

    base: a leaf, or a coded weight.
    lora_a: [the dimensions that a product sums over, rank]; lora_b: [the others, rank]; of experts both for each, in
        their first dimension. The rank comes last: a stack divided along its minor dimension is transposed around the
        loop over it.
    magnitude: [the others], or None.
    noise: uint32 [B, S], by which dropout drops the share `dropout` of what A reads; None where nothing is dropped.
    """

    base: tree.Leaf
    lora_a: tree.Leaf
    lora_b: tree.Leaf
    scale: float = struct.field(pytree_node=False)
    magnitude: tree.Leaf = None
    noise: tree.Leaf = None
    dropout: float = struct.field(pytree_node=False, default=0.0)


def is_adapter(path: str) -> bool:
    return path.endswith(ADAPTERS)


# --- spec -> specs


def coded_specs(spec: ParamSpec, base: Literal["int8", "nf4"], double: bool) -> CodedWeight:
    return int8_specs(spec) if base == "int8" else nf4_specs(spec, double)


def int8_specs(spec: ParamSpec) -> Int8Weight:
    summed = [dim in spec.contracting for dim in range(len(spec.shape))]
    scales = ParamSpec(
        shape=tuple(1 if each else size for each, size in zip(summed, spec.shape, strict=True)),
        axes=tuple(None if each else axis for each, axis in zip(summed, spec.axes, strict=True)),
        layers=spec.layers,
    )
    return Int8Weight(codes=replace(spec, dtype=INT8), scales=scales)


def nf4_specs(spec: ParamSpec, double: bool) -> Nf4Weight:
    """double: whether the scales are codes, too. What blocks lie along must be of whole ones."""
    at = nf4_dim(spec)
    size, values = spec.shape[at], nf4.block(spec.shape[at])
    assert values is not None

    def along(length: int, dtype: Any) -> ParamSpec:
        shape = (*spec.shape[:at], length, *spec.shape[at + 1 :])
        return ParamSpec(shape, spec.axes, dtype=dtype, layers=spec.layers)

    return Nf4Weight(
        codes=replace(along(size // 2, UINT8), contracting=spec.contracting, init=spec.init),
        scales=along(size // values, UINT8 if double else FLOAT32),
        tops=along(1, FLOAT32) if double else None,
        dim=at - len(spec.shape),
    )


def nf4_dim(spec: ParamSpec) -> int:
    """The dimension that blocks lie along."""
    return next(dim for dim, axis in enumerate(spec.axes) if axis in ("embed", "latent"))


def lora_specs(spec: ParamSpec, rank: int, scale: float, dora: bool = False, dropout: float = 0.0) -> LoraWeight:
    """A starts random, B at zero and a magnitude as the base has it: at first the weight is its base."""
    stack = (*range(spec.leading), *spec.numbered)
    others = tuple(dim for dim in range(len(spec.shape)) if dim not in (*stack, *spec.contracting))

    def of(dims: tuple[int, ...], contracting: tuple[int, ...], init: Initializer, *rank: int) -> ParamSpec:
        shape = *(spec.shape[dim] for dim in (*stack, *dims)), *rank
        axes = *(spec.axes[dim] for dim in (*stack, *dims)), *(None for _ in rank)
        return ParamSpec(shape, axes, tuple(len(stack) + dim for dim in contracting), init, layers=spec.layers)

    summed = tuple(sorted(spec.contracting))
    return LoraWeight(
        base=spec,
        lora_a=of(summed, tuple(range(len(summed))), normal(), rank),
        lora_b=of(others, (len(others),), zeros, rank),
        scale=scale,
        magnitude=of(others, (), ones) if dora else None,
        dropout=dropout,
    )


def bare(specs: tree.Tree) -> tree.Tree:
    """The specs under what wraps them, and so under their bare paths."""

    def leaf(spec: ParamSpec | CodedWeight | LoraWeight) -> ParamSpec:
        if isinstance(spec, LoraWeight):
            return leaf(spec.base)
        if isinstance(spec, ParamSpec):
            return spec
        codes = replace(spec.codes, dtype=FLOAT32)
        if isinstance(spec, Int8Weight):
            return codes
        sizes = list(codes.shape)
        sizes[spec.dim] *= 2
        return replace(codes, shape=tuple(sizes))

    return jax.tree.map(leaf, specs, is_leaf=is_wrapped)


def count(specs: tree.Tree) -> int:
    """Parameters: the bare ones and the adapters'. The scales of a quantised one are not more of them."""
    return param.count(bare(specs)) + param.count(tree.partition(specs, is_adapter)[0])


# --- array -> leaf


def quantise(array: jax.Array, specs: CodedWeight) -> CodedWeight:
    """Codes as `specs` has them, each value's the nearest. array: of its bare shape."""
    if isinstance(specs, Nf4Weight):
        codes, scales, tops = nf4.encode(array, specs.dim, double=specs.tops is not None)
        return Nf4Weight(codes, scales, tops, specs.dim)
    # Symmetric: a channel's largest value is ±127.
    array = array.astype(jnp.float32)
    scales = jnp.max(jnp.abs(array), axis=specs.codes.contracting, keepdims=True) / 127
    codes = jnp.round(array / jnp.where(scales > 0, scales, 1))
    return Int8Weight(codes.astype(jnp.int8), scales)


def dequantise(weight: CodedWeight) -> jax.Array:
    """float32."""
    if isinstance(weight, Nf4Weight):
        return nf4.decode(weight.codes, weight.scales, weight.tops, weight.dim)
    return weight.codes.astype(jnp.float32) * weight.scales


def lengths(base: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """Of each output channel, float32: a magnitude before training. dims: those that a product sums over."""
    return jnp.sqrt(jnp.sum(jnp.square(base.astype(jnp.float32)), axis=dims))


def initialize(specs: tree.Tree, seed: int) -> tree.Tree:
    """Initial values. A base's are those of its bare path: adapters and quantisation draw no other."""
    return wrap(specs, param.initialize(bare(specs), seed), seed)


def wrap(specs: tree.Tree, arrays: tree.Tree, seed: int) -> tree.Tree:
    """The leaves of `specs` over given arrays of `bare(specs)`, with fresh adapters."""
    factors, _ = tree.partition(specs, lambda path: path.endswith(FACTORS))
    return tree.merge(param.initialize(factors, seed), jax.tree.map(over, specs, arrays, is_leaf=is_wrapped))


def over(spec: ParamSpec | CodedWeight | LoraWeight, array: jax.Array) -> tree.Leaf:
    """The leaf of `spec` over an array of its bare shape, but for an adapter's factors, which are None."""
    if isinstance(spec, LoraWeight):
        base = over(spec.base, array)
        return replace(spec, base=base, lora_a=None, lora_b=None, magnitude=spec.magnitude and magnitude(spec, base))
    return array.astype(spec.dtype) if isinstance(spec, ParamSpec) else quantise(array, spec)


def magnitude(spec: LoraWeight, base: tree.Leaf) -> jax.Array:
    """What an adapter's magnitude begins at, float32, over its base as it rests: a product is then the base's own."""
    array = dequantise(base) if isinstance(base, CODED) else base
    return lengths(array, bare(spec.base).contracting)


def is_wrapped(leaf: tree.Leaf) -> bool:
    """Whether it stands, with several leaves, for one bare parameter."""
    return isinstance(leaf, (*CODED, LoraWeight))


def dtype(weight: tree.Leaf) -> np.dtype:
    """Of what it stands for: a base's own; float32 where that is codes."""
    if isinstance(weight, LoraWeight):
        return dtype(weight.base)
    return FLOAT32 if isinstance(weight, CODED) else np.dtype(weight.dtype)


def merged(weight: tree.Leaf, contracting: tuple[int, ...]) -> jax.Array:
    """What a weight outside stacks stands for, as one array: codes widened and adapters folded in, in float32.

    contracting: the dimensions that a product sums over.
    """
    if not isinstance(weight, LoraWeight):
        return dequantise(weight) if isinstance(weight, CODED) else weight
    base = merged(weight.base, contracting).astype(jnp.float32)
    dims = list(range(base.ndim))
    others = [dim for dim in dims if dim not in contracting]
    a, b = (factor.astype(jnp.float32) for factor in (weight.lora_a, weight.lora_b))
    rank, experts = base.ndim, others[: a.ndim - len(contracting) - 1]
    of_a = [*experts, *sorted(contracting), rank]
    product = jnp.einsum(a, of_a, b, [*others, rank], dims, precision="highest")
    whole = base + weight.scale * product
    if weight.magnitude is None:
        return whole
    length = jnp.expand_dims(lengths(whole, contracting), contracting)
    return whole * jnp.expand_dims(weight.magnitude, contracting) / jnp.where(length > 0, length, 1)
