"""Placement: the mesh, and the rules that divide arrays over it.

Layers name only logical axes. One table (axes.py) maps them to mesh axes for parameters, another one for activations.
Functions of a placement add ZeRO (zero.py), sequence and context parallelism and pipeline stages (activations.py). The
placement is an explicit argument, never ambient, because a jitted function must not remember a stale one.

A layer says the name, the role and the logical axes of an intermediate once, in `constrain` or `mark`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.config import AXES, BATCH_AXES, OffloadConfig, PrecisionConfig, ShardingConfig
from jaxopt_llm.config.precision import Exactness
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.intermediate import Intermediate, Role
from jaxopt_llm.parallel.axes import (
    ACTIVATION_AXES,
    LOOPED_AXES,
    PARAMETER_AXES,
    REPLICATED_WHEN_SMALLER,
    SEQUENCE_PARALLEL_AXES,
    SPLIT_OVER_STAGES,
)
from jaxopt_llm.parallel.offload import NO_OFFLOAD

Dims = tuple[tuple[str, ...], ...]  # the mesh axes of each dimension


class Spec(Exactness, Protocol):
    """The attributes of a parameter (model/param.py's ParamSpec) that the placement reads."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str | None, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def contracting(self) -> tuple[int, ...]: ...
    @property
    def leading(self) -> int: ...


@dataclass(frozen=True)
class Placement:
    """The mesh, the settings of what is divided over it, the dtypes, and what rests in host memory.

    grouped: the mesh axes that a surrounding `vmap` already divides: one over gradient groups (zero.py), or over groups
        that train on their own. Shardings inside it do not name them.
    independent: the mesh axes along which groups of devices train on their own (step/local_steps.py). Gradients are
        not summed over them.
    reduces_microbatches: gradients are summed over all devices after each microbatch, without gradient groups. ZeRO
        then divides them from stage 1 on.
    """

    mesh: Mesh | AbstractMesh
    sharding: ShardingConfig
    precision: PrecisionConfig
    offload: OffloadConfig = NO_OFFLOAD
    grouped: tuple[str, ...] = ()
    independent: tuple[str, ...] = ()
    reduces_microbatches: bool = False

    def for_evaluation(self) -> "Placement":
        """Return the placement of an evaluation, which reads weights as exactly as they rest."""
        sharding = replace(self.sharding, int8_gathers=())
        return replace(self, sharding=sharding, precision=self.precision.for_evaluation())

    def size(self, *axes: str) -> int:
        """Return the number of devices along these mesh axes together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one device that the batch is split over."""
        return tuple(axis for axis in BATCH_AXES if self.size(axis) > 1)

    @property
    def in_gradient_group(self) -> bool:
        """True within a `vmap` over gradient groups, which has the axis name `zero.GROUP_AXIS`."""
        return bool({*self.grouped} - {*self.independent})

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    # --- regions that are manual over mesh axes (`jax.shard_map`)

    @property
    def inside_stage(self) -> bool:
        """True within the region that is manual over `pipeline`: each array there belongs to one stage."""
        return "pipeline" not in self._automatic_axes

    @property
    def device_axes(self) -> tuple[str, ...]:
        """The mesh axes that divide a dimension with one entry for each device."""
        return tuple(axis for axis in AXES if axis in self._automatic_axes and axis not in self.grouped)

    def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return `function` mapped over devices: it gets the device's shards and writes its collectives out.

        It is manual over all axes of the mesh. If it were manual over only some of them, XLA would gather what the
        others divide.
        """
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self._automatic_axes,
            check_vma=False,
        )

    @functools.cached_property
    def _automatic_axes(self) -> set[str]:
        kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return {axis for axis, kind in kinds if kind is not AxisType.Manual}

    # --- activations

    def activation(self, *axes: str | None) -> NamedSharding:
        """Return the sharding of an activation, given one logical axis for each of its dimensions."""
        unused = {axis for axis in AXES if self.size(axis) == 1 or axis in self.grouped}
        dims = (self._activation_table[axis] if axis else () for axis in axes)
        return self.named_sharding(tuple(tuple(axis for axis in dim if axis not in unused) for dim in dims))

    def count_batch_parts(self) -> int:
        """Return the number of devices that divide the rows of a batch, within a gradient group."""
        return self.size(*(axis for axis in self._activation_table["batch"] if axis not in self.grouped))

    def count_parts(self, axis: str | None, size: int) -> int:
        """Return the number of devices that divide a dimension of an activation."""
        return 1 if axis is None or self.replicates(axis, size) else self.size(*self._activation_table[axis])

    @property
    def _activation_table(self) -> dict[str, tuple[str, ...]]:
        return ACTIVATION_AXES | SEQUENCE_PARALLEL_AXES if self.sharding.sequence_parallel else ACTIVATION_AXES

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pin the sharding of an activation, given one logical axis for each of its dimensions."""
        sizes = zip(axes, x.shape, strict=True)
        split = (None if axis and self.replicates(axis, size) else axis for axis, size in sizes)
        return jax.lax.with_sharding_constraint(x, self.activation(*split))

    def replicate(self, x: jax.Array) -> jax.Array:
        """Pin an array that every device of a gradient group holds whole."""
        return jax.lax.with_sharding_constraint(x, self.replicated)

    # --- parameters

    def parameter(self, spec: Spec, *overlays: tuple[str, ...]) -> NamedSharding:
        """Return the sharding of a parameter; see `dims`."""
        return self.named_sharding(self.dims(spec, *overlays))

    def dims(self, spec: Spec, *overlays: tuple[str, ...]) -> Dims:
        """Return the mesh axes of each dimension: the parameters' table with the overlays on top of it, in order.

        An overlay is a group of mesh axes. It goes to the first dimension (of one layer) that still divides by the
        group after the axes that it already has. The first one, because XLA transposes a whole stack around the loop
        if its minor dimension is split, and because a gather along the leading dimension is a plain concatenation.
        """
        dims: list[tuple[str, ...]] = []
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            table = tuple(a for a in PARAMETER_AXES[axis] if self.size(a) > 1) if axis else ()
            if self.inside_stage or (axis in SPLIT_OVER_STAGES and size % self.size(*table)):
                table = tuple(a for a in table if a != "pipeline")
            dims.append(() if axis and self.replicates(axis, size) else table)
        for overlay in overlays:
            used = {axis for dim in dims for axis in dim}
            storage = tuple(axis for axis in overlay if axis not in used and self.size(axis) > 1)
            for i, (axis, size) in enumerate(zip(spec.axes, spec.shape, strict=True)):
                is_divided = axis not in LOOPED_AXES and size % self.size(*dims[i], *storage) == 0
                if storage and is_divided:
                    dims[i] += storage
                    break
        return tuple(dims)

    def replicates(self, axis: str, size: int) -> bool:
        """Return whether a logical axis of this size is replicated although the table splits it."""
        return axis in REPLICATED_WHEN_SMALLER and size < self.size(*PARAMETER_AXES[axis])

    def named_sharding(self, dims: Dims) -> NamedSharding:
        """Return the sharding with these mesh axes of each dimension.

        Raises InputError if two dimensions are on the same mesh axis.
        """
        used = [axis for dim in dims for axis in dim]
        if len(used) != len(set(used)):
            remedy = "give each axis to one dimension in parallel/axes.py"
            raise InputError(f"sharding: two dimensions on one mesh axis: {dims}; {remedy}")
        entries = [dim if len(dim) > 1 else dim[0] if dim else None for dim in dims]
        return NamedSharding(self.mesh, PartitionSpec(*entries))


def mark(x: jax.Array, name: str, role: Role, *axes: str | None) -> jax.Array:
    """Return x, with a name for `jax.checkpoint` policies and for the trace (execution/trace.py).

    It changes no sharding: for arrays whose sharding is pinned already.
    """
    return checkpoint_name(x, Intermediate(name, role, *axes))


def constrain(placement: Placement, x: jax.Array, name: str, role: Role, *axes: str | None) -> jax.Array:
    """Pin the sharding of x, given the logical axis of each dimension, and mark it."""
    return mark(placement.constrain(x, *axes), name, role, *axes)
