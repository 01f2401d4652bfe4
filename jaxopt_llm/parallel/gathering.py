"""Gathering of weights from where they rest to where they are used, and the way back of their gradients.

zero.py says where both rest. Only ZeRO's storage axes are gathered, and gradients are divided over them again. The axes
of the parameters' table stay: a weight that `tensor` divides remains divided by `tensor`, and experts remain divided by
`expert`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding

from jaxopt_llm.config import Matmul
from jaxopt_llm.core import tree
from jaxopt_llm.parallel import zero
from jaxopt_llm.parallel.placement import Placement, Spec
from jaxopt_llm.parallel.stages import is_split_over_stages

GATHER_SCOPE = "gather_weight"  # the named scope of `gather_array` in compiled programs and profiles


@dataclass(frozen=True)
class WeightShardings:
    """The shardings and dtypes of one weight at rest, while it is used, and of its gradient.

    matmul, outlier_threshold: how products with the weight are computed (see PrecisionConfig).
    keep_gathered: whether the backward reuses the gathered weight (see attach_shardings).
    trainable: whether a gradient is formed.
    grouped: whether a `vmap` over gradient groups is around (see zero.inside_gradient_group).
    pipeline_stage_rows: whether these are one stage's rows, inside a region that is manual over `pipeline`.
    """

    resting: NamedSharding
    gathered: NamedSharding
    gradient: NamedSharding
    compute_dtype: str
    reduce_dtype: str
    matmul: Matmul
    outlier_threshold: float
    keep_gathered: bool
    trainable: bool
    grouped: bool
    pipeline_stage_rows: bool


@struct.dataclass
class PlacedWeight:
    """A weight as it rests, with the shardings that bring it to where it is used.

    Only `model/linear/` reads it; the docstring of that folder explains the perturbation.

    perturbation: zeros of the weight's shape, with the dtype and sharding of its gradient, which is the perturbation's
        cotangent. None: no gradient is formed.
    """

    array: jax.Array
    perturbation: jax.Array | None
    shardings: WeightShardings = struct.field(pytree_node=False)


def cast_masters(specs: tree.Tree, masters: tree.Tree, placement: Placement) -> tree.Tree:
    """Return the compute copy of the masters: cast first, so that the one gather moves the compute dtype."""

    def cast(spec: Spec, master: jax.Array) -> jax.Array:
        narrow = master.astype(placement.precision.for_param(spec).compute_dtype)
        narrow = jax.lax.with_sharding_constraint(narrow, zero.master_sharding(spec, placement))
        return jax.lax.with_sharding_constraint(narrow, zero.parameter_sharding(spec, placement))

    return jax.tree.map(cast, specs, masters)


def make_perturbations(specs: tree.Tree, placement: Placement) -> tree.Tree:
    """Return the zeros with respect to which the model is differentiated, in place of these parameters."""

    def zeros(spec: Spec) -> jax.Array:
        perturbation = jnp.zeros(spec.shape, placement.precision.for_param(spec).reduce_dtype)
        return jax.lax.with_sharding_constraint(perturbation, zero.gradient_sharding(spec, placement))

    return jax.tree.map(zeros, specs)


def attach_shardings(
    specs: tree.Tree,
    weights: tree.Tree,
    perturbations: tree.Tree,
    placement: Placement,
    *,
    keep_gathered: bool,
    matmul: Matmul = "compute_dtype",
    in_compute_dtype: Callable[[str], bool] = lambda path: False,
) -> tree.Tree:
    """Pair each weight with its shardings and its perturbation.

    No data moves: model/linear/ gathers a weight where it is used.

    perturbations: `make_perturbations(specs, placement)`, or a tree with None for weights without a gradient.
    keep_gathered: whether the backward reuses the weight that the forward gathered, or gathers it again. True within a
        rematerialised block, where the forward is the recomputation just before. Otherwise True would keep every
        gathered layer alive.
    matmul: the format in which products with the weights are computed (see PrecisionConfig).
    in_compute_dtype: returns True for the path of a weight that is multiplied in the compute dtype, whatever `matmul`
        is.
    """

    def attach(path: str, spec: Spec, array: jax.Array, perturbation: jax.Array | None) -> PlacedWeight:
        precision = placement.precision.for_param(spec)
        shardings = WeightShardings(
            resting=zero.parameter_sharding(spec, placement),
            gathered=zero.gathered_sharding(spec, placement),
            gradient=zero.gradient_sharding(spec, placement),
            compute_dtype=precision.compute_dtype,
            reduce_dtype=precision.reduce_dtype,
            matmul="compute_dtype" if in_compute_dtype(path) else matmul,
            outlier_threshold=precision.outlier_threshold,
            keep_gathered=keep_gathered,
            trainable=perturbation is not None,
            grouped=bool(placement.grouped),
            pipeline_stage_rows=placement.inside_stage and is_split_over_stages(spec),
        )
        return PlacedWeight(array, perturbation, shardings)

    return tree.map_with_path(attach, specs, weights, perturbations)


def split_perturbations(weights: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
    """Return the weights without their perturbations, and the perturbations, None for frozen weights."""
    resting = jax.tree.map(lambda leaf: replace(leaf, perturbation=None), weights, is_leaf=_is_placed)
    return resting, jax.tree.map(lambda leaf: leaf.perturbation, weights, is_leaf=_is_placed)


def with_perturbations(resting: tree.Tree, perturbations: tree.Tree) -> tree.Tree:
    """Invert `split_perturbations`."""
    return jax.tree.map(
        lambda leaf, perturbation: replace(leaf, perturbation=perturbation), resting, perturbations, is_leaf=_is_placed
    )


def _is_placed(leaf: tree.Leaf) -> bool:
    return isinstance(leaf, PlacedWeight)


@jax.named_scope(GATHER_SCOPE)
def gather_array(weight: PlacedWeight, dtype: Any = None) -> jax.Array:
    """Gather a weight over the storage axes of ZeRO, in `dtype`, by default its compute dtype.

    It is cast first: a gather of 16 bits moves half of the bytes of one of 32.
    """
    array = weight.array.astype(dtype or weight.shardings.compute_dtype)
    # With only one constraint, XLA sometimes gathers the float32 master and casts afterwards.
    array = jax.lax.with_sharding_constraint(array, weight.shardings.resting)
    return jax.lax.with_sharding_constraint(array, weight.shardings.gathered)


def reduce_gradient(gradient: jax.Array, shardings: WeightShardings) -> jax.Array:
    """Cast a weight's gradient to the reduction's dtype, and constrain it to the gradient's sharding.

    It is `gather_array` transposed. For the devices' partial sums, XLA inserts a reduce-scatter or all-reduce over the
    mesh axes that divide the tokens, except those of the gradient groups.
    """
    return jax.lax.with_sharding_constraint(gradient.astype(shardings.reduce_dtype), shardings.gradient)


def reduce_groups(specs: tree.Tree, gradients: tree.Tree, placement: Placement) -> tree.Tree:
    """Sum gradients [G, ...] over the gradient groups, and leave each device its part of the masters' division."""
    return jax.tree.map(lambda spec, gradient: _reduce_groups(spec, gradient, placement), specs, gradients)


def _reduce_groups(spec: Spec, gradient: jax.Array, placement: Placement) -> jax.Array:
    """Sum one leaf: a reduce-scatter over the axes that divide the masters, then an all-reduce over the others."""
    groups, dims = zero.gradient_group_axes(placement), placement.dims(spec, zero.storage_axes(1, placement))
    divides = [axis in (name for dim in dims for name in dim) for axis in groups]
    gradient = gradient.astype(placement.precision.for_param(spec).reduce_dtype)
    gradient = gradient.reshape(*(placement.size(axis) for axis in groups), *spec.shape)
    others = tuple((axis,) for axis, divide in zip(groups, divides, strict=True) if not divide)
    for phase, sharding in ((True, placement.named_sharding(others + dims)), (False, placement.named_sharding(dims))):
        summed = tuple(i for i, divide in enumerate(divides) if divide is phase)
        if summed:
            # Not jnp.sum: it would widen 16-bit values to float32, and with them the bytes between devices.
            gradient = jax.lax.reduce(gradient, jnp.zeros((), gradient.dtype), jax.lax.add, summed)
            gradient = jax.lax.with_sharding_constraint(gradient, sharding)
            divides = [divide for divide in divides if divide is not phase]
    return gradient.astype(jnp.float32)
