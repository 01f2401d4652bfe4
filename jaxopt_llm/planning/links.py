"""Links that collectives use, their bandwidth, and the traffic of a step."""

import collections
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.chips import Chip


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same mesh axes, in a step.

    bytes: bytes that each GPU sends, on a ring.
    seconds: bytes divided by the rate of the slowest link, without latency. Overlap with computation is not subtracted.
    overlapped: share of the bytes in collectives that have other work scheduled between their start and their end.
    """

    axes: tuple[str, ...]
    link: str  # "nvlink" or "pcie", or "network" if the axes cross hosts
    kind: str
    dtypes: tuple[str, ...]
    times: int
    bytes: int
    seconds: float
    overlapped: float


def find_link(
    axes: tuple[str, ...], kind: str, mesh: jax.sharding.Mesh | AbstractMesh, chip: Chip, gpus_per_host: int
) -> tuple[str, float]:
    """Return the slowest link between the devices along these mesh axes, and its bandwidth for each device.

    The link is "nvlink" or "pcie" within a host, and "network" between hosts; the bandwidth is in bytes per second.

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
        return chip.peer_link, chip.peer_bytes_per_second
    fewest = min(np.unique(group, return_counts=True)[1].min() for group in groups)
    rings = 1 if kind == "collective-permute" else int(fewest)
    return "network", min(rings * chip.network_bytes_per_second, chip.peer_bytes_per_second)


def sum_traffic(
    collectives: Sequence[hlo.Collective], mesh: jax.sharding.Mesh, chip: Chip, gpus_per_host: int
) -> Iterator[Traffic]:
    """Yield the collectives of a step, summed by kind, mesh axes and dtypes."""
    groups = collections.defaultdict(list)
    for collective in collectives:
        groups[collective.axes, collective.kind, collective.dtypes].append(collective)
    for (axes, kind, dtypes), group in groups.items():
        link, rate = find_link(axes, kind, mesh, chip, gpus_per_host)
        times = sum(each.times for each in group)
        sent = sum(each.wire_bytes * each.times for each in group)
        overlapped = sum(each.wire_bytes * each.times for each in group if each.asynchronous) / sent if sent else 0.0
        yield Traffic(axes, link, kind, dtypes, times, sent, sent / rate, overlapped)
