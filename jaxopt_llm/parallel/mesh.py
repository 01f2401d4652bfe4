"""The device mesh, with six named axes: an axis of size 1 is off. Parts of an array by device, rows by process."""

import collections
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxopt_llm.config import AXES, MeshConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed.runtime import prepare_devices

AXIS_TYPES = (AxisType.Auto,) * len(AXES)


def visible_devices() -> list[jax.Device]:
    """Return the devices of the default backend.

    Raises InputError if JAX can open no device.
    """
    prepare_devices()
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for JAX_PLATFORMS=cuda without a GPU
        raise InputError(f"no device to run on ({error}); check JAX_PLATFORMS and the GPU's driver") from error
    if devices[0].platform == "cpu" and len(devices) > 1:
        disable_compilation_cache()
    return devices


def disable_compilation_cache() -> None:
    """Turn JAX's cache of compiled programs off, because XLA restores programs for several CPU devices wrongly.

    In a compiled program, one resource orders all collectives. When the program is restored, every loop gets its own
    resource. Two devices can then begin the collectives of two loops in different orders and wait for each other for
    ever (openxla/xla, xla/backends/cpu/runtime/thunk_proto_serdes.cc).
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads the setting only once


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh over exactly these devices, by default over as many devices of each process as it needs.

    Raises InputError if their number is not the mesh's.
    """
    devices = _take_devices(visible_devices(), config.devices) if devices is None else devices
    if len(devices) != config.devices:
        sizes = " × ".join(f"{axis} {size}" for axis, size in config.sizes.items() if size > 1) or "all 1"
        raise InputError(
            f"mesh: {sizes} needs {config.devices} device(s) but {len(devices)} {devices[0].platform} device(s) are "
            f"visible; change --mesh.* so that the product is at most {len(devices)}"
        )
    return Mesh(np.array(devices).reshape(tuple(config.sizes.values())), AXES, axis_types=AXIS_TYPES)


def _take_devices(devices: Sequence[jax.Device], count: int) -> Sequence[jax.Device]:
    """Return the first devices of each process, as many of each, or all if there are not more than `count`."""
    processes = sorted({device.process_index for device in devices})
    each, rest = divmod(count, len(processes))
    if count >= len(devices) or rest:
        return devices
    of_process = ([device for device in devices if device.process_index == index] for index in processes)
    return [device for some in of_process for device in some[:each]]


def make_abstract_mesh(config: MeshConfig) -> AbstractMesh:
    """Return the mesh without devices, for shapes, shardings and estimates."""
    return AbstractMesh(tuple(config.sizes.values()), AXES, axis_types=AXIS_TYPES)


def group_devices(sharding: NamedSharding, shape: Sequence[int]) -> list[list[int]]:
    """Return the groups of devices that hold the same part of an array, by their indices in the mesh."""
    groups: dict[str, list[int]] = collections.defaultdict(list)
    parts = sharding.devices_indices_map(tuple(shape))
    for index, device in enumerate(sharding.mesh.devices.flat):
        groups[str(parts[device])].append(index)
    return list(groups.values())


@dataclass(frozen=True)
class LocalRows:
    """The rows of this process in batches [M·B, ...], which are on the devices of all processes as [M, B, ...].

    The process reads the rows of all its devices: some rows of every microbatch. If an axis that does not split the
    batch crosses two processes, both read the same rows.

    shape: (M, B, ...), M microbatches; the fields of a batch may differ in the dimensions after these two.
    sharding: of arrays of this shape.
    """

    shape: tuple[int, ...]
    sharding: NamedSharding

    @functools.cached_property
    def _in_microbatch(self) -> np.ndarray:
        local = self.sharding.addressable_devices_indices_map(self.shape).values()
        return np.unique([row for index in local if index for row in range(self.shape[1])[index[1]]])

    @functools.cached_property
    def indices(self) -> list[int]:
        """Indices of the rows in the batch, in the order in which `make_global` takes them."""
        microbatches, rows, *_ = self.shape
        return [int(first + row) for first in range(0, microbatches * rows, rows) for row in self._in_microbatch]

    def make_global(self, batch: tree.Tree) -> tree.Tree:
        """Return fields [local rows, ...] as [M, B, ...], over the devices of all processes."""
        microbatches, rows, *_ = self.shape

        def make_field(field: np.ndarray) -> jax.Array:
            local = field.reshape(microbatches, -1, *field.shape[1:])

            def shard(index: Any) -> np.ndarray:
                first, last, _ = index[1].indices(rows)
                begin = np.searchsorted(self._in_microbatch, first)
                return local[index[0], begin : begin + last - first, *index[2:]]

            return jax.make_array_from_callback((microbatches, rows, *field.shape[1:]), self.sharding, shard)

        return jax.tree.map(make_field, batch)
