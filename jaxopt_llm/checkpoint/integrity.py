"""The manifest of a directory: size and SHA-256 of each of its files, written last. Without one that holds, the
directory counts for nothing: TensorStore loads a flipped byte without a word."""

import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxopt_llm.files import replace_durably, sync_directory

MANIFEST = "manifest.json"
THREADS = min(8, os.cpu_count() or 1)  # hashlib lets go of the GIL: each hashes 1 to 2 GB/s


def seal(directory: Path) -> None:
    """Writes the manifest of what is in a directory, and returns when everything in it would survive a power cut.

    The files are read back for their hashes: from the page cache, that is as they were meant to be written. What the
    disk makes of them is for `damage` to find.
    """
    names = _names(directory)
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = list(pool.map(_hash_and_sync, (directory / name for name in names)))
    files = {
        name: {"size": (directory / name).stat().st_size, "sha256": sha256}
        for name, sha256 in zip(names, hashes, strict=True)
    }
    for folder in {directory, *((directory / name).parent for name in names)}:
        sync_directory(folder)
    replace_durably(directory / MANIFEST, json.dumps({"files": files, "sha256": _digest(files)}, indent=1))


def damage(directory: Path) -> str | None:
    """What is wrong with a sealed directory: the first thing found, or None. Follows no symbolic link."""
    try:
        mode = directory.lstat().st_mode
        if not stat.S_ISDIR(mode):
            return "it is a symbolic link" if stat.S_ISLNK(mode) else "it is no directory"
        names = _names(directory)
        if MANIFEST not in names:
            return f"it has no {MANIFEST}" if names else "it is empty"
        modes = {name: (directory / name).lstat().st_mode for name in names}
        for name, mode in modes.items():
            if not stat.S_ISREG(mode):
                return f"{name} is " + ("a symbolic link" if stat.S_ISLNK(mode) else "no file")
        files = _read_manifest(directory)
        if files is None:
            return f"{MANIFEST} is damaged"
        for name in names:
            if name not in files and name != MANIFEST:
                return f"{name} is not in the manifest"
        for name, recorded in files.items():
            if name not in modes:
                return f"{name} is missing"
            size = (directory / name).stat().st_size
            if size != recorded["size"]:
                return f"{name} has {size:,} bytes and had {recorded['size']:,}"
        with ThreadPoolExecutor(THREADS) as pool:
            for name, sha256 in zip(files, pool.map(_hash, (directory / name for name in files)), strict=True):
                if sha256 != files[name]["sha256"]:
                    return f"{name} has another SHA-256 than when it was written"
    except OSError as error:
        return f"it cannot be read ({error})"
    return None


def size(path: Path) -> int:
    """Bytes of the files of a directory."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum((path / name).lstat().st_size for name in _names(path))


def _names(directory: Path, within: str = "") -> list[str]:
    """Relative paths of all that is no directory, in order."""
    with os.scandir(directory) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    return [
        name
        for entry in entries
        for name in (
            _names(Path(entry.path), f"{within}{entry.name}/")
            if entry.is_dir(follow_symlinks=False)
            else [within + entry.name]
        )
    ]


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    """File -> size and hash; None where it is not what was written."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files: dict[str, Any] = manifest["files"]
        return files if manifest["sha256"] == _digest(files) else None
    except (ValueError, KeyError, TypeError):
        return None


def _digest(files: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_and_sync(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
