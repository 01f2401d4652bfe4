"""Which links a collective takes, and how fast they are."""

import math

import jax
import numpy as np
from jax.sharding import AbstractMesh

from jaxopt_llm.parallel.topology import Chip


def link(
    axes: tuple[str, ...], kind: str, mesh: jax.sharding.Mesh | AbstractMesh, chip: Chip, gpus_per_host: int
) -> tuple[str, float]:
    """The slowest link between the devices along these axes of a mesh, "nvlink" or "network", and bytes per second over
    it for each device. kind: of the collective, in XLA's names.

    Where a group has several GPUs in a host, as many rings leave it, each through a network card of its own (so NCCL),
    and each carries its part of what a GPU sends. A permute has one neighbour and one card.
    """
    hosts = np.arange(mesh.size).reshape(mesh.axis_sizes) // gpus_per_host
    along = [mesh.axis_names.index(axis) for axis in axes]
    groups = np.moveaxis(hosts, along, range(-len(along), 0)).reshape(-1, math.prod(mesh.shape[axis] for axis in axes))
    if np.all(groups == groups[:, :1]):
        return "nvlink", chip.nvlink_bytes_per_second
    fewest = min(np.unique(group, return_counts=True)[1].min() for group in groups)
    rings = 1 if kind == "collective-permute" else int(fewest)
    return "network", min(rings * chip.network_bytes_per_second, chip.nvlink_bytes_per_second)
