"""Offload to pinned host memory: copies between host and device within a program.

An array's type says in which memory the array is, so one function serves leaves in both.
"""

import math

import jax

from jaxopt_llm.compiler.topology import HOST as HOST
from jaxopt_llm.config import OffloadConfig
from jaxopt_llm.core import tree

NO_OFFLOAD = OffloadConfig()


def is_on_host(x: jax.Array) -> bool:
    """Return whether x is in host memory, within a program."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def any_on_host(leaves: tree.Tree) -> bool:
    return any(map(is_on_host, jax.tree.leaves(leaves)))


def fetch_to_device(leaves: tree.Tree) -> tree.Tree:
    """Copy the leaves in host memory to the device; those on the device stay."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x, leaves)


def store_like(leaves: tree.Tree, like: tree.Tree) -> tree.Tree:
    """Copy leaves on the device to the host where their counterparts in `like` are on the host."""
    return jax.tree.map(lambda x, y: jax.device_put(x, jax.memory.Space.Host) if is_on_host(y) else x, leaves, like)


def count_resting_bytes(trees: tree.Tree, memory_kind: str | None = None) -> int:
    """Return the bytes that each device holds of ShapeDtypeStructs with shardings.

    memory_kind: HOST counts the leaves in host memory; None counts those in device memory.
    """
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(trees)
        if (leaf.sharding.memory_kind == HOST) == (memory_kind == HOST)
    )
