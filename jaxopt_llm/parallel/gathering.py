"""Gathering of weights from where they rest to where they are used, and the way back of their gradients.

zero.py says where both rest. Only ZeRO's storage axes are gathered, and gradients are divided over them again. The axes
of the parameters' table stay: a weight that `tensor` divides remains divided by `tensor`, and experts remain divided by
`expert`.

Over the axes of `sharding.int8_gathers`, and with `sharding.data_gradients` or `sharding.fsdp_gradients`, collectives
move blocks of codes (codes.py). Vectors, exact parameters, and matrices whose last dimension has no
whole blocks on each device stay exact.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.config import BATCH_AXES, Matmul
from jaxopt_llm.core import tree
from jaxopt_llm.kernels.products import runs_on_one_cpu
from jaxopt_llm.parallel import codes, zero
from jaxopt_llm.parallel.activations import is_split_over_stages
from jaxopt_llm.parallel.codes import CodedSum, RowSum, find_coded_sum, find_row_sum
from jaxopt_llm.parallel.placement import Dims, Placement, Spec

GATHER_SCOPE = "gather_weight"  # the named scope of `gather_array` in compiled programs and profiles


@dataclass(frozen=True)
class WeightShardings:
    """The shardings and dtypes of one weight at rest, while it is used, and of its gradient.

    gather_block: number of values in a block, if the weight is gathered as int8 codes; None for its compute dtype.
    matmul, outlier_threshold: how products with the weight are computed (see PrecisionConfig).
    coded_sum, row_sum: how the gradient is summed as codes, within a gradient group or over the devices that have rows
        of the batch; None for a sum in the reductions' dtype.
    keep_gathered: whether the backward reuses the gathered weight (see attach_shardings).
    trainable: whether a gradient is formed.
    grouped: whether a `vmap` over gradient groups is around (see zero.inside_gradient_group).
    pipeline_stage_rows: whether these are one stage's rows, inside a region that is manual over `pipeline`.
    """

    resting: NamedSharding
    gathered: NamedSharding
    gradient: NamedSharding
    gather_block: int | None
    coded_sum: CodedSum | None
    row_sum: RowSum | None
    compute_dtype: str
    reduce_dtype: str
    matmul: Matmul
    outlier_threshold: float
    keep_gathered: bool
    trainable: bool
    grouped: bool
    pipeline_stage_rows: bool

    @property
    def sums_later(self) -> bool:
        """True within a loop, for a gradient whose parts are summed after it; see `sum_after_loop`."""
        return self.row_sum is not None and not self.row_sum.steps

    @property
    def on_one_cpu(self) -> bool:
        return runs_on_one_cpu(self.resting.mesh)


@struct.dataclass
class PlacedWeight:
    """A weight as it rests, with the shardings that bring it to where it is used.

    Only `model/linear/` reads it; the docstring of that folder explains the perturbation.

    perturbation: zeros of the weight's shape, with the dtype and sharding of its gradient, which is the perturbation's
        cotangent. None: no gradient is formed.
    largest: the largest magnitude of the array, float32, where it is known before the products (ScaledWeight).
    """

    array: jax.Array
    perturbation: jax.Array | None
    shardings: WeightShardings = struct.field(pytree_node=False)
    largest: jax.Array | None = None


def cast_masters(specs: tree.Tree, masters: tree.Tree, placement: Placement) -> tree.Tree:
    """Return the compute copy of the masters: cast first, so that the one gather moves the compute dtype, or codes."""

    def cast(spec: Spec, master: jax.Array) -> jax.Array:
        dtype = placement.precision.for_param(spec).compute_dtype
        before, after = zero.master_sharding(spec, placement), zero.parameter_sharding(spec, placement)
        if values := _find_gather_block(spec, before, after, placement):
            return codes.move_blocks(master, before, after, values, bits=8).astype(dtype)
        narrow = jax.lax.with_sharding_constraint(master.astype(dtype), before)
        return jax.lax.with_sharding_constraint(narrow, after)

    return jax.tree.map(cast, specs, masters)


def make_perturbations(specs: tree.Tree, placement: Placement) -> tree.Tree:
    """Return the zeros that the model is differentiated by, in place of these parameters."""

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
    in_compute_dtype: Collection[str] = (),
) -> tree.Tree:
    """Pair each weight with its shardings and its perturbation.

    No data moves: model/linear/ gathers a weight where it is used.

    perturbations: `make_perturbations(specs, placement)`, or a tree with None for weights without a gradient.
    keep_gathered: whether the backward reuses the weight that the forward gathered, or gathers it again. True within a
        rematerialised block, where the forward is the recomputation just before. Otherwise True would keep every
        gathered layer alive.
    matmul: the format in which products with the weights are computed (see PrecisionConfig).
    in_compute_dtype: paths of the weights that are multiplied in the compute dtype, whatever `matmul` is.
    """

    def attach(path: str, spec: Spec, array: jax.Array, perturbation: jax.Array | None) -> PlacedWeight:
        precision = placement.precision.for_param(spec)
        resting, gathered = zero.parameter_sharding(spec, placement), zero.gathered_sharding(spec, placement)
        shardings = WeightShardings(
            resting=resting,
            gathered=gathered,
            gather_block=_find_gather_block(spec, resting, gathered, placement),
            gradient=zero.gradient_sharding(spec, placement),
            coded_sum=find_coded_sum(spec, placement),
            row_sum=find_row_sum(spec, placement),
            compute_dtype=precision.compute_dtype,
            reduce_dtype=precision.reduce_dtype,
            matmul="compute_dtype" if path in in_compute_dtype else matmul,
            outlier_threshold=precision.outlier_threshold,
            keep_gathered=keep_gathered,
            trainable=perturbation is not None,
            grouped=placement.in_gradient_group,
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

    It is cast first: a gather of 16 bits moves half of the bytes of one of 32. Only a gather in the default dtype moves
    blocks of codes; another dtype belongs to codes or scales, which are not rounded again.
    """
    shardings = weight.shardings
    if dtype is None and shardings.gather_block:
        moved = codes.move_blocks(weight.array, shardings.resting, shardings.gathered, shardings.gather_block, bits=8)
        return moved.astype(shardings.compute_dtype)
    array = weight.array.astype(dtype or weight.shardings.compute_dtype)
    # With only one constraint, XLA sometimes gathers the float32 master and casts afterwards.
    array = jax.lax.with_sharding_constraint(array, weight.shardings.resting)
    return jax.lax.with_sharding_constraint(array, weight.shardings.gathered)


def reduce_gradient(gradient: jax.Array, shardings: WeightShardings) -> jax.Array:
    """Cast a weight's gradient to the reduction's dtype, and constrain it to the gradient's sharding.

    It is `gather_array` transposed. For the devices' partial sums, XLA inserts a reduce-scatter or all-reduce over the
    mesh axes that divide the tokens, except the axes of the gradient groups.
    """
    if shardings.sums_later:
        assert shardings.row_sum is not None
        return shardings.row_sum.as_parts(gradient.astype(shardings.reduce_dtype))
    return jax.lax.with_sharding_constraint(gradient.astype(shardings.reduce_dtype), shardings.gradient)


def reduce_parts(parts: jax.Array, axes: tuple[str, ...], shardings: WeightShardings) -> jax.Array:
    """Sum the parts of a gradient, [N, ...]: one for each device along these mesh axes."""
    if shardings.coded_sum:
        return shardings.coded_sum.add(parts, axes).astype(shardings.reduce_dtype)
    return reduce_gradient(sum_parts(parts), shardings)


def sum_after_loop(weight: PlacedWeight) -> PlacedWeight:
    """Return a weight for the iterations of a loop. They add up each device's part of the gradient, in float32.

    The parts are summed over devices after the loop. Otherwise each iteration would reduce the whole gradient.
    """
    shardings, mesh = weight.shardings, weight.shardings.gathered.mesh
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)
    if weight.perturbation is None or shardings.sums_later or not axes:
        return weight
    parts = NamedSharding(mesh, PartitionSpec(*axes, *shardings.gathered.spec))
    rows = RowSum(tuple(mesh.shape[axis] for axis in axes), parts, steps=())
    inside = replace(shardings, row_sum=rows, reduce_dtype="float32")
    return replace(weight, perturbation=_split_perturbation(rows, shardings, weight.perturbation), shardings=inside)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _split_perturbation(rows: RowSum, shardings: WeightShardings, perturbation: jax.Array) -> jax.Array:
    """Return zeros, [*sizes, ...], whose cotangent is the parts of the gradient."""
    zeros = jnp.zeros((*rows.sizes, *perturbation.shape), jnp.float32)
    return jax.lax.with_sharding_constraint(zeros, rows.parts)


def _sum_parts_of_loop(
    rows: RowSum, shardings: WeightShardings, shape: tuple[int, ...], parts: jax.Array
) -> tuple[jax.Array]:
    if shardings.row_sum:
        return (shardings.row_sum.add(parts.reshape(rows.count, *shape)).astype(shardings.reduce_dtype),)
    parts = parts.astype(shardings.reduce_dtype).reshape(rows.count, *shape)
    return (reduce_gradient(sum_parts(parts), shardings),)


_split_perturbation.defvjp(
    lambda rows, shardings, perturbation: (_split_perturbation(rows, shardings, perturbation), perturbation.shape),
    _sum_parts_of_loop,
)


def sum_parts(parts: jax.Array) -> jax.Array:
    """Return the sum over devices: [devices, ...] -> [...]."""
    # Not jnp.sum: it would widen 16-bit values to float32, and so the bytes between devices.
    return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, (0,))


def reduce_groups(specs: tree.Tree, gradients: tree.Tree, placement: Placement) -> tree.Tree:
    """Sum gradients [G, ...] over the gradient groups, and leave each device its part of the masters' division."""
    return jax.tree.map(lambda spec, gradient: _reduce_groups(spec, gradient, placement), specs, gradients)


def sum_over_data(spec: Spec, parts: jax.Array, placement: Placement) -> jax.Array:
    """Sum one leaf [G, ...], which `data` divides, over its first dimension.

    `sharding.data_gradients` sets the format in which it moves. The sum is float32, and rests as
    `zero.scattered_sharding` says.
    """
    scattered = _scattered_dims(spec, placement)
    if steps := _plan_data_sum(spec, scattered, placement):
        return codes.run_steps(parts, steps)
    parts = parts.astype(placement.precision.for_param(spec).reduce_dtype)
    return _sum_over_axes(parts, ("data",), 0, (), scattered, placement).astype(jnp.float32)


def gather_over_data(spec: Spec, array: jax.Array, placement: Placement) -> jax.Array:
    """Gather one leaf over `data`, from `zero.scattered_sharding`, in the format of `sum_over_data`; float32."""
    before, after = zero.scattered_sharding(spec, placement), zero.master_sharding(spec, placement)
    if steps := _plan_data_sum(spec, _scattered_dims(spec, placement), placement):
        return codes.move_blocks(array, before, after, steps[0].values, steps[0].bits)
    array = array.astype(placement.precision.for_param(spec).reduce_dtype)
    array = jax.lax.with_sharding_constraint(array, before)
    return jax.lax.with_sharding_constraint(array, after).astype(jnp.float32)


def _scattered_dims(spec: Spec, placement: Placement) -> Dims:
    return placement.dims(spec, zero.storage_axes(1, placement), ("data",))


def _reduce_groups(spec: Spec, gradient: jax.Array, placement: Placement) -> jax.Array:
    """Sum one leaf: a reduce-scatter over the axes that divide the masters, then an all-reduce over the others."""
    groups, dims = zero.gradient_group_axes(placement), placement.dims(spec, *zero.master_overlays(placement))
    gradient = gradient.astype(placement.precision.for_param(spec).reduce_dtype)
    gradient = gradient.reshape(*(placement.size(axis) for axis in groups), *spec.shape)
    if "data" in groups and (steps := _plan_data_sum(spec, dims, placement)):
        within = tuple(axis for axis in groups if axis != "data")  # `data` is the first of the groups
        dims_within = tuple(tuple(axis for axis in dim if axis != "data") for dim in dims)
        gradient = _sum_over_axes(gradient, within, 1, (("data",),), dims_within, placement)
        return codes.run_steps(gradient, steps)
    return _sum_over_axes(gradient, groups, 0, (), dims, placement).astype(jnp.float32)


def _sum_over_axes(
    gradient: jax.Array, axes: tuple[str, ...], first: int, leading: Dims, dims: Dims, placement: Placement
) -> jax.Array:
    """Sum over dimensions, one for each of the mesh axes, from dimension `first` on.

    leading: the mesh axes of the dimensions before them. dims: the mesh axes of the dimensions after them, in the
        result.
    """
    divides = [axis in (name for dim in dims for name in dim) for axis in axes]
    others = tuple((axis,) for axis, divide in zip(axes, divides, strict=True) if not divide)
    phases = (
        (True, placement.named_sharding(leading + others + dims)),
        (False, placement.named_sharding(leading + dims)),
    )
    for phase, sharding in phases:
        summed = tuple(first + i for i, divide in enumerate(divides) if divide is phase)
        if summed:
            # Not jnp.sum: it would widen 16-bit values to float32, and with them the bytes between devices.
            gradient = jax.lax.reduce(gradient, jnp.zeros((), gradient.dtype), jax.lax.add, summed)
            gradient = jax.lax.with_sharding_constraint(gradient, sharding)
            divides = [divide for divide in divides if divide is not phase]
    return gradient


def _plan_data_sum(spec: Spec, end: Dims, placement: Placement) -> list[codes.SumStep]:
    """Return the steps of a gradient's sum over `data` as codes; [] if the sum is exact.

    end: the mesh axes of the gradient's dimensions after the sum.
    """
    form, within = placement.sharding.data_gradients, placement.dims(spec, zero.storage_axes(1, placement))
    if not codes.moves_as_blocks(spec):
        return []
    steps = codes.plan_sum(spec, ("data", form), (), (within, _scattered_dims(spec, placement), end), placement)
    return steps if steps[0].before else []


def _find_gather_block(spec: Spec, before: NamedSharding, after: NamedSharding, placement: Placement) -> int | None:
    """Return the number of values in a block if a weight is gathered as int8 codes; None if it is gathered exactly."""
    if not _gathers_codes(before, after, placement) or not codes.moves_as_blocks(spec):
        return None
    return codes.find_block_size(spec.shape, before, after)


def find_exact_matrices(specs: tree.Tree, placement: Placement) -> list[str]:
    """Return the paths of matrices that move exactly in spite of `int8_gathers`, `data_gradients` or `fsdp_gradients`.

    Their last dimension has no whole blocks on each device, or the axis divides none of their dimensions.
    """
    sharding = placement.sharding
    exchanges = sharding.data_gradients != "exact" and placement.size("data") > 1
    adds_codes = sharding.fsdp_gradients != "exact" and placement.size("fsdp") > 1 and sharding.zero_stage >= 2

    def sums_exactly(spec: Spec) -> bool:
        if placement.reduces_microbatches:
            row_sum = find_row_sum(spec, placement)
            return exchanges + adds_codes > (row_sum.coded if row_sum else 0)
        exact = exchanges and not _plan_data_sum(spec, _scattered_dims(spec, placement), placement)
        return exact or (adds_codes and find_coded_sum(spec, placement) is None)

    def find(path: str, spec: Spec) -> str | None:
        if not codes.moves_as_blocks(spec):
            return None
        master, resting = zero.master_sharding(spec, placement), zero.parameter_sharding(spec, placement)
        moves = (master, resting), (resting, zero.gathered_sharding(spec, placement))
        coded = [each for each in moves if _gathers_codes(*each, placement)]
        exact = any(codes.find_block_size(spec.shape, *each) is None for each in coded)
        return path if exact or sums_exactly(spec) else None

    return jax.tree.leaves(tree.map_with_path(find, specs))


def _gathers_codes(before: NamedSharding, after: NamedSharding, placement: Placement) -> bool:
    return bool((_list_axes(before) - _list_axes(after)) & {*placement.sharding.int8_gathers})


def _list_axes(sharding: NamedSharding) -> set[str]:
    return {*jax.tree.leaves(tuple(sharding.spec))}
