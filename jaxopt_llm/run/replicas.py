"""Check of the state for silent corruption: a device that computes or stores a wrong bit without an error.

Where a part of an array rests on several devices, its copies must be equal to the bit: each device computes a checksum
of each leaf that it holds, and the checksums of the copies are compared. An array without a copy has nothing to be
compared with. Then a step runs twice from the same state, and the checksums of the two results are compared.
"""

import collections
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.core import hashing, tree
from jaxopt_llm.core.errors import StateCorrupted
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.mesh import group_devices
from jaxopt_llm.step.state import TrainState
from jaxopt_llm.step.step import Metrics

Sums = dict[str, np.ndarray]  # path of a leaf -> uint32, the checksum of each device's part, in the order of the mesh
Run = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


class ReplicaCheck:
    """Check of every `every`-th step, and of every state that a checkpoint will hold; 0 = off."""

    def __init__(self, every: int, on_difference: Callable[[int, str, list[int]], None]) -> None:
        """Remember the rhythm.

        Args:
            on_difference: receives the step, the devices in words, and their processes, before the error is raised.
        """
        self._every, self._on_difference = every, on_difference
        self._checked = 0  # the last step whose copies were compared

    def step(self, step: int, run: Run, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Run a step, and check its result if it is due. The state is donated.

        Raises:
            StateCorrupted: copies differ, or the two runs of the step do.
        """
        if not self._every or step % self._every:
            return run(state, batch)
        if has_replicas(state):
            new = run(state, batch)
        else:
            before = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding, may_alias=False), state)
            new = run(state, batch)
            sums = compute_sums(new[0])
            again = compute_sums(run(before, batch)[0])
            if different := [path for path in sums if (sums[path] != again[path]).any()]:
                devices = [np.flatnonzero(sums[path] != again[path]) for path in different]
                self._report(step, "two runs of this step differ", different, np.unique(np.concatenate(devices)), state)
        self.compare(step, new[0])
        return new

    def compare(self, step: int, state: TrainState) -> None:
        """Compare all copies within the state after a step, if that has not been done.

        Raises:
            StateCorrupted: copies differ.
        """
        if not self._every or self._checked == step:
            return
        different = find_differences(state, compute_sums(state))
        if different:
            devices = np.unique(np.concatenate([*different.values()]))
            self._report(step, "copies of the same values differ", list(different), devices, state)
        self._checked = step

    def _report(self, step: int, what: str, paths: list[str], indices: np.ndarray, state: TrainState) -> None:
        sharding = state.step.sharding
        assert isinstance(sharding, NamedSharding)
        devices = [sharding.mesh.devices.flat[index] for index in indices]
        names = ", ".join(f"device {device.id} of process {device.process_index}" for device in devices)
        more = f" and {len(paths) - 1} more arrays" if len(paths) > 1 else ""
        detail = f"{names}: {what}, in {paths[0]}{more}"
        self._on_difference(step, detail, sorted({device.process_index for device in devices}))
        raise StateCorrupted(
            f"step {step}: {detail}; the step is discarded: run again to continue from the last checkpoint, and "
            "replace the device if it is named again"
        )


def copies_state(every: int, state: TrainState) -> bool:
    """Return whether a check copies the state. It does if the state has no replicas, so that a step runs twice.

    Args:
        every: see ReplicaCheck.
        state: arrays, or ShapeDtypeStructs with shardings.
    """
    return every > 0 and not has_replicas(state)


def count_copied_bytes(every: int, state: TrainState) -> int:
    """Return the bytes of each device that a check takes beside the step. state: as ShapeDtypeStructs."""
    return offload.count_resting_bytes(state) if copies_state(every, state) else 0


def has_replicas(state: TrainState) -> bool:
    """Return whether every part of the masters and of the moments rests on more than one device."""

    def count_parts(leaf: Any) -> int:
        return math.prod(map(operator.floordiv, leaf.shape, leaf.sharding.shard_shape(leaf.shape)))

    leaves = jax.tree.leaves((state.masters, state.moments))
    return all(count_parts(leaf) < leaf.sharding.num_devices for leaf in leaves)


def find_differences(state: TrainState, sums: Sums) -> dict[str, np.ndarray]:
    """Return path -> indices of the devices whose part of a leaf differs from most of its copies.

    If no value has a majority, such as with two copies, all devices of the group are returned.
    """
    different: dict[str, np.ndarray] = {}
    for path, leaf in tree.leaves_with_path(state):
        for group in map(np.array, group_devices(leaf.sharding, leaf.shape)):
            values = sums[path][group]
            value, count = collections.Counter(values.tolist()).most_common(1)[0]
            if count < len(group):
                wrong = group[values != value] if 2 * count > len(group) else group
                different[path] = np.concatenate([different.get(path, np.zeros(0, int)), wrong])
    return different


def compute_sums(arrays: Any) -> Sums:
    """Return the checksums of all leaves of a tree, the same in all processes. One leaf at a time is on the device."""
    leaves = tree.leaves_with_path(arrays)
    sums = [_make_sum(leaf.sharding, leaf.ndim)(leaf) for _, leaf in leaves]
    mesh = leaves[0][1].sharding.mesh
    gathered = jax.device_get(_make_gather(mesh)(sums))
    return {path: row for (path, _), row in zip(leaves, gathered, strict=True)}


@functools.cache
def _make_gather(mesh: Mesh) -> Callable[[list[jax.Array]], jax.Array]:
    """Return the program from [devices] of each leaf to [leaves, devices], whole on every device."""
    return jax.jit(jnp.stack, out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.cache
def _make_sum(sharding: NamedSharding, rank: int) -> Callable[[jax.Array], jax.Array]:
    """Return the program that sums each device's part of an array: [devices], in the order of the mesh."""
    mesh = sharding.mesh
    entries = (*sharding.spec, *(None,) * (rank - len(sharding.spec)))
    on_devices = jax.shard_map(
        lambda part: sum_bits(part)[None],
        mesh=mesh,
        in_specs=PartitionSpec(*entries),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(
        lambda leaf: on_devices(offload.fetch_to_device(leaf)),
        in_shardings=sharding,
        out_shardings=NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
    )


def sum_bits(x: jax.Array) -> jax.Array:
    """Return a checksum of the bits of an array, uint32.

    The bits of each element are combined with its position, mixed by a bijection and added. One changed element, in
    whatever bits, therefore always changes the sum, and so does a swap of two elements but for one in 2**32.
    """
    bits = _as_words(x)
    mixed = bits ^ (hashing.linear_indices(bits.shape) * jnp.uint32(hashing.GOLDEN))
    return jnp.sum(hashing.mix_bits(mixed), dtype=jnp.uint32)


def _as_words(x: jax.Array) -> jax.Array:
    """Return the bits of each element as uint32; an element of 64 bits is two of them."""
    if jnp.issubdtype(x.dtype, jnp.bool_) or x.dtype in (jnp.int4, jnp.uint4):
        return x.astype(jnp.uint8).astype(jnp.uint32)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
