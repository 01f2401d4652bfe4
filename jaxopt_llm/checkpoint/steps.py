"""The directory `checkpoints/` of a run, by name: `N` is the checkpoint of step N, whole when it got that name;
`N.writing` is on its way there, `N.deleting` on its way out, and `N.damaged.K` was found damaged and set aside."""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

from jaxopt_llm.checkpoint import integrity
from jaxopt_llm.files import sync_directory

RECORD = "checkpoint.json"  # beside the arrays: what they are, and what else it takes to go on


def by_step(directory: Path) -> dict[int, Path]:
    """What is named as a step, the oldest first, whole or not."""
    found = directory.iterdir() if directory.is_dir() else ()
    return dict(sorted((int(path.name), path) for path in found if re.fullmatch("0|[1-9][0-9]*", path.name)))


def all_set_aside(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.damaged.*"))


def damage(path: Path, share: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with the checkpoint, or None. share: see integrity.damage."""
    found = integrity.damage(path, share)
    if found is None and record(path)["step"] != int(path.name):
        return f"it is of step {record(path)['step']}"
    return found


def record(path: Path) -> dict[str, Any]:
    """Of a whole checkpoint."""
    read: dict[str, Any] = json.loads((path / RECORD).read_text())
    return read


def glance(path: Path) -> tuple[float | None, str | None]:
    """Held-out loss and the time of saving of a checkpoint that nobody has verified; None for what it does not tell."""
    try:
        told = record(path)
        loss, saved = told.get("eval_loss"), told.get("saved")
    except (OSError, ValueError, AttributeError):
        return None, None
    return loss if isinstance(loss, float) else None, saved if isinstance(saved, str) else None


def working(directory: Path, step: int) -> Path:
    return directory / f"{step}.writing"


def commit(path: Path) -> None:
    """Gives a sealed working directory its step's name."""
    path.rename(path.with_suffix(""))
    sync_directory(path.parent)


def set_aside(path: Path) -> Path:
    """Renames what is damaged. Returns its new path."""
    free = (path.with_name(f"{path.name}.damaged.{number}") for number in itertools.count(1))
    aside = path.rename(next(each for each in free if not each.exists()))
    sync_directory(path.parent)
    return aside


def delete(path: Path) -> None:
    """Out of sight first: a death on the way leaves nothing that looks like a damaged checkpoint."""
    shutil.rmtree(path.rename(path.with_name(path.name + ".deleting")))


def sweep(directory: Path) -> None:
    """Frees what a dead process or a failed save left half written or half deleted."""
    for pattern in ("*.writing*", "*.deleting"):
        for path in directory.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
