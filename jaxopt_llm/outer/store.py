"""File with the outer masters of one process of the groups, from which a server continues.

A line of JSON describes the file, with the facts of the groups; masters and momentum follow as float32. It is written
beside the old one and renamed.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxopt_llm.core import files, json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.outer.codes import Layout
from jaxopt_llm.outer.masters import OuterMasters

_MAX_LINE_BYTES = 2**24


@dataclass(frozen=True, eq=False)
class Saved:
    """Outer masters, and the facts of the groups that made them: values that must be equal in all groups, by name."""

    state: OuterMasters
    facts: dict[str, Any]


def path_of(directory: Path, process: int) -> Path:
    return directory / f"process-{process}.masters"


def save(directory: Path, process: int, facts: dict[str, Any], state: OuterMasters) -> None:
    """Write the file durably."""
    vectors = [np.ascontiguousarray(each, "<f4").view(np.uint8) for each in (state.masters, state.momentum)]
    described = {
        "round": state.round,
        "step": state.step,
        "name": state.name,
        "previous": state.previous,
        "contributors": state.contributors,
        "segments": state.layout.segments,
        "facts": facts,
        "sha256": _digest(vectors),
    }
    path = path_of(directory, process)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(json.dumps(described).encode() + b"\n")
        for vector in vectors:
            file.write(vector.data)
        files.sync_file(file)
    temporary.replace(path)
    files.sync_directory(directory)


def load_all(directory: Path) -> dict[int, Saved]:
    """Return what `save` wrote, by process.

    Raises:
        InputError: a file is damaged.
    """
    names = (path.stem.removeprefix("process-") for path in directory.glob("process-*.masters"))
    loaded = {int(name): load(directory, int(name)) for name in names if name.isdecimal()}
    return {process: saved for process, saved in loaded.items() if saved is not None}


def load(directory: Path, process: int) -> Saved | None:
    """Return what `save` wrote; None if there is no file.

    Raises:
        InputError: the file is damaged.
    """
    path = path_of(directory, process)
    if not path.exists():
        return None
    try:
        files.check_is_regular(path)
        with path.open("rb") as file:
            described = json_files.parse(file.readline(_MAX_LINE_BYTES))
            layout, facts = Layout.parse(described["segments"]), dict(described["facts"])
            if path.stat().st_size != file.tell() + 8 * layout.size:
                raise ValueError("another size")
            vectors = [np.fromfile(file, "<f4", layout.size) for _ in range(2)]
        if _digest([each.view(np.uint8) for each in vectors]) != described["sha256"]:
            raise ValueError("another hash")
        masters, momentum = (each.astype(np.float32, copy=False) for each in vectors)
        numbers = int(described["round"]), int(described["step"])
        names = str(described["name"]), str(described["previous"])
        contributors = tuple(map(int, described["contributors"]))
        return Saved(OuterMasters(layout, *numbers, *names, masters, momentum, contributors), facts)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: it is damaged ({error}); restore it, or delete it: the groups then go on from the masters of the "
            "first one that connects"
        ) from error


def _digest(vectors: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for vector in vectors:
        digest.update(vector.data)
    return digest.hexdigest()
