"""Copies of arrays: which devices hold the same part."""

import collections
from collections.abc import Sequence

from jax.sharding import NamedSharding


def group_devices(sharding: NamedSharding, shape: Sequence[int]) -> list[list[int]]:
    """Return the groups of devices that hold the same part of an array, by their indices in the mesh."""
    groups: dict[str, list[int]] = collections.defaultdict(list)
    parts = sharding.devices_indices_map(tuple(shape))
    for index, device in enumerate(sharding.mesh.devices.flat):
        groups[str(parts[device])].append(index)
    return list(groups.values())
