"""Arrays in files, memory-mapped while they are in use."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.core.errors import InputError

_MAX_MAPS = 128  # open at once; each holds a file descriptor, and a process may usually have 1024 of them


@dataclass(frozen=True)
class MappedArray:
    """One-dimensional array that starts `offset` bytes into a file.

    Only the most recently used arrays are mapped, so a corpus may have any number of files. A slice is a view of the
    file and may be unaligned.
    """

    path: Path
    dtype: np.dtype[Any]
    size: int
    offset: int = 0

    def __getitem__(self, index: Any) -> Any:
        return _map(self)[index]


Array = NDArray[Any] | MappedArray


@functools.lru_cache(_MAX_MAPS)
def _map(array: MappedArray) -> NDArray[Any]:
    if not array.size:  # an empty file cannot be mapped
        return np.empty(0, array.dtype)
    try:
        return np.asarray(np.memmap(array.path, array.dtype, "r", array.offset, (array.size,)))
    except (OSError, ValueError) as error:
        raise InputError(f"{array.path}: the file can no longer be memory-mapped ({error}); restore it") from error
