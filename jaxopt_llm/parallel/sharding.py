"""Placement: where every array lives, by two tables of logical axes (axes.py) and ZeRO's overlay.

Layers name logical axes only. One table maps them to mesh axes for parameters, another for activations. ZeRO is four
placements laid over the parameters' table: of compute parameters, gradients, master parameters and moments. The
placement is an explicit argument, never ambient, because a jitted function must not remember a stale one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm import tree
from jaxopt_llm.errors import InputError
from jaxopt_llm.kernels import ring
from jaxopt_llm.parallel.axes import (
    ACTIVATION_AXES,
    PARAMETER_AXES,
    REPLICATED_WHEN_SMALLER,
    SEQUENCE_PARALLEL_AXES,
    STAGED_WHERE_IT_DIVIDES,
    STORAGE_AXES,
)
from jaxopt_llm.parallel.gathering import Placed, WeightShardings, gather_sequence, scatter_sequence
from jaxopt_llm.parallel.mesh import AXES
from jaxopt_llm.parallel.offload import HOST, OFF, OffloadConfig
from jaxopt_llm.parallel.precision import Exactness, Matmul, PrecisionConfig

GROUPS = "gradient_groups"  # the name of the `vmap` over them, for what is wanted of all groups together

Dims = tuple[tuple[str, ...], ...]  # mesh axes of each dimension


class Spec(Exactness, Protocol):
    """What the placement reads of a parameter (model/param.py's ParamSpec)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str | None, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def leading(self) -> int: ...


@dataclass(frozen=True)
class ShardingConfig:
    zero_stage: Literal[0, 1, 2, 3] = 3
    """what mesh.fsdp divides: 0 nothing, 1 masters and moments, 2 and gradients, 3 and compute parameters"""
    sequence_parallel: bool = False
    """whether mesh.tensor also divides, along the sequence, norms and the residual stream (Korthikanti et al. 2022)"""
    context_exchange: Literal["ring", "all_to_all"] = "ring"
    """what attention exchanges over mesh.context: ring: keys and values go round, while those that came before are
    attended to; all_to_all: each device's part of the sequence for a part of the heads, and back"""
    expert_exchange: Literal["auto", "gather", "all_to_all", "ragged"] = "auto"
    """what goes over mesh.expert: gather: every token to all its devices; all_to_all: each choice to its expert's;
    ragged: likewise, without what is not filled, on GPUs alone; auto: the first or the second, by their bytes"""
    expert_room: float = 2.0
    """of all_to_all and ragged: how many times the choices of an even load go between two devices at a time; what is
    left goes after"""

    def problems(self) -> list[str]:
        if self.expert_room >= 1:
            return []
        return [f"sharding.expert_room={self.expert_room}: must be at least 1, which has room for an even load"]


@dataclass(frozen=True)
class Placement:
    """mesh, what is divided over it, dtypes, and what rests on the host; `grouped` are the batch axes that a
    surrounding `vmap` stands for."""

    mesh: Mesh | AbstractMesh
    sharding: ShardingConfig
    precision: PrecisionConfig
    offload: OffloadConfig = OFF
    grouped: tuple[str, ...] = ()

    @property
    def compute_copy(self) -> bool:
        """Whether compute parameters rest beside the masters. In stages 0 and 3 the masters are cast in the block."""
        return self.sharding.zero_stage in (1, 2)

    @property
    def divides_masters(self) -> bool:
        return self.sharding.zero_stage >= 1

    @property
    def gradient_groups(self) -> tuple[str, ...]:
        """The batch axes on which gradients are whole: one group each, summed once after the microbatches. Never
        `expert`, over which the devices of a group exchange tokens."""
        axes = ("data", "fsdp") if self.sharding.zero_stage < 2 else ("data",)
        return tuple(axis for axis in axes if self.size(axis) > 1)

    def group(self) -> "Placement":
        """The placement inside a `vmap` over the gradient groups: activations are no longer split over them."""
        return replace(self, grouped=self.gradient_groups)

    def for_evaluation(self) -> "Placement":
        return replace(self, precision=self.precision.for_evaluation())

    def size(self, *axes: str) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    # --- activations

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pins an activation, with one logical axis for each of its dimensions."""
        split = (
            None if axis and self.replicates(axis, size) else axis for axis, size in zip(axes, x.shape, strict=True)
        )
        return jax.lax.with_sharding_constraint(x, self.activation(*split))

    def whole(self, x: jax.Array) -> jax.Array:
        """Pins what every device of a gradient group has all of."""
        return jax.lax.with_sharding_constraint(x, self.replicated)

    def activation(self, *axes: str | None) -> NamedSharding:
        absent = {axis for axis in AXES if self.size(axis) == 1 or axis in self.grouped}
        table = ACTIVATION_AXES | SEQUENCE_PARALLEL_AXES if self.sharding.sequence_parallel else ACTIVATION_AXES
        dims = (table[axis] if axis else () for axis in axes)
        return self._sharding(tuple(tuple(axis for axis in dim if axis not in absent) for dim in dims))

    def enter(self, x: jax.Array) -> jax.Array:
        """[B, S, D] of the residual stream, as a product split over `tensor` reads it: with all its positions."""
        return gather_sequence(x, *self._sequences) if self._splits_sequence else x

    def leave(self, y: jax.Array) -> jax.Array:
        """A product [B, S, D] that sums over what `tensor` splits, as it joins the residual stream: `enter`
        transposed."""
        return scatter_sequence(y, *self._sequences) if self._splits_sequence else y

    @property
    def deals(self) -> bool:
        """Whether the sequence is dealt to the devices of a ring, instead of divided in its order."""
        return self.size("context") > 1 and self.sharding.context_exchange == "ring"

    @property
    def key_parts(self) -> int:
        """In how many parts, a call of its kernel each, attention is given the keys."""
        return self.size("context") if self.deals else 1

    @property
    def head_shards(self) -> int:
        """Into how many parts attention divides the heads."""
        return self.size("tensor") * (1 if self.sharding.context_exchange == "ring" else self.size("context"))

    def dealt(self, tokens: jax.Array) -> jax.Array:
        """Numbers of tokens [B, S] in the order in which the devices have them. All of them go everywhere for it: small
        before anything that a model makes of a token."""
        if not self.deals:
            return self.constrain(tokens, "batch", "sequence")
        whole = self.constrain(tokens, "batch", None)
        return self.constrain(ring.deal(whole, self.size("context")), "batch", "sequence")

    def on_each_device(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """`function` of each device's own parts, in which collectives are written out; inputs, outputs: PartitionSpecs.

        Over all axes of the mesh: over some alone XLA would gather what the others divide.
        """
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, axis_names=self._automatic, check_vma=False
        )

    @property
    def device_axes(self) -> tuple[str, ...]:
        """The axes that divide what every device has for itself, stacked along one dimension."""
        return tuple(axis for axis in AXES if axis in self._automatic and axis not in self.grouped)

    # --- the stages of a pipeline

    @property
    def on_stage(self) -> bool:
        """Whether this is the placement inside a region that is manual over `pipeline`: arrays are one stage's."""
        return "pipeline" not in self._automatic

    @property
    def _automatic(self) -> set[str]:
        kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return {axis for axis, kind in kinds if kind is not AxisType.Manual}

    def over_stages(self, spec: Spec) -> PartitionSpec:
        """What each stage gets of an array, where it enters a region that is manual over `pipeline`."""
        by = (PARAMETER_AXES[axis] if axis else () for axis in spec.axes)
        return PartitionSpec(*("pipeline" if "pipeline" in each else None for each in by))

    def staged(self, spec: Spec) -> bool:
        """Whether each stage has rows of its own of what is outside the stacks."""
        return spec.axes[0] in STAGED_WHERE_IT_DIVIDES

    def of_stage(self, axis: str | None, size: int) -> int:
        """What a stage gets of a dimension that may be padded for it."""
        if axis not in STAGED_WHERE_IT_DIVIDES:
            return size
        by_tensor = self.size("tensor")
        return -(-size // (self.size("pipeline") * by_tensor)) * by_tensor

    def between_stages(self, x: jax.Array) -> jax.Array:
        """Pins [B, S, D] of the residual stream as it is sent, summed over stages, and kept."""
        return jax.lax.with_sharding_constraint(x, self.sent(x.shape[1]))

    def enter_stage(self, x: jax.Array) -> jax.Array:
        """What was sent, as a stage's layers read it. Pinned here and in `leave_stage`, its gradient, too: XLA would
        divide the layers' own sums as what is sent, and gather them for each."""
        whole = self.activation("batch", "residual_sequence", "embed")
        return jax.lax.with_sharding_constraint(gather_sequence(x, self.sent(x.shape[1]), whole), whole)

    def leave_stage(self, y: jax.Array) -> jax.Array:
        """What a stage's layers give, as it is sent: `enter_stage` transposed."""
        whole = self.activation("batch", "residual_sequence", "embed")
        return scatter_sequence(jax.lax.with_sharding_constraint(y, whole), self.sent(y.shape[1]), whole)

    def sent(self, sequence: int) -> NamedSharding:
        """`tensor` divides it, too, where it can, that no two devices send the same (Narayanan et al. 2021,
        arXiv:2104.04473, section 4.1)."""
        divides = sequence % self.size("context", "tensor") == 0
        return self.activation("batch", "sent_sequence" if divides else "residual_sequence", "embed")

    @property
    def _splits_sequence(self) -> bool:
        return self.sharding.sequence_parallel and self.size("tensor") > 1

    @property
    def _sequences(self) -> tuple[NamedSharding, NamedSharding]:
        return self.activation("batch", "residual_sequence", "embed"), self.activation("batch", "sequence", "embed")

    # --- parameters

    def masters(self, spec: Spec) -> NamedSharding:
        """Of master parameters and their moments."""
        return self._sharding(self._dims(spec, self._storage(1)))

    def optimizer_state(self, spec: Spec) -> NamedSharding:
        """Of what the update alone reads: moments, and masters beside a compute copy. Counts stay on the device."""
        return _resting(self.masters(spec), self.offload.optimizer and len(spec.shape) > spec.leading)

    def parameters(self, spec: Spec) -> NamedSharding:
        """Of the parameters that the model reads: the compute copy, or the masters where there is none."""
        return self._sharding(self._dims(spec, self._storage(3)))

    def resting_parameters(self, spec: Spec) -> NamedSharding:
        """The same between their uses. What is outside the stacks stays on the device."""
        return _resting(self.parameters(spec), self.offload.parameters and spec.leading > 0)

    def saved(self, spec: Spec) -> NamedSharding:
        """Of what a checkpoint holds, on its way there and back. A stack is whole there, not split over stages, so that
        `pipeline` divides as fsdp does: no device holds more than it does at rest."""
        return self._sharding(self._dims(spec, self._storage(1), ("pipeline",)))

    def abstract(self, specs: tree.Tree) -> tree.Tree:
        """What a checkpoint holds as ShapeDtypeStructs with shardings: what to restore into. On the host where a part
        rests there: the devices may not hold it."""
        on_host = self.offload.optimizer or self.offload.parameters
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_resting(self.saved(x), on_host)), specs
        )

    def gradients(self, spec: Spec) -> NamedSharding:
        """Of gradients, within one gradient group."""
        return self._sharding(self._dims(spec, self._storage(2)))

    def gathered(self, spec: Spec) -> NamedSharding:
        """Of parameters while they are used, and of gradients before they are reduced: whole but for `tensor`."""
        return self._sharding(self._dims(spec))

    def compute_parameters(self, specs: tree.Tree, masters: tree.Tree) -> tree.Tree:
        """The compute copy of the masters: one gather in compute dtype."""

        def copy(spec: Spec, master: jax.Array) -> jax.Array:
            narrow = master.astype(self.precision.of(spec).compute_dtype)
            narrow = jax.lax.with_sharding_constraint(narrow, self.masters(spec))
            return jax.lax.with_sharding_constraint(narrow, self.parameters(spec))

        return jax.tree.map(copy, specs, masters)

    def reduce_groups(self, spec: Spec, gradients: jax.Array) -> jax.Array:
        """Sums [G, ...] over the gradient groups and leaves each device its part of the masters' division.

        First over the axes that divide the masters, a reduce-scatter, then over the others, an all-reduce of that part.
        """
        groups, dims = self.gradient_groups, self._dims(spec, self._storage(1))
        divides = [axis in (name for dim in dims for name in dim) for axis in groups]
        gradients = gradients.astype(self.precision.of(spec).reduce_dtype)
        gradients = gradients.reshape(*(self.size(axis) for axis in groups), *spec.shape)
        others = tuple((axis,) for axis, divide in zip(groups, divides, strict=True) if not divide)
        for phase, sharding in ((True, self._sharding(others + dims)), (False, self._sharding(dims))):
            summed = tuple(i for i, divide in enumerate(divides) if divide is phase)
            if summed:
                # Not jnp.sum: it would widen 16-bit values to float32, and so the bytes between devices.
                gradients = jax.lax.reduce(gradients, jnp.zeros((), gradients.dtype), jax.lax.add, summed)
                gradients = jax.lax.with_sharding_constraint(gradients, sharding)
                divides = [divide for divide in divides if divide is not phase]
        return gradients.astype(jnp.float32)

    def taps(self, specs: tree.Tree) -> tree.Tree:
        """What to differentiate by, in place of these parameters (see Placed)."""

        def zeros(spec: Spec) -> jax.Array:
            tap = jnp.zeros(spec.shape, self.precision.of(spec).reduce_dtype)
            return jax.lax.with_sharding_constraint(tap, self.gradients(spec))

        return jax.tree.map(zeros, specs)

    def place(
        self,
        specs: tree.Tree,
        weights: tree.Tree,
        taps: tree.Tree,
        keep: bool,
        matmul: Matmul = "compute_dtype",
    ) -> tree.Tree:
        """Weights as the model takes them. They are gathered where they are used, again in the backward unless `keep`.

        taps: `taps(specs)`, or a tree with None for the weights that want no gradient.
        keep: whether the backward reuses the forward's gathered weight. True within a rematerialised block, where the
            forward is the recomputation, a moment ago; else it would keep every gathered layer alive.
        matmul: in what their products are formed (see PrecisionConfig).
        """

        def leaf(spec: Spec, array: jax.Array, tap: jax.Array | None) -> Placed:
            shardings = WeightShardings(
                resting=self.parameters(spec),
                gathered=self.gathered(spec),
                gradient=self.gradients(spec),
                compute_dtype=self.precision.of(spec).compute_dtype,
                reduce_dtype=self.precision.of(spec).reduce_dtype,
                matmul=matmul,
                keep=keep,
                trainable=tap is not None,
                grouped=bool(self.grouped),
                staged=self.on_stage and self.staged(spec),
            )
            return Placed(array, tap, shardings)

        return jax.tree.map(leaf, specs, weights, taps)

    def replicates(self, spec_axis: str, size: int) -> bool:
        """Whether a logical axis of this size rests replicated although the table splits it."""
        return spec_axis in REPLICATED_WHEN_SMALLER and size < self.size(*PARAMETER_AXES[spec_axis])

    def undivided(self, specs: tree.Tree) -> list[str]:
        """Paths of the parameters that ZeRO leaves whole because none of their dimensions divides."""
        storage = {axis for axis in STORAGE_AXES if self.size(axis) > 1}

        def whole(path: str, spec: Spec) -> str | None:
            own = {axis for dim in self._dims(spec) for axis in dim}
            return path if storage - own and self._dims(spec, STORAGE_AXES) == self._dims(spec) else None

        return [] if self.sharding.zero_stage == 0 else jax.tree.leaves(tree.map_with_path(whole, specs))

    def _storage(self, stage: int) -> tuple[str, ...]:
        """What divides an array that ZeRO divides from this stage on."""
        return STORAGE_AXES if self.sharding.zero_stage >= stage else ()

    def _dims(self, spec: Spec, *overlays: tuple[str, ...]) -> Dims:
        """Mesh axes of each dimension: the parameters' table, with groups of storage axes laid over it, in order.

        A group goes to the first dimension (of one layer) that still divides by it after what has been taken already.
        First, because splitting a stack on its minor dimension makes XLA transpose it whole around the loop, and
        because a gather along the leading dimension is a plain concatenation.
        """
        dims: list[tuple[str, ...]] = []
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            wanted = tuple(a for a in PARAMETER_AXES[axis] if self.size(a) > 1) if axis else ()
            if self.on_stage or (axis in STAGED_WHERE_IT_DIVIDES and size % self.size(*wanted)):
                wanted = tuple(a for a in wanted if a != "pipeline")
            dims.append(() if axis and self.replicates(axis, size) else wanted)
        for overlay in overlays:
            used = {axis for dim in dims for axis in dim}
            storage = tuple(axis for axis in overlay if axis not in used and self.size(axis) > 1)
            for i in range(spec.leading, len(dims)):
                if storage and spec.shape[i] % self.size(*dims[i], *storage) == 0:
                    dims[i] += storage
                    break
        return tuple(dims)

    def _sharding(self, dims: Dims) -> NamedSharding:
        used = [axis for dim in dims for axis in dim]
        if len(used) != len(set(used)):
            raise InputError(f"sharding: two dimensions of one array are on the same mesh axis: {dims}")
        entries = [dim if len(dim) > 1 else dim[0] if dim else None for dim in dims]
        return NamedSharding(self.mesh, PartitionSpec(*entries))


def _resting(sharding: NamedSharding, on_host: bool) -> NamedSharding:
    return sharding.with_memory_kind(HOST) if on_host else sharding
