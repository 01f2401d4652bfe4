"""Cache of remote data files on this machine.

An entry is a folder whose name is a hash of the URL, size and version of its files, so a changed file is a new entry.
It is downloaded under a temporary name and renamed when it is complete, so an entry is never a part of a file.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.core.errors import InputError, one_line
from jaxopt_llm.core.files import cache_home, measure_files, sync_directory, sync_file
from jaxopt_llm.core.pulse import UNWATCHED, Pulse

_DOWNLOADS = 8  # at once
_UNFINISHED = "*.tmp"  # folders of the cache with entries that are not complete


@dataclass(frozen=True)
class RemoteFile:
    """File of a cache entry.

    Attributes:
        key: its path for fsspec.
        name: its path in the entry.
        size: its size in bytes; None if the server does not tell it.
        version: text that changes with the contents.
    """

    key: str
    name: str
    size: int | None
    version: str


@dataclass(frozen=True)
class CacheEntry:
    """Files that are downloaded together.

    Attributes:
        url: the URL of the file or folder.
        name: path in the entry of the file or folder to read.
        files: the files.
    """

    url: str
    name: str
    files: tuple[RemoteFile, ...]

    @property
    def digest(self) -> str:
        parts = [self.url, *([file.key, file.size, file.version] for file in self.files)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @property
    def size(self) -> int:
        """Return the size of the files in bytes, as far as it is known."""
        return sum(file.size or 0 for file in self.files)


def cache_folder() -> Path:
    return Path(os.environ.get("JAXOPT_LLM_CACHE") or cache_home() / "data").absolute()


def download_missing(entries: Sequence[CacheEntry], system: Any, where: str, pulse: Pulse = UNWATCHED) -> list[Path]:
    """Download the entries that the cache does not hold, and return the local path of each entry.

    Of the processes of a machine, one downloads and the others wait.

    Args:
        system: fsspec's file system.
        where: the setting and the URL, for messages.
        pulse: notes the progress of the download, also if another process does it.

    Raises:
        InputError: a download failed, the disk is too small, or the cache cannot be written.
    """
    cache = cache_folder()
    if any(not (cache / entry.digest).exists() for entry in entries):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _lock(cache, pulse):
                missing = {entry.digest: entry for entry in entries if not (cache / entry.digest).exists()}
                if missing:
                    with pulse.follow(lambda: measure_files(cache.glob(_UNFINISHED))):
                        _download_all(list(missing.values()), system, cache, where)
        except OSError as error:
            remedy = "repair it, or set JAXOPT_LLM_CACHE to another folder"
            raise InputError(f"{where}: the cache {cache} cannot be written ({one_line(error)}); {remedy}") from error
    return [cache / entry.digest / entry.name for entry in entries]


def _download_all(entries: Sequence[CacheEntry], system: Any, cache: Path, where: str) -> None:
    size, free = sum(entry.size for entry in entries), shutil.disk_usage(cache).free
    if size > free:
        problem = f"{_format_bytes(size)} to download, but the disk of {cache} has only {_format_bytes(free)} free"
        raise InputError(f"{where}: {problem}; set JAXOPT_LLM_CACHE to a folder on a larger disk")
    count = sum(len(entry.files) for entry in entries)
    files = f"{count:,} file{'s' if count > 1 else ''}"
    print(f"{where}: downloading {files}, {_format_bytes(size)}, into {cache}", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        downloads = [pool.submit(_download, entry, system, cache, where) for entry in entries]
        try:
            for download in downloads:
                download.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _download(entry: CacheEntry, system: Any, cache: Path, where: str) -> None:
    """Download an entry completely, or leave nothing of it."""
    temporary = cache / f"{entry.digest}.{uuid.uuid4().hex}.tmp"
    try:
        for file in entry.files:
            target = temporary / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                system.get_file(file.key, str(target))
            except Exception as error:  # each file system raises its own types
                problem = f"the download of {file.key} failed ({type(error).__name__}: {one_line(error)})"
                raise InputError(
                    f"{where}: {problem}; check the network and your credentials, and run again"
                ) from error
            if file.size not in (None, target.stat().st_size):
                problem = f"the download of {file.key} has {target.stat().st_size:,} bytes of {file.size:,}"
                raise InputError(f"{where}: {problem}; the file has changed or was cut off, so run again")
            with target.open("rb") as stream:
                sync_file(stream)
        for folder in {(temporary / file.name).parent for file in entry.files} | {temporary}:
            sync_directory(folder)
        try:
            temporary.rename(cache / entry.digest)
        except OSError as error:  # on storage without locks, another process may have been faster
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        sync_directory(cache)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _lock(cache: Path, pulse: Pulse) -> Iterator[None]:
    """Lock the cache against other processes, and remove what processes left that were killed during a download."""
    with (cache / "lock").open("a") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that downloads into {cache}", file=sys.stderr, flush=True)
                with pulse.wait_for_lock(), pulse.follow(lambda: measure_files(cache.glob(_UNFINISHED))):
                    fcntl.flock(file, fcntl.LOCK_EX)
            for leftover in cache.glob(_UNFINISHED):
                shutil.rmtree(leftover, ignore_errors=True)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):  # shared storage without locks
                raise
        yield


def _format_bytes(size: int) -> str:
    for unit, limit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= limit:
            return f"{size / limit:,.1f} {unit}"
    return f"{size} bytes"
