"""Arrays that Orbax writes: their chunks on disk, their directory, and a comparison of their leaves."""

import asyncio
import functools
import logging
import re
import sys
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
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


class CreatedDirectory(type(epath.Path(""))):  # type: ignore[misc]
    """Path of a directory that exists.

    Several threads of Orbax share the object that describes an array. Each thread waits for the directory, and then
    replaces two attributes of the object: first the directory, then the path of the array. Another thread may read the
    object between the two, and then waits for this path.
    """

    async def await_creation(self) -> epath.Path:
        """Return the path, to a thread that has just seen that it has to wait."""
        return self


class DeferredDirectory:
    """Directory that may not exist yet; the methods of Orbax's `PathAwaitingCreation`.

    Orbax copies the arrays at once. The threads that write them wait until `set_created` or `give_up` is called.
    """

    def __init__(self, path: Path, created: Future[None] | None = None) -> None:
        self.path = epath.Path(path)
        if created is None:
            created = Future()
            created.set_running_or_notify_cancel()  # one thread that ends early must not cancel the wait of the others
        self._created = created

    def __truediv__(self, name: str | Path) -> epath.Path:
        """Return the path of a file or an array in the directory, which nothing uses before the directory is there."""
        return self.path / name

    def subdirectory(self, name: str) -> "DeferredDirectory":
        """Return a directory that is created together with this one."""
        return DeferredDirectory(Path(self.path / name), self._created)

    async def await_creation(self) -> epath.Path:
        """Return the path once the directory exists. Raise the error of `give_up` if it will not."""
        await asyncio.wrap_future(self._created)
        return CreatedDirectory(self.path)

    def set_created(self) -> None:
        """Let the writes begin: the directory exists."""
        self._created.set_result(None)

    def give_up(self, error: BaseException) -> None:
        """Let the writes fail if they have not begun."""
        if not self._created.done():
            self._created.set_exception(error)


@functools.cache
def silence_failed_saves() -> None:
    """Suppress the messages that a failed save leaves behind.

    These are the log of the error, which is raised as well, and reports about the writes of other leaves, which nobody
    awaits after the first write has failed.
    """
    logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname)
    abandoned = ("exception was never retrieved", "destroyed but it is pending")
    logging.getLogger("asyncio").addFilter(lambda record: not any(words in record.getMessage() for words in abandoned))
    warnings.filterwarnings("ignore", "coroutine '.*serialize.*' was never awaited", RuntimeWarning)
    previous_hook = sys.unraisablehook

    def ignore_closed_loop(error: Any) -> None:
        """Ignore writes that end after Orbax, at the first error, has closed the event loop that TensorStore notifies.

        All other errors go to the previous hook.
        """
        if not (isinstance(error.exc_value, RuntimeError) and str(error.exc_value) == "Event loop is closed"):
            previous_hook(error)

    sys.unraisablehook = ignore_closed_loop
