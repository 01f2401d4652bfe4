"""Data files on remote file systems: `s3://`, `gs://`, `hf://` and the other protocols of fsspec.

A file is downloaded once into a cache folder (see `download.py`); everything else reads the local copy.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import fsspec
from fsspec.registry import known_implementations

from jaxopt_llm.core.errors import InputError, one_line
from jaxopt_llm.core.pulse import Pulse
from jaxopt_llm.data.reading.download import CacheEntry, RemoteFile, download_missing
from jaxopt_llm.data.reading.storage import PLAN, is_prepared

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
        """Return the cache entry that holds files which are read together: a pair, or those of a prepared folder."""
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
