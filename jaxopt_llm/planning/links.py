"""Links that a collective uses, and their bandwidth."""

import math

import jax
import numpy as np
from jax.sharding import AbstractMesh

from jaxopt_llm.compiler.chips import Chip


def find_link(
    axes: tuple[str, ...], kind: str, mesh: jax.sharding.Mesh | AbstractMesh, chip: Chip, gpus_per_host: int
) -> tuple[str, float]:
    """Return the slowest link between the devices along these mesh axes, and its bandwidth for each device.

    The link is "nvlink" or "network"; the bandwidth is in bytes per second.

    If every host holds several GPUs of a group, NCCL uses one ring for each of them. Each ring leaves the host through
    its own network card and carries its share of what a GPU sends. A collective-permute has one neighbour, and
    therefore one card.

    Args:
        axes: names of the mesh axes that the collective runs over.
        kind: name of the collective in XLA, for example "all-gather".
    """
    hosts = np.arange(mesh.size).reshape(mesh.axis_sizes) // gpus_per_host
    dims = [mesh.axis_names.index(axis) for axis in axes]
    groups = np.moveaxis(hosts, dims, range(-len(dims), 0)).reshape(-1, math.prod(mesh.shape[axis] for axis in axes))
    if np.all(groups == groups[:, :1]):
        return "nvlink", chip.nvlink_bytes_per_second
    fewest = min(np.unique(group, return_counts=True)[1].min() for group in groups)
    rings = 1 if kind == "collective-permute" else int(fewest)
    return "network", min(rings * chip.network_bytes_per_second, chip.nvlink_bytes_per_second)
