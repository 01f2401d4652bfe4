"""Arrays in files, mapped into memory while they are in use."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.errors import InputError

_MAPS = 128  # at once; each holds a descriptor, of which a process commonly may have 1024


@dataclass(frozen=True)
class MappedArray:
    """A one-dimensional array that begins `offset` bytes into a file. Only those used last are mapped, so that a corpus
    may have any number of files. A slice of it is a view of the file, which need not be aligned."""

    path: Path
    dtype: np.dtype[Any]
    size: int
    offset: int = 0

    def __getitem__(self, where: Any) -> Any:
        return _map(self)[where]


Array = NDArray[Any] | MappedArray


@functools.lru_cache(_MAPS)
def _map(array: MappedArray) -> NDArray[Any]:
    if not array.size:  # an empty file maps to nothing
        return np.empty(0, array.dtype)
    try:
        return np.asarray(np.memmap(array.path, array.dtype, "r", array.offset, (array.size,)))
    except (OSError, ValueError) as error:
        raise InputError(f"{array.path}: it cannot be mapped any more ({error}); bring it back") from error
