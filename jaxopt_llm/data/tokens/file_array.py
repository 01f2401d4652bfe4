"""Arrays in files, read piece by piece.

They are not memory-mapped: a process that reads a mapped page of a file that has been truncated, or whose disk fails,
ends with SIGBUS. A read that fails is an error that names the file.
"""

import functools
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import check_is_regular

_MAX_OPEN = 128  # files at once; a process may usually have 1024 of them
_BLOCK = 2**12  # elements: those of one block are read at once


@dataclass(frozen=True, eq=False)
class FileArray:
    """One-dimensional array that starts `offset` bytes into a file.

    Only the most recently used files are open, so a corpus may have any number of files. An index reads its elements:
    `array[:]` reads all of them.
    """

    path: Path
    dtype: np.dtype[Any]
    size: int
    offset: int = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            first, last, step = index.indices(self.size)
            assert step == 1
            return self._read(first, max(first, last))
        if isinstance(index, (int, np.integer)):
            at = range(self.size)[int(index)]
            return self._read(at, at + 1)[0]
        return self._gather(np.asarray(index, np.int64))

    def searchsorted(self, value: int, side: Literal["left", "right"] = "left") -> int:
        """Return where a value belongs in the array, which is sorted. Reads a few elements only."""
        bisect = bisect_left if side == "left" else bisect_right
        block = bisect(range(0, self.size, _BLOCK), value, key=self.__getitem__)  # the first one that begins after it
        first = max(block - 1, 0) * _BLOCK
        return first + int(self[first : first + _BLOCK].searchsorted(value, side))

    def _gather(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        places = np.where(indices < 0, indices + self.size, indices)
        if places.size and not 0 <= places.min() <= places.max() < self.size:
            raise IndexError(f"{self.path}: no element {places.min()} or {places.max()} of {self.size}")
        order = np.argsort(places, kind="stable")
        found = np.empty(places.shape, self.dtype)
        for near in np.split(order, np.flatnonzero(np.diff(places[order] // _BLOCK)) + 1) if places.size else ():
            first = int(places[near[0]])
            found[near] = self._read(first, int(places[near[-1]]) + 1)[places[near] - first]
        return found

    def _read(self, first: int, last: int) -> NDArray[Any]:
        """Return elements [first, last)."""
        at, left = self.offset + first * self.dtype.itemsize, (last - first) * self.dtype.itemsize
        parts: list[bytes] = []
        try:
            file = _open(self)  # another thread may evict it from the cache, but not close it
            while left:  # one call reads at most 2 GiB
                parts.append(os.pread(file.number, left, at))
                if not parts[-1]:
                    raise InputError(f"{self.path}: the file was truncated while it was read; restore it")
                at, left = at + len(parts[-1]), left - len(parts[-1])
        except OSError as error:
            raise InputError(f"{self.path}: the file can no longer be read ({error.strerror}); restore it") from error
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)


Array = NDArray[Any] | FileArray


class _Descriptor:
    """Descriptor of an open file, which is closed when nothing uses it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.number)


@functools.lru_cache(_MAX_OPEN)
def _open(array: FileArray) -> _Descriptor:
    check_is_regular(array.path)
    return _Descriptor(array.path)
