"""Directories of a run's `checkpoints/` directory, and which of them stay on disk.

- `N`: the checkpoint of step N, which was complete when it got this name.
- `N.writing`: a checkpoint that is being written.
- `N.deleting`: a checkpoint that is being deleted.
- `N.damaged.K`: a damaged checkpoint that was set aside.
"""

import errno
import itertools
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxopt_llm.checkpoint.native import integrity
from jaxopt_llm.config import CheckpointConfig
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import sync_directory

RECORD = "checkpoint.json"  # next to the arrays: describes them, and holds everything else that a resume needs


def find_checkpoints(directory: Path) -> dict[int, Path]:
    """Return step -> path of the directories that are named like a step, oldest first, damaged ones included."""
    entries = directory.iterdir() if directory.is_dir() else ()
    return dict(sorted((int(path.name), path) for path in entries if re.fullmatch("0|[1-9][0-9]*", path.name)))


def find_set_aside(directory: Path) -> list[Path]:
    """Return the paths of the damaged checkpoints that were set aside."""
    return sorted(directory.glob("*.damaged.*"))


def find_damage(path: Path, share: tuple[int, int] = (0, 1)) -> str | None:
    """Return a description of the damage to a checkpoint; None: it is intact. See `integrity.find_damage`."""
    found = integrity.find_damage(path, share)
    if found is not None:
        return found
    try:
        step = read_record(path)["step"]
    except (ValueError, KeyError, TypeError):
        return f"{RECORD} is no record of a checkpoint"
    return None if step == int(path.name) else f"it belongs to step {step}"


def read_record(path: Path) -> dict[str, Any]:
    """Read the record of an intact checkpoint."""
    return json_files.parse(json_files.read_bytes(path / RECORD))


def read_summary(path: Path) -> tuple[float | None, str | None]:
    """Return the held-out loss and the save time of a checkpoint that nobody has verified; None: not recorded."""
    try:
        record = read_record(path)
        loss, saved = record.get("eval_loss"), record.get("saved")
    except (InputError, OSError, ValueError, AttributeError):
        return None, None
    return loss if isinstance(loss, float) else None, saved if isinstance(saved, str) else None


def read_losses(paths: Mapping[int, Path]) -> dict[int, float | None]:
    """Return the held-out loss of the checkpoint of each step: see `read_summary`."""
    return {step: read_summary(path)[0] for step, path in paths.items()}


def working_path(directory: Path, step: int) -> Path:
    """Return the path under which the checkpoint of a step is written."""
    return directory / f"{step}.writing"


def commit(path: Path) -> None:
    """Rename a complete working directory to its step, in place of an earlier checkpoint of this step."""
    final = path.with_suffix("")
    earlier = final.rename(final.with_name(f"{final.name}.deleting")) if final.exists() else None
    path.rename(final)
    sync_directory(path.parent)
    if earlier is not None:
        shutil.rmtree(earlier)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint and return its new path."""
    candidates = (path.with_name(f"{path.name}.damaged.{number}") for number in itertools.count(1))
    new_path = path.rename(next(candidate for candidate in candidates if not candidate.exists()))
    sync_directory(path.parent)
    return new_path


def delete(path: Path) -> None:
    """Delete a checkpoint.

    It is renamed first. If the process dies during the deletion, nothing remains that looks like a damaged checkpoint.
    """
    shutil.rmtree(path.rename(path.with_name(path.name + ".deleting")))


def delete_leftovers(directory: Path) -> None:
    """Delete what a dead process or a failed save left half written or half deleted."""
    for pattern in ("*.writing*", "*.deleting"):
        for path in directory.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def check_is_open(directory: Path, descriptor: int | None) -> None:
    """Raise FileNotFoundError if the directory that was opened was deleted.

    A write that was going on may have made another one of the same name, even with the same number.
    """
    if descriptor is None or not os.path.samestat(os.fstat(descriptor), directory.stat()):
        raise FileNotFoundError(errno.ENOENT, "the directory was deleted", str(directory))


def list_reasons_to_keep(losses: Mapping[int, float | None], config: CheckpointConfig) -> dict[int, list[str]]:
    """Return the reasons to keep the checkpoint of each step; a checkpoint without a reason is deleted.

    Args:
        losses: step -> held-out loss; None where it was not measured.
        config: the settings `keep`, `keep_every` and `keep_best`.
    """
    newest = sorted(losses)[-config.keep :]
    best = rank_by_loss(losses)[: config.keep_best]
    return {
        step: [
            *(["newest"] if step in newest else []),
            *([f"every {config.keep_every}"] if config.keep_every and step % config.keep_every == 0 else []),
            *(["best"] if step in best else []),
        ]
        for step in losses
    }


def rank_by_loss(losses: Mapping[int, float | None]) -> list[int]:
    """Return the steps whose held-out loss was measured, lowest loss first."""
    return [step for _, step in sorted((loss, step) for step, loss in losses.items() if loss is not None)]
