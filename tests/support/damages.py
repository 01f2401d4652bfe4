"""Damages of a checkpoint on disk. Each function damages one and returns the expected part of the message."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from jaxopt_llm.checkpoint.native import integrity, step_directories


def largest(path: Path) -> Path:
    """Return the largest file of the arrays of a checkpoint."""
    return max((each for each in path.glob("*/**/*") if each.is_file()), key=lambda each: each.stat().st_size)


def flip(file: Path, place: float = 0.5) -> str:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1
    file.write_bytes(content)
    return f"{file.name} has a different SHA-256"


def truncate(file: Path) -> str:
    os.truncate(file, file.stat().st_size - 1)
    return f"{file.name} has {file.stat().st_size:,} bytes instead of {file.stat().st_size + 1:,}"


def remove(path: Path) -> str:
    largest(path).unlink()
    return "is missing"


def add(path: Path) -> str:
    folder = largest(path).parent
    (folder / "more").write_text("")
    return f"{folder.relative_to(path)}/more is not in the manifest"


def link(path: Path) -> str:
    """Replace a file by a symbolic link to the same content."""
    file = largest(path)
    moved = path.with_name(f"{path.name}.moved")
    file.rename(moved)
    file.symlink_to(moved)
    return f"{file.name} is a symbolic link"


def link_whole(path: Path) -> str:
    path.symlink_to(path.rename(path.with_name(f"{path.name}.moved")), target_is_directory=True)
    return "it is a symbolic link"


def rename_another(path: Path) -> str:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("2"), path)
    return "it belongs to step 2"


def change_manifest(path: Path) -> str:
    """Change a hash so that the manifest is still valid JSON."""
    file = path / integrity.MANIFEST
    manifest = json.loads(file.read_text())
    next(iter(manifest["files"].values()))["sha256"] = "0" * 64
    file.write_text(json.dumps(manifest))
    return "manifest.json is damaged"


def instead(content: str | None) -> Callable[[Path], str]:
    """Return a damage that replaces the checkpoint by an empty directory (None) or by a file."""

    def replace(path: Path) -> str:
        shutil.rmtree(path)
        if content is None:
            path.mkdir()
        else:
            path.write_text(content)
        return "it is empty" if content is None else "it is not a directory"

    return replace


DAMAGES: dict[str, Callable[[Path], str]] = {
    "flipped byte": lambda path: flip(largest(path)),
    "flipped byte of the record": lambda path: flip(path / step_directories.RECORD),
    "damaged metadata": lambda path: flip(next(path.glob("*/_METADATA"))),
    "truncated": lambda path: truncate(largest(path)),
    "missing file": remove,
    "extra file": add,
    "pipe": lambda path: os.mkfifo(path / "pipe") or "pipe is not a regular file",
    "symbolic link": link,
    "symbolic link as a step": link_whole,
    "another step": rename_another,
    "empty directory": instead(None),
    "file as a step": instead("7"),
    "changed manifest": change_manifest,
    "cut manifest": lambda path: truncate(path / integrity.MANIFEST) and "manifest.json is damaged",
    "no manifest": lambda path: (path / integrity.MANIFEST).unlink() or "it has no manifest.json",
}
