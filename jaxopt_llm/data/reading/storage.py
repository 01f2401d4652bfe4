"""Storage of data files: this machine's file system, and remote ones (`s3://`, `gs://`, `hf://`, ...) by fsspec.

A remote file is downloaded once into a cache folder of this machine; everything else reads the local copy. An entry of
the cache is a folder whose name is a hash of the URL, size and version of its files, so a changed file is a new entry.
It is downloaded under a temporary name and renamed when it is complete, so an entry is never a part of a file.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Protocol

import fsspec
from fsspec.registry import known_implementations

from jaxopt_llm.core.errors import InputError, one_line
from jaxopt_llm.core.files import cache_home, check_is_regular, measure_files, sync_directory, sync_tree
from jaxopt_llm.core.pulse import UNWATCHED, Pulse

PLAN = "prepared-plan.json"  # in every folder that jaxopt_llm.prepare has started to write


class Storage(Protocol):
    """Protocol of the storage of one of data.paths.

    Attributes:
        path: the file, folder or glob that data.paths names.
    """

    @property
    def path(self) -> PurePath: ...

    def is_file(self, path: PurePath) -> bool: ...

    def is_folder(self, path: PurePath) -> bool: ...

    def walk(self, folder: PurePath) -> Iterator[PurePath]:
        """Yield the files and prepared folders below a folder, without files of prepared folders and hidden files."""

    def glob(self) -> list[PurePath]:
        """Return the files and folders that match `path`."""

    def url(self, path: PurePath) -> str:
        """Return the URL of a path; empty for a local path."""

    def fetch(self, selected: Sequence[tuple[PurePath, ...]], pulse: Pulse) -> list[Path]:
        """Return a local path for the first path of each tuple. The others of a tuple are beside it, under their names.

        pulse: notes the progress of the copies.

        Raises:
            InputError: a file cannot be copied to this machine.
        """


class LocalStorage:
    """Local file system, see `Storage`."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.path = Path(pattern)

    def is_file(self, path: PurePath) -> bool:
        """Return whether a path is a file. Raises InputError for a pipe, a socket or a device."""
        local = Path(path)
        if local.exists():
            check_is_regular(local)
        return local.is_file()

    def is_folder(self, path: PurePath) -> bool:
        return Path(path).is_dir()

    def walk(self, folder: PurePath) -> Iterator[PurePath]:
        for parent, subfolders, names in os.walk(folder):
            visible = [Path(parent, name) for name in subfolders if not name.startswith(".")]
            subfolders[:] = [path.name for path in visible if not is_prepared(self, path)]
            yield from (path for path in visible if is_prepared(self, path))
            yield from (path for name in names if not name.startswith(".") and (path := Path(parent, name)).is_file())

    def glob(self) -> list[PurePath]:
        return [Path(match) for match in glob.glob(self._pattern, recursive=True)]

    def url(self, path: PurePath) -> str:
        return ""

    def fetch(self, selected: Sequence[tuple[PurePath, ...]], pulse: Pulse) -> list[Path]:
        return [Path(paths[0]) for paths in selected]


def is_prepared(storage: Storage, path: PurePath) -> bool:
    return storage.is_file(path / PLAN)


# --- Cache of remote files


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
    cache = Path(os.environ.get("JAXOPT_LLM_CACHE") or cache_home() / "data").absolute()
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
        sync_tree(temporary)
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


# --- Remote file systems


_URL = re.compile(r"([a-z][a-z0-9+.-]*)://.+", re.IGNORECASE)
# Keys of fsspec's `info` that tell versions of a file apart, the most reliable first. Each file system has its own.
_VERSION_KEYS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "blob_id",
    "mtime",
    "LastModified",
    "Last-Modified",
    "created",
)
_SHARD_PREFIX = "shard-"  # of files that jaxopt_llm.prepare merges and deletes; a run does not read them

Info = Mapping[str, Any]


def is_url(path: str) -> bool:
    return _URL.fullmatch(path) is not None


def check_backends(paths: Iterable[str], setting: str) -> None:
    """Raise InputError if the package for the protocol of a URL among paths is not installed. Reads nothing.

    setting: the setting that names the paths, for messages.
    """
    for path in paths:
        if found := _URL.fullmatch(path):
            _find_backend(found[1].lower(), f"{setting} {path}")


def _find_backend(protocol: str, where: str) -> Any:
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = str(known_implementations.get(protocol, {}).get("class", "fsspec")).split(".")[0]
        if package == "fsspec":  # a file system of fsspec itself that needs more packages, which the error names
            raise InputError(f"{where}: {one_line(error)}; install what is missing with pip install") from error
        problem = f"{protocol}:// needs the package {package}, which is not installed"
        raise InputError(f"{where}: {problem}; run pip install {package}") from error
    except ValueError as error:
        raise InputError(
            f"{where}: {protocol}:// is no protocol that fsspec knows; correct it, such as s3://"
        ) from error


class RemoteStorage:
    """File system of a URL, see `Storage`. Paths are those of the file system, without the protocol.

    Args:
        url: URL of a file or folder, or a glob.
        setting: the setting that names the URL, for messages.

    Raises:
        InputError: the package for the protocol is missing, or, from each method, the file system cannot be read.
    """

    def __init__(self, url: str, setting: str) -> None:
        found = _URL.fullmatch(url)
        assert found, url
        self._where = f"{setting} {url}"
        _find_backend(found[1].lower(), self._where)
        with self._explain_failure("opened"):
            # A new instance, because instances keep the listings of folders.
            self._system, key = fsspec.url_to_fs(url, skip_instance_cache=True)
        # The paths of some file systems, such as http, are whole URLs, and a path cannot have the two slashes.
        self._prefix = match[0] if (match := re.match(r"[a-z]+://", key)) else ""
        self.path = self._path(key)
        if not self.path.name:
            raise InputError(f"{self._where}: it names no file or folder; add one, or a glob")
        self._infos: dict[PurePath, Info | None] = {}  # None: there is no such file or folder

    def is_file(self, path: PurePath) -> bool:
        return (self._info(path) or {}).get("type") == "file"

    def is_folder(self, path: PurePath) -> bool:
        return (self._info(path) or {}).get("type") == "directory"

    def walk(self, folder: PurePath) -> Iterator[PurePath]:
        with self._explain_failure("listed"):
            found = self._keep_infos(self._system.find(self._key(folder), detail=True))
        files = [p for p in found if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
        prepared = {path.parent for path in files if path.name == PLAN}
        yield from prepared
        yield from (path for path in files if not prepared.intersection(path.parents))

    def glob(self) -> list[PurePath]:
        with self._explain_failure("listed"):
            found = self._keep_infos(self._system.glob(self._key(self.path), detail=True))
        if any(part.startswith(".") for part in self.path.parts):
            return found
        return [path for path in found if not any(part.startswith(".") for part in path.parts)]  # as local globs

    def url(self, path: PurePath) -> str:
        return str(self._system.unstrip_protocol(self._key(path)))

    def fetch(self, selected: Sequence[tuple[PurePath, ...]], pulse: Pulse) -> list[Path]:
        entries = [self._make_entry(paths) for paths in selected]
        return download_missing(entries, self._system, self._where, pulse)

    def _make_entry(self, paths: tuple[PurePath, ...]) -> CacheEntry:
        """Return the cache entry of files that are read together: a pair, or the files of a prepared folder."""
        if is_prepared(self, paths[0]):
            with self._explain_failure("listed"):
                found = self._keep_infos(self._system.find(self._key(paths[0]), maxdepth=1, detail=True))
            paths = (*paths, *sorted(path for path in found if not path.name.startswith(_SHARD_PREFIX)))
            members = {path.relative_to(paths[0].parent).as_posix(): path for path in paths[1:]}
        else:
            members = {path.name: path for path in paths}
        files = tuple(self._describe_file(name, path) for name, path in members.items())
        return CacheEntry(self.url(paths[0]), paths[0].name, files)

    def _describe_file(self, name: str, path: PurePath) -> RemoteFile:
        info = self._info(path)
        if info is None:
            raise InputError(f"{self._where}: there is no {self.url(path)}; add it")
        version = next((f"{key} {info[key]}" for key in _VERSION_KEYS if info.get(key)), None)
        return RemoteFile(self._key(path), name, info.get("size"), version or self._system.ukey(self._key(path)))

    def _info(self, path: PurePath) -> Info | None:
        if path not in self._infos:
            with self._explain_failure("read"):
                try:
                    self._infos[path] = self._system.info(self._key(path))
                except (FileNotFoundError, NotADirectoryError):
                    self._infos[path] = None
        return self._infos[path]

    def _keep_infos(self, infos: Mapping[str, Info]) -> list[PurePath]:
        """Keep what a listing tells of each path, and return the paths. Object stores have objects named as folders."""
        found: dict[PurePath, Info] = {self._path(key): info for key, info in infos.items() if not key.endswith("/")}
        self._infos.update(found)
        return list(found)

    def _path(self, key: str) -> PurePosixPath:
        return PurePosixPath(key.removeprefix(self._prefix))

    def _key(self, path: PurePath) -> str:
        return f"{self._prefix}{path}"

    @contextmanager
    def _explain_failure(self, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each file system raises its own types
            problem = f"cannot be {action} ({type(error).__name__}: {one_line(error)})"
            remedy = "check the address, the network and your credentials"
            raise InputError(f"{self._where}: {problem}; {remedy}") from error
