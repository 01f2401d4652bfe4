"""Tensors in files: views that read nothing, and reads of them.

A process that touches a mapped page of a file that has been cut, or whose disk fails, ends with SIGBUS. Bytes are
therefore read with `pread`, whose failure is an error that names the file. The map only gives views an address.
"""

import mmap
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxopt_llm.core.errors import InputError

MAX_GAP_BYTES = 2**14  # bytes between two parts of a view that are read, too: a call for each part would take longer
MAX_PIECE_BYTES = 2**20  # read at once of a view with gaps


class StoredFile:
    """File that is open, with the addresses of its bytes."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self._descriptor = os.dup(stream.fileno())
        self.bytes = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read(self, view: np.ndarray) -> np.ndarray:
        """Return a view of the file's bytes, of any dtype, shape and strides, as an array in memory.

        Its axes lie in memory as they do in the file.

        Raises:
            InputError: the file was cut, or cannot be read any more.
        """
        order = sorted(range(view.ndim), key=lambda axis: view.strides[axis], reverse=True)
        there = view.transpose(order)
        found = np.empty(there.shape, view.dtype)
        if found.size:
            begin = _address(view) - _address(self.bytes)
            assert 0 <= begin < self.bytes.size and min(view.strides, default=0) >= 0, "not a view of this file"
            self._fill(found.reshape(-1).view(np.uint8), begin, there)
        return found.transpose(np.argsort(order))

    def _fill(self, out: np.ndarray, begin: int, view: np.ndarray) -> None:
        """Read a view that begins at a byte, and whose axes have falling strides, into contiguous bytes."""
        run, outer = view.itemsize, view.ndim
        while outer and (view.shape[outer - 1] == 1 or view.strides[outer - 1] == run):
            outer -= 1
            run *= view.shape[outer]
        if not outer:
            self._read(out, begin)
            return
        *first, last = range(outer)
        count, stride = view.shape[last], view.strides[last]
        at = 0
        for place in np.ndindex(*(view.shape[axis] for axis in first)):
            row = begin + sum(index * view.strides[axis] for index, axis in zip(place, first, strict=True))
            self._fill_row(out[at : at + count * run].reshape(count, run), row, stride)
            at += count * run

    def _fill_row(self, out: np.ndarray, begin: int, stride: int) -> None:
        """Read parts of the file that are `stride` bytes apart."""
        count, run = out.shape
        at_once = max(1, MAX_PIECE_BYTES // stride) if stride - run <= MAX_GAP_BYTES else 1
        for first in range(0, count, at_once):
            parts = out[first : first + at_once]
            if len(parts) == 1:
                self._read(parts[0], begin + first * stride)
                continue
            piece = np.empty((len(parts) - 1) * stride + run, np.uint8)
            self._read(piece, begin + first * stride)
            parts[...] = np.lib.stride_tricks.as_strided(piece, parts.shape, (stride, 1))

    def _read(self, out: np.ndarray, begin: int) -> None:
        """Fill contiguous bytes from the file."""
        left = out.data
        try:
            while left:  # one call reads at most 2 GiB
                count = os.preadv(self._descriptor, [left], begin)
                if not count:
                    raise InputError(f"{self.path}: the file was truncated while it was read; download it again")
                left, begin = left[count:], begin + count
        except OSError as error:
            raise InputError(
                f"{self.path}: the file can no longer be read ({error.strerror}); check the disk, or download it again"
            ) from error


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class StoredTensor(NamedTuple):
    """Tensor in a file. array: a view that gives its dtype, its shape and its place; see `read`."""

    source: StoredFile
    array: np.ndarray

    @property
    def file(self) -> Path:
        return self.source.path

    def read(self, view: np.ndarray | None = None) -> np.ndarray:
        """Read a view of `array`, or all of it: see `StoredFile.read`."""
        return self.source.read(self.array if view is None else view)
