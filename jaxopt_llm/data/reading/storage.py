"""Storage that holds data files. `LocalStorage` is this machine's file system; see `remote.py` for others."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Protocol

from jaxopt_llm.core.files import check_is_regular
from jaxopt_llm.core.pulse import Pulse

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
