"""The pieces of the masters that a process owns, as one vector on the host.

A part of a leaf is owned by the process whose device holds its first copy. So the pieces of all processes together are
the masters, once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.core import tree
from jaxopt_llm.model.model import Params
from jaxopt_llm.outer.codes import Layout, find_block_size
from jaxopt_llm.parallel.blocks import moves_as_blocks


@dataclass(frozen=True)
class _Leaf:
    """Owned pieces of one leaf: for each device that owns one, the part of the vector.

    store: see `_make_store`.
    """

    shape: tuple[int, ...]
    lifted: NamedSharding
    devices: dict[Any, tuple[int, int]]
    store: dict[bool, Callable[..., jax.Array]]


class Pieces:
    """Pieces of the masters that this process owns.

    Attributes:
        layout: of the vector.
        table: path, dtype, index, shape and block size of each piece, as JSON. It is equal for runs on equal meshes.
        exact: paths of matrices without whole blocks, which no format rounds.
    """

    def __init__(self, specs: Params, masters: Params) -> None:
        self._leaves: list[_Leaf] = []
        self.table: list[Any] = []
        self.exact: list[str] = []
        segments, end = [], 0
        for (path, array), spec in zip(tree.leaves_with_path(masters), jax.tree.leaves(specs), strict=True):
            own = sorted((each for each in array.addressable_shards if not each.replica_id), key=_position)
            devices = {}
            for shard in own:
                begin, end = end, end + math.prod(shard.data.shape)
                values = find_block_size(shard.data.shape[-1]) if moves_as_blocks(spec) else 0
                if moves_as_blocks(spec) and not values and path not in self.exact:
                    self.exact.append(path)
                devices[shard.device] = (begin, end)
                segments.append((end - begin, values))
                self.table.append([path, str(array.dtype), list(_position(shard)), list(shard.data.shape), values])
            sharding = array.sharding
            store = {adds: _make_store(array, adds) for adds in (False, True)}
            self._leaves.append(_Leaf(array.shape, _lift(sharding), devices, store))
        self.layout = Layout(tuple(segments))

    def read(self, masters: Params) -> np.ndarray:
        """Copy the pieces to the host, float32."""
        arrays = jax.tree.leaves(masters)
        for array in arrays:
            array.copy_to_host_async()
        vector = np.empty(self.layout.size, np.float32)
        for leaf, array in zip(self._leaves, arrays, strict=True):
            for shard in array.addressable_shards:
                if not shard.replica_id:
                    begin, end = leaf.devices[shard.device]
                    vector[begin:end] = np.asarray(shard.data).reshape(-1)
        return vector

    def write(self, masters: Params, vector: np.ndarray, adds: bool) -> Params:
        """Return masters with the values of the vectors of all processes, which all call this. It donates the masters.

        adds: add the values to the masters.
        """
        arrays, structure = jax.tree.flatten(masters)
        written = [self._write(*each, vector, adds) for each in zip(self._leaves, arrays, strict=True)]
        return jax.tree.unflatten(structure, written)

    @staticmethod
    def _write(leaf: _Leaf, array: jax.Array, vector: np.ndarray, adds: bool) -> jax.Array:
        """Return one leaf. Each device that owns no piece of it brings zeros, and a sum over the copies fills it."""
        shape = (1, *array.sharding.shard_shape(array.shape))

        def bring(device: Any) -> jax.Array:
            begin, end = leaf.devices.get(device, (0, 0))
            part = vector[begin:end].reshape(shape) if end > begin else np.zeros(shape, np.float32)
            return jax.device_put(part, device)

        parts = [bring(device) for device in array.sharding.addressable_devices_indices_map(array.shape)]
        copies = (_count_copies(leaf.lifted), *leaf.shape)
        brought = jax.make_array_from_single_device_arrays(copies, leaf.lifted, parts)
        return leaf.store[adds](array, brought)


def _position(shard: Any) -> tuple[int, ...]:
    return tuple(each.start or 0 for each in shard.index)


def _lift(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of an array with one more dimension in front: the copies that the devices hold."""
    mesh, spec = sharding.mesh, sharding.spec
    used = {axis for dim in spec for axis in ((dim,) if isinstance(dim, str) else dim or ())}
    copied = tuple(axis for axis in mesh.axis_names if axis not in used)
    return NamedSharding(mesh, PartitionSpec(copied, *spec))


def _count_copies(lifted: NamedSharding) -> int:
    return math.prod(lifted.mesh.shape[axis] for axis in lifted.spec[0] or ())


def _make_store(array: jax.Array, adds: bool) -> Callable[..., jax.Array]:
    """Return the jitted (leaf, brought copies) -> leaf, which donates the leaf."""

    def store(old: jax.Array, brought: jax.Array) -> jax.Array:
        total = jnp.sum(brought, axis=0)
        return (old + total if adds else total).astype(old.dtype)

    return jax.jit(store, out_shardings=array.sharding, donate_argnums=0)
