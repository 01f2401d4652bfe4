"""ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): where parameters, gradients and optimizer state rest.

It adds storage axes (`fsdp`, `context` and `expert` together) to the parameters' table (`Placement.dims`). They divide
masters and moments from stage 1 on, gradients from stage 2 on, and in stage 3 (the default) also the parameters that
the model reads. Stages 1 and 2 keep a whole compute copy next to the divided masters; in stages 0 and 3 the model reads
the masters. With `sharding.optimizer_over_data`, `data` also divides masters and moments, and every stage has a compute
copy, divided over the storage axes in stage 3.

A function `..._sharding` takes a ParamSpec and returns a NamedSharding, or takes a pytree of ParamSpecs and returns a
pytree of NamedShardings.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxopt_llm.core import tree
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.parallel.offload import HOST
from jaxopt_llm.parallel.placement import Placement, Spec

LOCAL_GROUPS = "local_groups"  # axis name of the `vmap` over groups that train by themselves
# Variables up to this size are on every device: to gather them costs more time than memory is saved.
WHOLE_BYTES = 2**16
GROUP_AXIS = "gradient_groups"  # axis name of the `vmap` over gradient groups, for collectives over all groups


def has_compute_copy(placement: Placement) -> bool:
    """Return whether compute parameters rest next to the masters, because the two are divided in different ways.

    Otherwise, in stages 0 and 3, each block casts the masters.
    """
    return placement.sharding.zero_stage in (1, 2) or _divides_over_data(placement)


def divides_masters(placement: Placement) -> bool:
    return placement.sharding.zero_stage >= 1 or _divides_over_data(placement)


def _divides_over_data(placement: Placement) -> bool:
    return placement.sharding.optimizer_over_data and placement.size("data") > 1


def master_overlays(placement: Placement) -> tuple[tuple[str, ...], ...]:
    """Return the groups of mesh axes that divide masters and moments, in addition to the parameters' table.

    `data` comes last, so that it divides the part that a replica's device reads: a gather over it alone joins them.
    """
    over_data = (("data",),) if _divides_over_data(placement) else ()
    return (storage_axes(1, placement), *over_data)


def gradient_group_axes(placement: Placement) -> tuple[str, ...]:
    """Return the mesh axes over which gradients are summed once, after the microbatches.

    Each index along these axes is one gradient group: the devices that share a part of the batch. `expert` is never one
    of the axes: the devices of a group exchange tokens over it.
    """
    if placement.reduces_microbatches:
        return ()
    axes = ("data", "fsdp") if placement.sharding.zero_stage < 2 else ("data",)
    return tuple(axis for axis in axes if placement.size(axis) > 1 and axis not in placement.independent)


def inside_gradient_group(placement: Placement) -> Placement:
    """Return the placement inside a `vmap` over the gradient groups, where no activation is split over them."""
    return replace(placement, grouped=(*placement.grouped, *gradient_group_axes(placement)))


# --- the shardings


def master_sharding(specs: Any, placement: Placement) -> Any:
    """Return the sharding of master parameters and of their moments."""
    return jax.tree.map(lambda spec: placement.parameter(spec, *master_overlays(placement)), specs)


def gradient_sharding(specs: Any, placement: Placement) -> Any:
    """Return the sharding of gradients within one gradient group, or of those that are summed over all devices."""
    overlays = master_overlays(placement) if placement.reduces_microbatches else (storage_axes(2, placement),)
    return jax.tree.map(lambda spec: placement.parameter(spec, *overlays), specs)


def parameter_sharding(specs: Any, placement: Placement) -> Any:
    """Return the sharding of the parameters that the model reads: the compute copy, or the masters without one."""
    return jax.tree.map(lambda spec: placement.parameter(spec, storage_axes(3, placement)), specs)


def gathered_sharding(specs: Any, placement: Placement) -> Any:
    """Return the sharding of parameters while they are used and of gradients before they are reduced.

    Only the mesh axes of the parameters' table divide them: `tensor`, `pipeline`, and for experts `expert`.
    """
    return jax.tree.map(placement.parameter, specs)


def scattered_sharding(specs: Any, placement: Placement) -> Any:
    """Return the sharding of what replicas exchange over `data`: each device has its part of the masters' part."""
    return jax.tree.map(lambda spec: placement.parameter(spec, storage_axes(1, placement), ("data",)), specs)


def resting_parameter_sharding(specs: Any, placement: Placement) -> Any:
    """Return `parameter_sharding` in the memory where they rest; parameters outside the segments stay on the device."""

    def sharding(spec: Spec) -> NamedSharding:
        return _in_memory(parameter_sharding(spec, placement), placement.offload.parameters and spec.leading > 0)

    return jax.tree.map(sharding, specs)


def variable_sharding(specs: Any, placement: Placement) -> Any:
    """Return the sharding of variables that are not parameters, such as queues, codebooks and averages of parameters.

    In stage 3 they rest divided like parameters. Small ones, such as keys, counts and running means, are whole.
    """

    def sharding(spec: Spec) -> NamedSharding:
        small = math.prod(spec.shape) * np.dtype(spec.dtype).itemsize <= WHOLE_BYTES
        return placement.replicated if small else parameter_sharding(spec, placement)

    return jax.tree.map(sharding, specs)


def optimizer_state_sharding(specs: Any, placement: Placement) -> Any:
    """Return the sharding of the arrays that only the update reads.

    These are optax's state of each period (moments and step counts) and, if there is a compute copy, the masters. Step
    counts stay on the device.
    """

    def sharding(spec: Spec) -> NamedSharding:
        on_host = placement.offload.optimizer and len(spec.shape) > spec.leading
        return _in_memory(master_sharding(spec, placement), on_host)

    return jax.tree.map(sharding, specs)


def checkpoint_sharding(specs: Any, placement: Placement) -> Any:
    """Return the sharding of the arrays of a checkpoint, when they are saved and when they are restored.

    A segment is whole in a checkpoint, not split over stages. `pipeline` therefore divides as fsdp does, so that no
    device holds more than at rest.
    """
    return jax.tree.map(lambda spec: placement.parameter(spec, *master_overlays(placement), ("pipeline",)), specs)


def abstract_checkpoint(specs: tree.Tree, placement: Placement) -> tree.Tree:
    """Return the arrays of a checkpoint as ShapeDtypeStructs with shardings, to restore into.

    `restore_memory` says in which memory they are.
    """

    def abstract(spec: Spec) -> jax.ShapeDtypeStruct:
        sharding = restore_memory(checkpoint_sharding(spec, placement), placement)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

    return jax.tree.map(abstract, specs)


def restore_memory(sharding: NamedSharding, placement: Placement) -> NamedSharding:
    """Return the sharding in the memory into which checkpoints are read.

    It is the host's if a part of the state rests there, because the devices may be too small for all of it.
    """
    return _in_memory(sharding, placement.offload.optimizer or placement.offload.parameters)


def find_undivided(specs: tree.Tree, placement: Placement) -> list[str]:
    """Return the paths of the parameters that ZeRO leaves whole because none of their dimensions divides."""
    storage = {axis for axis in STORAGE_AXES if placement.size(axis) > 1}

    def whole(path: str, spec: Spec) -> str | None:
        table = placement.dims(spec)
        used = {axis for dim in table for axis in dim}
        return path if storage - used and placement.dims(spec, STORAGE_AXES) == table else None

    return jax.tree.leaves(tree.map_with_path(whole, specs)) if divides_masters(placement) else []


def storage_axes(zero_stage: int, placement: Placement) -> tuple[str, ...]:
    """Return STORAGE_AXES if the configured stage is at least `zero_stage`, otherwise no axes."""
    return STORAGE_AXES if placement.sharding.zero_stage >= zero_stage else ()


def _in_memory(sharding: NamedSharding, on_host: bool) -> NamedSharding:
    return sharding.with_memory_kind(HOST) if on_host else sharding
