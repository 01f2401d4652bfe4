"""Host offload: what rests in pinned host memory, and the way there and back within a program.

An array's type says in which memory it is, so that one function serves leaves of either kind.
"""

import math
from dataclasses import dataclass

import jax

from jaxopt_llm import tree

HOST = "pinned_host"  # the memory kind


@dataclass(frozen=True)
class OffloadConfig:
    optimizer: bool = False
    """whether the optimizer's state rests in pinned host memory, brought in a layer at a time by the update: moments,
    and in ZeRO stages 1 and 2, where the model reads a compute copy, the masters too (Ren et al. 2021, ZeRO-Offload)"""
    parameters: bool = False
    """whether what the blocks read of the stacks rests in pinned host memory, brought in a layer at a time by forward,
    backward and update: parameters, with lora.rank the frozen base alone (Rajbhandari et al. 2021, ZeRO-Infinity)"""


OFF = OffloadConfig()


def on_host(x: jax.Array) -> bool:
    """Within a program: whether x is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def any_on_host(leaves: tree.Tree) -> bool:
    return any(map(on_host, jax.tree.leaves(leaves)))


def fetch(leaves: tree.Tree) -> tree.Tree:
    """The same on the device; what is there already stays."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x, leaves)


def store(leaves: tree.Tree, like: tree.Tree) -> tree.Tree:
    """Leaves on the device, each put where its counterpart in `like` is."""
    return jax.tree.map(lambda x, y: jax.device_put(x, jax.memory.Space.Host) if on_host(y) else x, leaves, like)


def resting_bytes(trees: tree.Tree, memory_kind: str | None = None) -> int:
    """Of each device's part of ShapeDtypeStructs with shardings: of those in this memory, by default the device's."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(trees)
        if (leaf.sharding.memory_kind == HOST) == (memory_kind == HOST)
    )
