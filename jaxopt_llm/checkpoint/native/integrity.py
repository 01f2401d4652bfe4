"""Manifest of a directory: the size and SHA-256 of each of its files.

The manifest is written last. A directory without a valid manifest does not count as a checkpoint. This check is needed
because TensorStore loads a flipped byte without an error.
"""

import functools
import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxopt_llm.core import json_files
from jaxopt_llm.core.files import hash_file, replace_durably, sync_directory

MANIFEST = "manifest.json"
THREADS = min(8, os.cpu_count() or 1)  # hashlib releases the GIL: each thread hashes 1 to 2 GB/s


FileEntries = dict[str, dict[str, Any]]  # relative path -> size and SHA-256


def sync_and_hash(directory: Path, pattern: str) -> FileEntries:
    """Hash the files below the subdirectories that match a glob pattern, and make these files survive a power cut.

    The hashes come from the page cache, that is, from the bytes as they were meant to be written. Damage on the disk
    is left for `find_damage` to detect.
    """
    subdirectories = [path.relative_to(directory) for path in sorted(directory.glob(pattern))]
    names = [name for each in subdirectories for name in _list_files(directory / each, f"{each}/")]
    return _sync_and_hash_files(directory, names)


def write_manifest(directory: Path, hashed: FileEntries) -> None:
    """Write the manifest of a directory, and make everything in the directory survive a power cut.

    Args:
        directory: the directory, whose files no longer change.
        hashed: entries of the files that the processes that wrote them have already hashed.
    """
    names = _list_files(directory)
    entries = hashed | _sync_and_hash_files(directory, [name for name in names if name not in hashed])
    files = {name: entries[name] for name in names}
    for folder in {directory, *((directory / name).parent for name in names)}:
        sync_directory(folder)
    replace_durably(directory / MANIFEST, json.dumps({"files": files, "sha256": _digest(files)}, indent=1))


def find_damage(directory: Path, share: tuple[int, int] = (0, 1)) -> str | None:
    """Return a description of the first damage found in a directory with a manifest; None: it is intact.

    Symbolic links are not followed.

    Args:
        directory: the directory to check.
        share: index and number of the processes that check the directory together; each hashes a part of the files.
    """
    try:
        mode = directory.lstat().st_mode
        if not stat.S_ISDIR(mode):
            return "it is a symbolic link" if stat.S_ISLNK(mode) else "it is not a directory"
        names = _list_files(directory)
        if MANIFEST not in names:
            return f"it has no {MANIFEST}" if names else "it is empty"
        modes = {name: (directory / name).lstat().st_mode for name in names}
        for name, mode in modes.items():
            if not stat.S_ISREG(mode):
                return f"{name} is " + ("a symbolic link" if stat.S_ISLNK(mode) else "not a regular file")
        files = _read_manifest(directory)
        if files is None:
            return f"{MANIFEST} is damaged"
        for name in names:
            if name not in files and name != MANIFEST:
                return f"{name} is not in the manifest"
        for name, entry in files.items():
            if name not in modes:
                return f"{name} is missing"
            size = (directory / name).stat().st_size
            if size != entry["size"]:
                return f"{name} has {size:,} bytes instead of {entry['size']:,}"
        index, count = share
        local = sorted(files, key=lambda name: files[name]["size"])[index::count]
        with ThreadPoolExecutor(THREADS) as pool:
            for name, sha256 in zip(local, pool.map(hash_file, (directory / name for name in local)), strict=True):
                if sha256 != files[name]["sha256"]:
                    return f"{name} has a different SHA-256 than when it was written"
    except OSError as error:
        return f"it cannot be read ({error})"
    return None


def count_bytes(path: Path) -> int:
    """Return the size of a file, or of all files below a directory, in bytes."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum((path / name).lstat().st_size for name in _list_files(path))


def _list_files(directory: Path, prefix: str = "") -> list[str]:
    """Return the sorted relative paths of everything below a directory that is not a directory."""
    names = []
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name, is_directory = prefix + entry.name, entry.is_dir(follow_symlinks=False)
            names += _list_files(Path(entry.path), f"{name}/") if is_directory else [name]
    return names


def _sync_and_hash_files(directory: Path, names: list[str]) -> FileEntries:
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = pool.map(functools.partial(hash_file, sync=True), (directory / name for name in names))
        return {
            name: {"size": (directory / name).stat().st_size, "sha256": sha256}
            for name, sha256 in zip(names, hashes, strict=True)
        }


def _read_manifest(directory: Path) -> FileEntries | None:
    """Return the entries of the manifest; None: it is not as it was written."""
    try:
        manifest = json_files.parse_settings(json_files.read_bytes(directory / MANIFEST))
        files: FileEntries = manifest["files"]
        return files if manifest["sha256"] == _digest(files) else None
    except (ValueError, KeyError, TypeError):
        return None


def _digest(files: FileEntries) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
