"""Checkpoints in the run directory, written by Orbax.

The layout on disk does not depend on the mesh that writes or reads it.
"""

import asyncio
import datetime
import functools
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding

from jaxopt_llm.checkpoint.native import integrity, step_directories
from jaxopt_llm.checkpoint.native.identity import Identity
from jaxopt_llm.checkpoint.native.integrity import FileEntries
from jaxopt_llm.checkpoint.native.step_directories import read_losses
from jaxopt_llm.config import CheckpointConfig
from jaxopt_llm.core import json_files, tree
from jaxopt_llm.core.errors import CheckpointError, StorageFailed
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS, Channel, Processes
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


# Exceptions of Orbax and TensorStore for a disk that is full, read-only or gone.
STORAGE_ERRORS = (OSError, ValueError, RuntimeError)
NO_ROOM = "the saves before are still being written, and host memory has room for no more copies of the state"
MAX_COPIES = 2  # of the state in host memory
SMALL_BYTES = 2**28  # copies that are not larger together may be more, up to MAX_SMALL_COPIES
MAX_SMALL_COPIES = 16


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True)
class Save:
    """A save of a checkpoint.

    Attributes:
        directory: its working directory.
        contents: the record of the checkpoint.
        sync: see `Checkpoints.save`.
        writes: Orbax's writes of the arrays, which are copied; None if this process left the save out.
    """

    directory: DeferredDirectory
    contents: dict[str, Any]
    sync: Callable[[], None]
    writes: list[Any] | None

    @property
    def step(self) -> int:
        return self.contents["step"]


class PendingSaves:
    """Saves that are not known to be on disk, and the room for another one.

    Each holds a copy of the state in host memory. A save without room is left out and does not wait: the devices would
    idle until the storage is done, and again at each later checkpoint. Waiting would gain hardly any checkpoints,
    because the storage writes as fast as it can in both cases. Only the thread that adds the saves uses the object.
    """

    def __init__(self) -> None:
        self._saves: list[tuple[int, Future[None]]] = []  # bytes of the copy, and the end of the save; oldest first

    def add(self, size: int, future: Future[None]) -> None:
        """Add a save. size: bytes of its copy; 0 for one that is left out."""
        self._saves.append((size, future))

    def has_room(self, size: int, wait: bool) -> bool:
        """Return whether there is room for another copy.

        Args:
            size: bytes of the copy.
            wait: wait until there is.
        """
        while self._saves and self._saves[0][1].done():
            self._end_oldest()
        while self._saves:
            sizes = [each for each, _ in self._saves if each]
            small = len(sizes) < MAX_SMALL_COPIES and sum(sizes) + size <= SMALL_BYTES
            if len(sizes) < MAX_COPIES or small:
                return True
            if not wait and not self._saves[0][1].done():
                return False
            self._end_oldest()
        return True

    def wait(self) -> None:
        """Wait until each save is on disk or has failed. Raise the error of one that ended with an error."""
        while self._saves:
            self._end_oldest()

    def _end_oldest(self) -> None:
        self._saves.pop(0)[1].result()


class Checkpoints:
    """Checkpoints of one run.

    A checkpoint consists of named trees. A reader may restore some of them only: text generation does not read the
    optimizer state. Used as a context manager, the object waits on exit until the last save is on disk.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig | None = None,
        report: Callable[[str], None] = _print_to_stderr,
        processes: Processes = SINGLE_PROCESS,
        on_save: Callable[[int, str], None] = lambda step, failure: None,
        identity: Identity | None = None,
    ) -> None:
        """Open the checkpoint directory; a writer creates it and deletes leftovers of dead processes.

        Args:
            directory: the directory `checkpoints` of the run.
            config: settings of a writer; None for a reader, which changes nothing on disk.
            report: receives one line for each checkpoint that is damaged or was not saved.
            processes: the processes that save and restore together, each its own devices' shards.
            on_save: receives the step of each save that has ended, and why it failed, or "". Any thread may call it.
            identity: identity of the run, which every checkpoint records; None for a reader of any run.
        """
        self.directory, self.identity = directory.absolute(), identity
        self.last_save_failed = False
        self._last_step: int | None = None  # step of the last save
        self._failure = ""
        self._said_left_out = False  # since the last save that succeeded
        self._broken: BaseException | None = None  # the error that nobody foresaw in a save before
        self._opened: int | None = None  # descriptor of the directory, if this process writes its entries
        self._config = config
        self._report, self._on_save = report, on_save
        self._is_first, self._share = processes.first, (processes.index, processes.count)
        self._main, self._saving = processes.main, processes.saving
        self._channel = processes.channel(f"{directory}")
        self._background_channel = processes.channel(f"{directory} in the background", processes.saving)
        silence_failed_saves()
        if config is not None and processes.first:
            self.directory.mkdir(parents=True, exist_ok=True)
            step_directories.delete_leftovers(self.directory)
            self._opened = os.open(self.directory, os.O_RDONLY)
        # If one process fails, Orbax's barriers block the others for minutes. `_run_on_all` replaces them.
        only_this_process = ocp.options.MultiprocessingOptions(active_processes={processes.index})
        self._handler = ocp.StandardCheckpointHandler(multiprocessing_options=only_this_process)
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._pending = PendingSaves()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._wait_for_save()
        finally:
            self._background.shutdown()
            self._handler.close()
            if self._opened is not None:
                os.close(self._opened)

    def latest_verified_step(self) -> int | None:
        """Return the step of the newest intact checkpoint; None: there is no checkpoint yet.

        Every file of a checkpoint is read before it counts as intact. Newer checkpoints that are damaged are reported;
        a writer also sets them aside, after its last save is on disk.

        Raises:
            CheckpointError: there are, or were, checkpoints, but none is intact; or the newest intact one is of another
                run.
        """
        self._wait_for_save()
        any_damaged = False
        steps = self._channel.exchange(json.dumps(sorted(step_directories.find_checkpoints(self.directory))))[0]
        for step in reversed(json_files.parse(steps)):
            path = self.directory / str(step)
            found = self._channel.exchange(step_directories.find_damage(path, self._share) or "")
            damage = next(filter(None, found), None)
            if damage is None:
                if self.identity is not None:
                    self.identity.check(path, step_directories.read_record(path))
                if any_damaged:
                    self._report(f"checkpoint {path} is intact and is used instead")
                return step
            if self._config is None and not os.path.lexists(path):  # deleted in the meantime by the running training
                return self.latest_verified_step()
            sets_aside = self._config is not None and self._is_first
            aside = f"; set aside as {step_directories.set_aside(path).name}" if sets_aside else ""
            self._report(f"checkpoint {path} is damaged: {damage}{aside}")
            any_damaged = True
        if any_damaged or step_directories.find_set_aside(self.directory):
            raise CheckpointError(
                f"{self.directory} has no intact checkpoint left; restore one from a backup, or start again with "
                "another --run.directory"
            )
        return None

    def latest_saved_step(self) -> int | None:
        """Return the step of the newest checkpoint; None: there is none.

        Waits until the last save is on disk. Unlike `latest_verified_step`, it reads no file of the checkpoint.
        """
        self._wait_for_save()
        return max(step_directories.find_checkpoints(self.directory), default=None)

    def is_due(self, step: int, failed: bool) -> bool:
        """Return whether a checkpoint follows this step.

        Args:
            step: the step that just ended.
            failed: whether the last save failed on any process.
        """
        return self._config is not None and self._config.is_due(step, self._last_step if failed else None)

    def save(
        self,
        step: int,
        trees: Mapping[str, tree.Tree],
        record: Mapping[str, Any],
        sync: Callable[[], None] = lambda: None,
    ) -> float:
        """Copy the trees off the devices, and write them in the background.

        The call waits for nothing but the copy: not for the disk, not for other processes, and not for the saves
        before, which are written one after the other. If they hold as many copies as host memory has room for, this
        save is left out: the run goes on, and tries again as after a save that failed. Only a step that
        `checkpoint.keep_every` keeps forever waits for room: no later step could replace it.

        A save that fails is reported, its files are deleted, and `last_save_failed` is set. No other checkpoint is
        deleted before the new one is complete.

        Args:
            step: the step of the checkpoint.
            trees: the trees to save, by name.
            record: further values to keep, as JSON.
            sync: called in the background before anything is written; an OSError that it raises fails the save.

        Returns:
            The seconds for which the call blocked.
        """
        began = time.perf_counter()
        self._main.enter("save")
        self.last_save_failed, self._last_step = False, step
        contents = {
            "step": step,
            **record,
            **({"identity": self.identity.record()} if self.identity else {}),
            "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "arrays": {name: describe_leaves(each) for name, each in trees.items()},
        }
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(dict(trees)))
        directory = DeferredDirectory(step_directories.working_path(self.directory, step))
        writes = None
        if self._pending.has_room(size, wait=self._config is not None and self._config.keeps_forever(step)):
            writes = self._start_writes(directory, trees)
        else:
            self._leave_out(step, NO_ROOM)
        # A save that is left out also goes through the background, where all processes hear of it.
        future = self._background.submit(self._finish, Save(directory, contents, sync, writes))
        self._pending.add(0 if writes is None else size, future)
        return time.perf_counter() - began

    def save_last(
        self,
        step: int,
        trees: Mapping[str, tree.Tree],
        record: Mapping[str, Any],
        sync: Callable[[], None] = lambda: None,
    ) -> float:
        """Save like `save`, and wait until the checkpoint is on disk; skip a step that is already saved.

        Raises:
            StorageFailed: the save failed twice, and there is an earlier checkpoint.
            CheckpointError: it failed twice, and there is none.
        """
        began = time.perf_counter()
        self._wait_for_save()
        for _ in range(2):
            if self._last_step != step or self.last_save_failed:
                self.save(step, trees, record, sync)
                self._wait_for_save()
            if not self.last_save_failed:
                return time.perf_counter() - began
        latest = self.latest_saved_step()
        left = "there is no checkpoint" if latest is None else f"the last checkpoint is step {latest}"
        remedy = "free disk space there, or make it writable, then run again to continue"
        problem = f"step {step} could not be saved to {self.directory} ({self._failure}); {left}; {remedy}"
        raise CheckpointError(problem) if latest is None else StorageFailed(problem)

    def read_record(self, step: int) -> dict[str, Any]:
        """Return the values that were saved as `record` with a verified checkpoint."""
        return step_directories.read_record(self.directory / str(step))

    def restore(
        self, step: int, dtypes: Mapping[str, tree.Tree] | None = None, **abstract: tree.Tree
    ) -> dict[str, tree.Tree]:
        """Restore named trees, in the given shapes, dtypes and shardings.

        Args:
            step: the step of the checkpoint.
            dtypes: by name, trees of dtypes to cast to during the read, so that no device ever holds more.
            **abstract: by name, trees of `jax.ShapeDtypeStruct`.

        Raises:
            CheckpointError: the checkpoint has other leaves, shapes or dtypes, or it cannot be read.
        """
        path = self.directory / str(step)
        cast = jax.tree.map(lambda x, dtype: x.update(dtype=dtype), abstract, dtypes) if dtypes else abstract
        try:
            check_leaves(path, abstract)
            return {
                name: self._handler.restore(epath.Path(path / name), args=ocp.args.StandardRestore(each))
                for name, each in cast.items()
            }
        except STORAGE_ERRORS as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be read: {_first_line(error)}; check the disk, or restore it from a backup"
            ) from error

    def _create_directories(self, path: Path, names: Iterable[str], sync: Callable[[], None]) -> None:
        sync()
        if self._is_first:
            step_directories.check_is_open(self.directory, self._opened)
            # Threads of a failed save may have written files after the cleanup.
            step_directories.delete_leftovers(self.directory)
            path.mkdir()  # without its parents: a run directory that was deleted does not come back as half of one
            for name in names:
                (path / name).mkdir(parents=True)

    def _start_writes(self, directory: DeferredDirectory, trees: Mapping[str, tree.Tree]) -> list[Any]:
        """Copy this process's shards off its devices and return the writes, which begin when the directory is there.

        An error of the storage is the result of the only write: all processes must hear of it.
        """

        async def copy() -> list[Any]:
            saves = [
                self._handler.async_save(directory.subdirectory(name), args=make_save_arguments(each))
                for name, each in trees.items()
            ]
            return [write for writes in await asyncio.gather(*saves) for write in writes]

        try:
            return asyncio.run(copy())
        except jax.errors.JaxRuntimeError as error:
            directory.give_up(error)
            raise  # a failure of the device, not of the disk
        except (*STORAGE_ERRORS, MemoryError) as error:
            failed: Future[None] = Future()
            failed.set_exception(error if isinstance(error, STORAGE_ERRORS) else OSError("host memory is exhausted"))
            return [failed]
        except BaseException as error:
            directory.give_up(error)  # the threads that write would wait for ever
            raise

    def _finish(self, save: Save) -> None:
        """Write and complete a save; runs in the background thread."""
        self._saving.enter("save", save.step)
        try:
            if self._broken is not None:
                raise self._broken  # a process that has left out an exchange would answer the wrong one
            self._complete(save)
        except BaseException as error:
            self._broken = error
            raise
        finally:
            save.directory.give_up(FileNotFoundError("the save was given up"))
            self._saving.leave()

    def _complete(self, save: Save) -> None:
        path, contents = Path(save.directory.path), save.contents

        def begin() -> bool:
            if save.writes is not None:
                self._create_directories(path, contents["arrays"], save.sync)
            return save.writes is not None

        def write() -> FileEntries:
            save.directory.set_created()
            for each in save.writes or ():
                each.result()
            return integrity.sync_and_hash(path, f"*/ocdbt.process_{self._share[0]}")

        failure, copied = self._run_on_all(self._background_channel, begin)
        if not failure and not all(copied):
            if save.writes is not None:  # another process left it out; this one has not said so
                self._leave_out(save.step, "another process has no room for one more copy of the state")
            return
        if failure:
            self._give_up(path, failure)
            return
        failure, entries = self._run_on_all(self._background_channel, write)
        if not failure:
            failure, _ = self._run_on_all(self._background_channel, lambda: self._commit(path, contents, entries))
        if failure:
            self._give_up(path, failure)
            return
        self._said_left_out = False
        self._on_save(save.step, "")
        if self._is_first:
            self._delete_old()

    def _commit(self, path: Path, contents: dict[str, Any], entries: list[FileEntries]) -> None:
        """Write record and manifest, and rename the directory. entries: of the files that each process wrote."""
        if self._is_first:
            step_directories.check_is_open(self.directory, self._opened)
            for name in contents["arrays"]:
                self._handler.finalize(epath.Path(path / name))
            (path / step_directories.RECORD).write_text(json.dumps(contents))
            integrity.write_manifest(path, {name: entry for part in entries for name, entry in part.items()})
            step_directories.commit(path)

    def _run_on_all(self, channel: Channel, action: Callable[[], Any]) -> tuple[str, list[Any]]:
        """Run an action on every process, and wait for all processes.

        Returns:
            The failure of the first process that failed, or an empty string; and the results of all processes.
        """
        try:
            outcome = "", action()
        except jax.errors.JaxRuntimeError:
            raise  # a failure of the device, not of the disk
        except STORAGE_ERRORS as error:
            outcome = _first_line(error), None
        outcomes = [json_files.parse(each) for each in channel.exchange(json.dumps(outcome))]
        return next((failure for failure, _ in outcomes if failure), ""), [result for _, result in outcomes]

    def _give_up(self, path: Path, failure: str) -> None:
        """Report a save that failed and delete its files. path: its working directory."""
        step = int(path.stem)
        self._note_failure(step, failure)
        cleanup = ""
        # Several times, because writes of other leaves that are still running create their directories again.
        for _ in range(5 if self._is_first else 0):
            try:
                step_directories.delete_leftovers(self.directory)
                cleanup = "; its partial files are deleted"
            except OSError as error:
                cleanup = f"; its partial files could not be deleted: {_first_line(error)}"
            time.sleep(0.1)
        self._report(f"checkpoint {self.directory / str(step)} could not be saved: {failure}{cleanup}")
        self._on_save(step, failure)

    def _delete_old(self) -> None:
        assert self._config is not None
        paths = step_directories.find_checkpoints(self.directory)
        for step, reasons in step_directories.list_reasons_to_keep(read_losses(paths), self._config).items():
            if not reasons:
                try:
                    step_directories.delete(paths[step])
                except OSError as error:
                    self._report(f"checkpoint {paths[step]} could not be deleted: {_first_line(error)}")

    def _leave_out(self, step: int, reason: str) -> None:
        """Note that this step is not saved. It is said once until a save succeeds."""
        self._note_failure(step, reason)
        if not self._said_left_out:
            self._said_left_out = True
            self._report(f"step {step} is not saved: {reason}; the next try is after a tenth of checkpoint.every")

    def _note_failure(self, step: int, failure: str) -> None:
        """Note that a step is not saved. Only the last one is tried again: a newer one replaces an older one."""
        if step == self._last_step:
            self.last_save_failed, self._failure = True, failure

    def _wait_for_save(self) -> None:
        """Wait until each save is on disk or has failed."""
        self._main.enter("save")
        self._pending.wait()


def _first_line(error: Exception) -> str:
    """Return the type and the cause of an error, without TensorStore's location prefix and list of settings."""
    cause = (str(error).splitlines() or [""])[0].split(" [")[0].rsplit('": ', 1)[-1]
    return f"{type(error).__name__}: {cause}"
