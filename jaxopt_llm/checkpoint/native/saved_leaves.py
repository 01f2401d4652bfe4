"""Leaves of the trees in a checkpoint: their chunks on disk, and their comparison with those of a model."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from jaxopt_llm.checkpoint.native import step_directories
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import CheckpointError
from jaxopt_llm.parallel.offload import HOST

_STACK = re.compile(r"segment_\d+/")  # begins the path of a leaf; a user's parameter may have any name
MAX_STACK_CHUNK_BYTES = 2**26  # a stack that is not larger has one chunk for each shard


def make_save_arguments(arrays: tree.Tree) -> ocp.args.StandardSave:
    """Return Orbax's arguments for a save during which later steps may reuse the memory of the arrays (donation)."""
    return ocp.args.StandardSave(_copy_host_memory(arrays), choose_chunks(arrays))


def choose_chunks(arrays: tree.Tree) -> tree.Tree:
    """Return how Orbax divides each array into chunks of a file, by default one for each shard.

    Each layer of a large stack has its own chunks, so that a reader can decompress one layer without the others.
    """

    def choose(path: str, leaf: Any) -> ocp.SaveArgs:
        is_stack = _STACK.match(path)
        return ocp.SaveArgs(shard_axes=(0,) if is_stack and leaf.ndim and leaf.nbytes > MAX_STACK_CHUNK_BYTES else ())

    return tree.map_with_path(choose, arrays)


def _copy_host_memory(arrays: tree.Tree) -> tree.Tree:
    """Return the arrays, those in pinned host memory as copies.

    Orbax copies an array off its device, but writes one in host memory from where it is. On a GPU, a step to which that
    array is donated would fail as long as the write goes on.
    """

    def copy(array: jax.Array) -> jax.Array:
        if array.sharding.memory_kind != HOST:
            return array
        parts = [
            jax.device_put(np.array(shard.data), SingleDeviceSharding(shard.device, memory_kind=HOST))
            for shard in array.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

    return jax.tree.map(copy, arrays)


def describe_leaves(arrays: tree.Tree) -> dict[str, str]:
    """Return leaf path -> dtype and shape, as in float32[2,3]."""
    return {path: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for path, leaf in tree.leaves_with_path(arrays)}


def check_leaves(path: Path, trees: Mapping[str, tree.Tree]) -> None:
    """Raise CheckpointError unless the checkpoint has exactly these leaves; Orbax would cast a dtype silently."""
    recorded = step_directories.read_record(path)["arrays"]
    differences = []
    for name, each in trees.items():
        saved, expected = recorded.get(name, {}), describe_leaves(each)
        for leaf in sorted(saved.keys() | expected.keys()):
            if saved.get(leaf) != expected.get(leaf):
                in_checkpoint, in_model = saved.get(leaf, "absent"), expected.get(leaf, "absent")
                differences.append(f"{name}/{leaf} is {in_checkpoint} in the checkpoint and {in_model} in the model")
    if differences:
        more = f" (and {len(differences) - 1} more leaves differ)" if len(differences) > 1 else ""
        raise CheckpointError(
            f"checkpoint {path} belongs to another model: {differences[0]}{more}; use the configuration that wrote "
            "it, or choose another directory"
        )
