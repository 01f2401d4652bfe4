"""Leaf classes: weights that consist of several arrays.

Each class has two constructors, spec -> tree of specs and array -> leaf, so that its leaves are sharded, scanned,
checkpointed and counted like any other array. The fields hold whatever the tree holds: specs, arrays, shardings,
`PlacedWeight`s or None.

A "bare" parameter is the plain array that a leaf class stands for, at the path without the leaf's own fields.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.core import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.linear import quantised
from jaxopt_llm.model.linear.quantised import to_integers
from jaxopt_llm.model.param import FLOAT32, Initializer, ParamSpec, normal, ones, zeros
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.axes import PARAMETER_AXES

INT8, UINT8 = np.dtype(np.int8), np.dtype(np.uint8)


@struct.dataclass
class Int8Weight:
    """Weight as codes × scales.

    codes: int8, of the weight's shape.
    scales: float32, one per output channel; size 1 along contracting dimensions. The rounding error of a value is at
        most 1/254 of the largest value of its channel.
    """

    codes: tree.Leaf
    scales: tree.Leaf


@struct.dataclass
class Nf4Weight:
    """Weight as 4-bit codes with one scale per block, itself a code with double quantisation (quantised.py).

    dim: the dimension along which blocks lie, counted from the end; see `nf4_dim`.
    """

    codes: tree.Leaf
    scales: tree.Leaf
    tops: tree.Leaf
    dim: int = struct.field(pytree_node=False)


QuantisedWeight = Int8Weight | Nf4Weight


@struct.dataclass
class ScaledWeight:
    """Trained weight with the largest magnitude of its values; fp8 derives the scale from it.

    A step makes it of its state (`TrainState.largest`) for the executor, whose trainable half is the array and whose
    frozen half is the magnitude. Specs of states and checkpoints have the array alone.

    largest: float32, a scalar, or one for each row of a stack.
    """

    array: tree.Leaf
    largest: tree.Leaf


@struct.dataclass
class LoraWeight:
    """Weight as base + scale × A·B (Hu et al. 2021, arXiv:2106.09685).

    With a magnitude, each output channel of that sum is scaled to the magnitude's length (DoRA: Liu et al. 2024,
    arXiv:2402.09353).

    base: an array or a quantised weight.
    lora_a: [contracting dimensions, rank]; lora_b: [other dimensions, rank]. For experts both have the expert as first
        dimension. The rank comes last, because XLA would transpose a stack that is divided along its minor dimension
        around the loop over it.
    magnitude: [other dimensions], or None.
    noise: uint32 [B, S], random bits for dropout of A's input, at rate `dropout`; None disables it.
    """

    base: tree.Leaf
    lora_a: tree.Leaf
    lora_b: tree.Leaf
    scale: float = struct.field(pytree_node=False)
    magnitude: tree.Leaf = None
    noise: tree.Leaf = None
    dropout: float = struct.field(pytree_node=False, default=0.0)


def select_adapters(specs: tree.Tree) -> tree.Tree:
    """Return the specs, or a half of a `tree.partition` of them, with None for all but the arrays of adapters."""

    def select(leaf: tree.Leaf) -> tree.Leaf:
        nothing = jax.tree.map(lambda _: None, leaf.base if isinstance(leaf, LoraWeight) else leaf)
        return replace(leaf, base=nothing) if isinstance(leaf, LoraWeight) else nothing

    return jax.tree.map(select, specs, is_leaf=is_wrapped)


def remove_adapters(weights: tree.Tree) -> tree.Tree:
    """Return weights, or their specs, without adapters: the base of each adapted weight."""
    return jax.tree.map(lambda leaf: leaf.base if isinstance(leaf, LoraWeight) else leaf, weights, is_leaf=is_wrapped)


def adapter_paths(specs: tree.Tree) -> frozenset[str]:
    """Return the paths of the arrays of adapters. The type of a leaf tells them: a parameter may have any name."""
    return frozenset(path for path, _ in tree.leaves_with_path(select_adapters(specs)))


# --- weights with their largest magnitudes


def largest_specs(specs: tree.Tree) -> tree.Tree | None:
    """Return the specs of the magnitudes that the update finds, None where it finds none; None if that is everywhere.

    These are matrices in stacks, of several stacks of one shape only the first. XLA joins the updates of two stacks of
    one shape into one kernel, and if it also reduces both, copies one of them and its moments: more bytes than to read
    the stack again. Adapters are not rounded.
    """
    adapters, shapes = adapter_paths(specs), set[tuple[int, ...]]()

    def largest(path: str, spec: ParamSpec) -> ParamSpec | None:
        if not (spec.leading and spec.contracting) or path in adapters or spec.shape in shapes:
            return None
        shapes.add(spec.shape)
        return ParamSpec(spec.shape[: spec.leading], spec.axes[: spec.leading], layers=spec.layers)

    found = tree.map_with_path(largest, specs)
    return found if shapes else None


def map_scaled(make: Callable[[tree.Leaf, tree.Leaf], tree.Leaf], largest: tree.Tree, weights: tree.Tree) -> tree.Tree:
    """Return `weights` with `make(weight, its largest magnitude)` wherever `largest` has a leaf and not None."""
    return jax.tree.map(
        lambda magnitude, weight: weight if magnitude is None else make(weight, magnitude),
        *(largest, weights),
        is_leaf=lambda leaf: leaf is None,
    )


def join_scaled(placed: tree.Tree) -> tree.Tree:
    """Return placed weights with each ScaledWeight as one PlacedWeight that knows its largest magnitude."""

    def join(leaf: tree.Leaf) -> tree.Leaf:
        return replace(leaf.array, largest=leaf.largest.array) if isinstance(leaf, ScaledWeight) else leaf

    return jax.tree.map(join, placed, is_leaf=lambda leaf: isinstance(leaf, ScaledWeight))


# --- spec -> specs


def quantised_specs(spec: ParamSpec, base: Literal["int8", "nf4"], double: bool) -> QuantisedWeight:
    return int8_specs(spec) if base == "int8" else nf4_specs(spec, double)


def int8_specs(spec: ParamSpec) -> Int8Weight:
    contracting = [dim in spec.contracting for dim in range(len(spec.shape))]
    scales = ParamSpec(
        shape=tuple(1 if summed else size for summed, size in zip(contracting, spec.shape, strict=True)),
        axes=tuple(None if summed else axis for summed, axis in zip(contracting, spec.axes, strict=True)),
        layers=spec.layers,
    )
    return Int8Weight(codes=replace(spec, dtype=INT8), scales=scales)


def nf4_specs(spec: ParamSpec, double: bool) -> Nf4Weight:
    """Return the specs of a weight in NF4.

    double: whether the scales are codes too. A block size must divide the dimension `nf4_dim(spec)`.
    """
    dim = nf4_dim(spec)
    size, values = spec.shape[dim], quantised.block_size(spec.shape[dim])
    assert values is not None

    def with_length(length: int, dtype: Any) -> ParamSpec:
        shape = (*spec.shape[:dim], length, *spec.shape[dim + 1 :])
        return ParamSpec(shape, spec.axes, dtype=dtype, layers=spec.layers)

    return Nf4Weight(
        codes=replace(with_length(size // 2, UINT8), contracting=spec.contracting, init=spec.init),
        scales=with_length(size // values, UINT8 if double else FLOAT32),
        tops=with_length(1, FLOAT32) if double else None,
        dim=dim - len(spec.shape),
    )


def nf4_dim(spec: ParamSpec) -> int:
    """Return the dimension along which the blocks of NF4 lie, which `tensor` never splits.

    It is the model's width or the rank of a latent: every matrix of the decoder's blocks has exactly one of these. A
    matrix whose dimensions have other names has its blocks along the first dimension that no mesh axis divides and that
    consists of whole blocks, with the contracted dimensions first.
    """
    named = [dim for dim, axis in enumerate(spec.axes) if axis in ("embed", "latent")]
    if named:
        return named[0]
    dims = dict.fromkeys((*spec.contracting, *range(spec.leading, len(spec.shape))))
    whole = [dim for dim in dims if not PARAMETER_AXES.get(spec.axes[dim] or "")]
    return next((dim for dim in whole if quantised.block_size(spec.shape[dim])), [*whole, *dims][0])


def lora_specs(spec: ParamSpec, rank: int, scale: float, dora: bool = False, dropout: float = 0.0) -> LoraWeight:
    """Return the specs of a weight with an adapter.

    A is initialised randomly, B with zeros and the magnitude with the base's norms, so that at first the weight equals
    its base.
    """
    stack = (*range(spec.leading), *spec.expert_dims)
    others = tuple(dim for dim in range(len(spec.shape)) if dim not in (*stack, *spec.contracting))

    def make_spec(dims: tuple[int, ...], contracting: tuple[int, ...], init: Initializer, *rank: int) -> ParamSpec:
        shape = *(spec.shape[dim] for dim in (*stack, *dims)), *rank
        axes = *(spec.axes[dim] for dim in (*stack, *dims)), *(None for _ in rank)
        return ParamSpec(shape, axes, tuple(len(stack) + dim for dim in contracting), init, layers=spec.layers)

    summed = tuple(sorted(spec.contracting))
    return LoraWeight(
        base=spec,
        lora_a=make_spec(summed, tuple(range(len(summed))), normal(), rank),
        lora_b=make_spec(others, (len(others),), zeros, rank),
        scale=scale,
        magnitude=make_spec(others, (), ones) if dora else None,
        dropout=dropout,
    )


def unwrap_specs(specs: tree.Tree) -> tree.Tree:
    """Return the specs of the bare parameters: without adapters, and in float32 where they are quantised."""

    def leaf(spec: ParamSpec | QuantisedWeight | LoraWeight) -> ParamSpec:
        if isinstance(spec, LoraWeight):
            return leaf(spec.base)
        if isinstance(spec, ParamSpec):
            return spec
        return replace(unpack_codes(spec).codes, dtype=FLOAT32)

    return jax.tree.map(leaf, specs, is_leaf=is_wrapped)


def unpack_codes(specs: tree.Tree) -> tree.Tree:
    """Return the specs, or a half of a `tree.partition` of them, with one element for each code of NF4."""

    def unpack(leaf: tree.Leaf) -> tree.Leaf:
        if not isinstance(leaf, Nf4Weight) or leaf.codes is None:
            return leaf
        sizes = list(leaf.codes.shape)
        sizes[leaf.dim] *= 2  # two codes per byte
        return replace(leaf, codes=replace(leaf.codes, shape=tuple(sizes)))

    return jax.tree.map(unpack, specs, is_leaf=lambda leaf: isinstance(leaf, Nf4Weight))


def count_parameters(specs: tree.Tree) -> int:
    """Count the bare parameters and the adapters' parameters. Scales of quantised weights do not count."""
    return param.count_parameters(unwrap_specs(specs)) + param.count_parameters(select_adapters(specs))


# --- array -> leaf


def quantise(array: jax.Array, specs: QuantisedWeight) -> QuantisedWeight:
    """Round each value of a bare array to the nearest code of the format of `specs`."""
    if isinstance(specs, Nf4Weight):
        codes, scales, tops = quantised.encode(array, specs.dim, double=specs.tops is not None)
        return Nf4Weight(codes, scales, tops, specs.dim)
    rounded = to_integers(array, specs.codes.contracting, max_code=127)
    return Int8Weight(rounded.codes, rounded.scales)


def dequantise(weight: QuantisedWeight) -> jax.Array:
    """Return the bare array, float32."""
    if isinstance(weight, Nf4Weight):
        return quantised.decode(weight.codes, weight.scales, weight.tops, weight.dim)
    return weight.codes.astype(jnp.float32) * weight.scales


def channel_norms(base: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """Return the L2 norm of each output channel, float32: a magnitude before training. dims: contracting dimensions."""
    return jnp.sqrt(jnp.sum(jnp.square(base.astype(jnp.float32)), axis=dims))


def initialize(specs: tree.Tree, seed: int) -> tree.Tree:
    """Return initial values. The key comes from the bare path, so adapters and quantisation do not change a base."""
    return wrap_arrays(specs, param.initialize(unwrap_specs(specs), seed), seed)


def wrap_arrays(specs: tree.Tree, arrays: tree.Tree, seed: int) -> tree.Tree:
    """Return the leaves of `specs` with the given arrays of `unwrap_specs(specs)` as bases, and with new adapters."""
    factors = jax.tree.map(_select_factors, specs, is_leaf=is_wrapped)
    return tree.merge(param.initialize(factors, seed), jax.tree.map(make_leaf, specs, arrays, is_leaf=is_wrapped))


def _select_factors(spec: ParamSpec | QuantisedWeight | LoraWeight) -> tree.Leaf:
    return replace(spec, base=None, magnitude=None) if isinstance(spec, LoraWeight) else None


def make_leaf(spec: ParamSpec | QuantisedWeight | LoraWeight, array: jax.Array) -> tree.Leaf:
    """Return the leaf of `spec` over its bare array, with None for the factors of an adapter."""
    if isinstance(spec, LoraWeight):
        base = make_leaf(spec.base, array)
        magnitude = spec.magnitude and initial_magnitude(spec, base)
        return replace(spec, base=base, lora_a=None, lora_b=None, magnitude=magnitude)
    return array.astype(spec.dtype) if isinstance(spec, ParamSpec) else quantise(array, spec)


def initial_magnitude(spec: LoraWeight, base: tree.Leaf) -> jax.Array:
    """Return an adapter's initial magnitude, float32: the norms of the base at rest, so that products do not change."""
    array = dequantise(base) if isinstance(base, QuantisedWeight) else base
    return channel_norms(array, unwrap_specs(spec.base).contracting)


def is_wrapped(leaf: tree.Leaf) -> bool:
    """Return whether this is a leaf class, which has several arrays for one bare parameter."""
    return isinstance(leaf, QuantisedWeight | LoraWeight)


def weight_dtype(weight: tree.Leaf) -> np.dtype:
    """Return the dtype of the bare parameter: the base's, and float32 for a quantised base."""
    if isinstance(weight, LoraWeight):
        return weight_dtype(weight.base)
    return FLOAT32 if isinstance(weight, QuantisedWeight) else np.dtype(weight.dtype)


def merge_to_array(weight: tree.Leaf, contracting: tuple[int, ...]) -> jax.Array:
    """Return one layer's weight as one array, with codes dequantised and adapters merged in float32.

    contracting: the dimensions that a product sums over.
    """
    if not isinstance(weight, LoraWeight):
        return dequantise(weight) if isinstance(weight, QuantisedWeight) else weight
    base = merge_to_array(weight.base, contracting).astype(jnp.float32)
    dims = list(range(base.ndim))
    others = [dim for dim in dims if dim not in contracting]
    a, b = (factor.astype(jnp.float32) for factor in (weight.lora_a, weight.lora_b))
    rank, experts = base.ndim, others[: a.ndim - len(contracting) - 1]
    dims_of_a = [*experts, *sorted(contracting), rank]
    product = jnp.einsum(a, dims_of_a, b, [*others, rank], dims, precision="highest")
    merged = base + weight.scale * product
    if weight.magnitude is None:
        return merged
    norms = jnp.expand_dims(channel_norms(merged, contracting), contracting)
    return merged * jnp.expand_dims(weight.magnitude, contracting) / jnp.where(norms > 0, norms, 1)


def fetch_layer(
    leaf: tree.Leaf, layer: int | None, sizes: tuple[int, ...], contracting: tuple[int, ...] = ()
) -> np.ndarray:
    """Fetch one layer of a leaf to the host, dequantised and with its adapter merged.

    Args:
        leaf: the leaf, on any devices.
        layer: index in the stack; None for a leaf that is not stacked.
        sizes: sizes of the dimensions without padding; empty: keep all.
        contracting: the dimensions that a product with the layer sums over.
    """
    stack = jax.tree.map(lambda array: array[None], leaf) if layer is None else leaf
    sharding = jax.tree.leaves(leaf)[0].sharding
    assert isinstance(sharding, NamedSharding)
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    array = np.asarray(_compile_fetch(replicated)(stack, layer or 0, contracting))
    return array[tuple(slice(size) for size in sizes)]


@functools.cache
def _compile_fetch(replicated: NamedSharding) -> Callable[[tree.Leaf, int, tuple[int, ...]], jax.Array]:
    """Return a jitted function that merges one row of a stack on every device.

    If the stack is in host memory, only that row is copied to the devices.
    """

    def take(stack: tree.Leaf, row: jax.Array, contracting: tuple[int, ...]) -> jax.Array:
        def take_row(array: jax.Array) -> jax.Array:
            return offload.fetch_to_device(jax.lax.dynamic_index_in_dim(array, row, keepdims=False))

        return merge_to_array(jax.tree.map(take_row, stack), contracting)

    return jax.jit(take, static_argnums=2, out_shardings=replicated)
