"""Checkpoints in the run directory, by Orbax: one layout whatever the mesh that wrote or reads them."""

import asyncio
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxopt_llm import tree
from jaxopt_llm.checkpoint import integrity, policy, quiet, steps
from jaxopt_llm.checkpoint.integrity import Files
from jaxopt_llm.checkpoint.policy import CheckpointConfig
from jaxopt_llm.errors import CheckpointError
from jaxopt_llm.parallel.distributed import ALONE, Channel, Processes

# What Orbax and TensorStore raise for a disk that is full, read-only or gone.
FAILURES = (OSError, ValueError, RuntimeError)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


class Checkpoints:
    """The checkpoints of one run. A context manager: leaving it waits until what was saved is on disk.

    A checkpoint is named trees, of which a reader may restore some: one that generates text reads no moments.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig | None = None,
        say: Callable[[str], None] = _to_stderr,
        processes: Processes = ALONE,
    ) -> None:
        """config: None for a reader, which changes nothing. say: told, in a line, what was damaged or not saved.
        processes: that save and restore together, each what its devices hold."""
        self.directory = directory.absolute()
        self.failed = False  # whether the last save did
        self._saved = 0  # its step
        self._why = ""
        self._config = config
        self._say = say
        self._first, self._share = processes.first, (processes.index, processes.count)
        names = f"{directory}", f"{directory} in the background"
        self._now, self._later = map(processes.channel, names)
        quiet.silence()
        if config is not None and processes.first:
            self.directory.mkdir(parents=True, exist_ok=True)
            steps.sweep(self.directory)
        # Its own barriers would keep the other processes for minutes where one fails: `_together` is instead of them.
        alone = ocp.options.MultiprocessingOptions(active_processes={processes.index})
        self._handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._finishing: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._wait()
        finally:
            self._background.shutdown()
            self._handler.close()

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint that is whole, every file of it read; None where there is none yet.

        Newer ones that are damaged are named and, but by a reader, set aside. Raises CheckpointError where none is
        whole though there are, or were, some.
        """
        damaged = False
        there = self._now.exchange(json.dumps(sorted(steps.by_step(self.directory))))[0]
        for step in reversed(json.loads(there)):
            path = self.directory / str(step)
            found = next(filter(None, self._now.exchange(steps.damage(path, self._share) or "")), None)
            if found is None:
                if damaged:
                    self._say(f"checkpoint {path} is whole: it is used instead")
                return step
            if self._config is None and not os.path.lexists(path):  # deleted meanwhile, by the run that is looked at
                return self.latest_step()
            aside = ""
            if self._config is not None and self._first:
                aside = f"; set aside as {steps.set_aside(path).name}"
            self._say(f"checkpoint {path} is damaged: {found}{aside}")
            damaged = True
        if damaged or steps.all_set_aside(self.directory):
            raise CheckpointError(
                f"{self.directory} has no whole checkpoint left: bring one back from a copy, or begin again in another "
                "--run.directory"
            )
        return None

    def newest(self) -> int | None:
        """The step of the newest checkpoint, once what was saved is on disk; None where there is none. Reads no file of
        it, unlike `latest_step`."""
        self._wait()
        return max(steps.by_step(self.directory), default=None)

    def due(self, step: int, failed: bool) -> bool:
        """Whether a checkpoint follows this step. failed: whether the last save did, on any process."""
        return self._config is not None and self._config.due(step, self._saved if failed else None)

    def save(self, step: int, trees: Mapping[str, tree.Tree], record: Mapping[str, Any]) -> float:
        """Copies the trees off the devices and writes them in the background, once the save before is done; returns
        the seconds that it blocked.

        record: what else is kept, as JSON. A save that fails is told, freed and noted in `failed`; no other checkpoint
        is deleted before a new one is whole.
        """
        began = time.perf_counter()
        self._wait()
        self.failed, self._saved = False, step
        contents = {
            "step": step,
            **record,
            "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "arrays": {name: _described(each) for name, each in trees.items()},
        }
        path = steps.working(self.directory, step)
        writes: list[Any] = []
        why, _ = self._together(self._now, lambda: self._begin(path, trees))
        if not why:
            why, _ = self._together(self._now, lambda: writes.extend(self._copy(path, trees)))
        if why:
            self._give_up(step, why)
        else:
            self._finishing = self._background.submit(self._finish, path, contents, writes)
        return time.perf_counter() - began

    def save_last(self, step: int, trees: Mapping[str, tree.Tree], record: Mapping[str, Any]) -> float:
        """The same, waiting until it is on disk; nothing more where that step was saved already. Raises CheckpointError
        where it fails twice."""
        began = time.perf_counter()
        self._wait()
        for _ in range(2):
            if self._saved != step or self.failed:
                self.save(step, trees, record)
                self._wait()
            if not self.failed:
                return time.perf_counter() - began
        left = self.newest()
        raise CheckpointError(
            f"step {step} could not be saved to {self.directory} ({self._why}); "
            + ("there is no checkpoint" if left is None else f"the last checkpoint is step {left}")
            + ": make room there, then run again to continue"
        )

    def restore(
        self, step: int, dtypes: Mapping[str, tree.Tree] | None = None, **abstract: tree.Tree
    ) -> dict[str, tree.Tree]:
        """The trees of these names, in the shapes, dtypes and shardings of trees of ShapeDtypeStructs.

        dtypes: what they are cast to while they are read, so that a device never holds more, as trees of dtypes.
        Raises CheckpointError where the checkpoint holds other leaves, shapes or dtypes, or cannot be read.
        """
        path = self.directory / str(step)
        cast = jax.tree.map(lambda x, dtype: x.update(dtype=dtype), abstract, dtypes) if dtypes else abstract
        try:
            _check_arrays(path, abstract)
            return {
                name: self._handler.restore(epath.Path(path / name), args=ocp.args.StandardRestore(each))
                for name, each in cast.items()
            }
        except FAILURES as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {_first_line(error)}") from error

    def _begin(self, path: Path, trees: Mapping[str, tree.Tree]) -> None:
        if self._first:
            steps.sweep(self.directory)  # what threads of a save that failed wrote after it was freed
            for name in trees:
                (path / name).mkdir(parents=True)

    def _copy(self, path: Path, trees: Mapping[str, tree.Tree]) -> list[Any]:
        """Takes this process's part off its devices. Returns the writes that are then on their way."""

        async def copy() -> list[Any]:
            saves = [
                self._handler.async_save(epath.Path(path / name), args=ocp.args.StandardSave(trees[name]))
                for name in trees
            ]
            return [write for writes in await asyncio.gather(*saves) for write in writes]

        return asyncio.run(copy())

    def _finish(self, path: Path, contents: dict[str, Any], writes: list[Any]) -> None:
        """In the background."""

        def write() -> Files:
            for each in writes:
                each.result()
            return integrity.settle(path, f"*/ocdbt.process_{self._share[0]}")

        why, files = self._together(self._later, write)
        if not why:
            why, _ = self._together(self._later, lambda: self._commit(path, contents, files))
        if why:
            self._give_up(contents["step"], why)
        elif self._first:
            self._delete_old()

    def _commit(self, path: Path, contents: dict[str, Any], files: list[Files]) -> None:
        """files: those that each process has written."""
        if self._first:
            for name in contents["arrays"]:
                self._handler.finalize(epath.Path(path / name))
            (path / steps.RECORD).write_text(json.dumps(contents))
            integrity.seal(path, {name: each for own in files for name, each in own.items()})
            steps.commit(path)

    def _together(self, channel: Channel, act: Callable[[], Any]) -> tuple[str, list[Any]]:
        """Acts on every process, and waits for all. Returns what went wrong on the first that failed, or nothing, and
        what the acts returned."""
        try:
            told = "", act()
        except jax.errors.JaxRuntimeError:
            raise  # the device's failure, not the disk's
        except FAILURES as error:
            told = _first_line(error), None
        every = [json.loads(each) for each in channel.exchange(json.dumps(told))]
        return next((why for why, _ in every if why), ""), [result for _, result in every]

    def _give_up(self, step: int, why: str) -> None:
        self.failed, self._why = True, why
        freed = ""
        # Several times: writes of other leaves that are on their way make their directories again.
        for _ in range(5 if self._first else 0):
            try:
                steps.sweep(self.directory)
                freed = "what it wrote is freed"
            except OSError as left:
                freed = f"what it wrote could not be freed: {_first_line(left)}"
            time.sleep(0.1)
        self._say(f"checkpoint {self.directory / str(step)} could not be saved: {why}; {freed}")

    def _delete_old(self) -> None:
        assert self._config is not None
        paths = steps.by_step(self.directory)
        losses = {step: steps.glance(path)[0] for step, path in paths.items()}
        for step, why in policy.reasons(losses, self._config).items():
            if not why:
                try:
                    steps.delete(paths[step])
                except OSError as error:
                    self._say(f"checkpoint {paths[step]} could not be deleted: {_first_line(error)}")

    def _wait(self) -> None:
        """Until the save before is on disk, or given up."""
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()


def _described(arrays: tree.Tree) -> dict[str, str]:
    """Leaf -> dtype and shape, as in float32[2,3]."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    return {tree.path_string(path): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for path, leaf in leaves}


def _check_arrays(path: Path, wanted: Mapping[str, tree.Tree]) -> None:
    """Raises CheckpointError unless the checkpoint holds just these leaves: Orbax would cast a dtype in silence."""
    held = steps.record(path)["arrays"]
    found = []
    for name, each in wanted.items():
        has, wants = held.get(name, {}), _described(each)
        for leaf in sorted(has.keys() | wants.keys()):
            if has.get(leaf) != wants.get(leaf):
                found.append(f"{name}/{leaf} is {has.get(leaf, 'absent')} there and {wants.get(leaf, 'absent')} here")
    if found:
        more = f" (and {len(found) - 1} leaves more)" if len(found) > 1 else ""
        raise CheckpointError(
            f"checkpoint {path} is of another model: {found[0]}{more}; "
            "continue with the configuration that wrote it, or choose another directory"
        )


def _first_line(error: Exception) -> str:
    """TensorStore tells where before what, and then all its settings."""
    what = (str(error).splitlines() or [""])[0].split(" [")[0].rsplit('": ', 1)[-1]
    return f"{type(error).__name__}: {what}"
