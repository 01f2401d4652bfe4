"""Checkpoints in the run directory, by Orbax: one layout whatever the mesh that wrote or reads them."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import orbax.checkpoint as ocp

from jaxopt_llm import tree
from jaxopt_llm.errors import CheckpointError

COMMITTED = "commit_success.txt"  # what Orbax writes last into a checkpoint


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500
    """steps between two checkpoints; one is written after the last step in any case"""
    keep: int = 2
    """newest checkpoints that are kept"""


class Checkpoints:
    """The checkpoints of one run. A context manager: leaving it waits until what was saved is on disk.

    A checkpoint is named trees, of which a reader may restore some: one that generates text reads no moments.
    """

    def __init__(self, directory: Path, keep: int | None = None) -> None:
        """keep: how many of the newest stay when one is saved; None for a reader."""
        self.directory = directory.absolute()
        writes = keep is not None
        if writes:
            self._set_aside_incomplete()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=writes, cleanup_tmp_directories=writes)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def latest_step(self) -> int | None:
        """The newest whole checkpoint on disk. Orbax's own would take any directory named as a step, and a save that
        is still being written."""
        return max((step for step, path in self._named_as_steps() if (path / COMMITTED).exists()), default=None)

    def _named_as_steps(self) -> list[tuple[int, Path]]:
        found = self.directory.iterdir() if self.directory.exists() else ()
        return [(int(path.name), path) for path in found if path.name.isdecimal()]

    def _set_aside_incomplete(self) -> None:
        """Renames what lies beyond the latest whole checkpoint: Orbax would save nothing up to its step."""
        latest = self.latest_step()
        for step, path in self._named_as_steps():
            if latest is None or step > latest:
                free = (path.with_name(f"{path.name}.incomplete.{number}") for number in itertools.count(1))
                path.rename(next(each for each in free if not each.exists()))

    def save(self, step: int, **trees: tree.Tree) -> None:
        """Copies the trees off the devices and writes them in the background."""
        items = {name: ocp.args.StandardSave(each) for name, each in trees.items()}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, step: int, **abstract: tree.Tree) -> dict[str, tree.Tree]:
        """The trees of these names, in the shapes, dtypes and shardings of trees of ShapeDtypeStructs.

        Raises CheckpointError where the files are missing, broken, or hold other shapes.
        """
        items = {name: ocp.args.StandardRestore(each) for name, each in abstract.items()}
        try:
            return dict(self._manager.restore(step, args=ocp.args.Composite(**items)))
        except (ValueError, KeyError, OSError) as error:
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} is broken or of another model ({type(error).__name__}: "
                f"{str(error).splitlines()[0]}); move it away to go on from the one before"
            ) from error
