"""Values of weights that are stored as codes, computed where a part of them is read.

A reader of weights takes views: some rows, a transposition, heads apart. `Codes` therefore has an array of the weight's
shape that holds no data, whose views say which values are wanted: a range of indices along each dimension. A format
(formats.py) computes the values of such a part from the stored tensors, and reads no other bytes of them than it needs.
"""

import functools
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxopt_llm.checkpoint.huggingface.safetensors import StoredTensor
from jaxopt_llm.core.errors import InputError

Indices = range | np.ndarray  # along one dimension
Part = tuple[range, ...]  # of a weight: indices along each dimension, in the order in which the codes lie in the file
Where = tuple[Indices, ...]  # of a tensor
MAX_VALUES = 2**21  # computed at once, which bounds the memory for intermediate results
AGAIN = "download the folder again"


class Codes:
    """Weight that is stored as codes.

    Attributes:
        dtype: dtype of a parameter with these values.
        array: an array of the weight's shape. Its views are places, which hold no data.
    """

    def __init__(
        self, shape: tuple[int, ...], order: tuple[int, ...], dtype: np.dtype, decode: Callable[[Part], np.ndarray]
    ) -> None:
        """Describe a weight.

        Args:
            shape: its shape, with the dimensions as the codes have them in the file, so that a part is few bytes.
            order: those dimensions in the order that the weight has.
            dtype: see `Codes`.
            decode: returns the values of a part.
        """
        self.dtype = dtype
        self._shape, self._decode = shape, decode
        self._places = _list_places(math.prod(shape)).reshape(shape)
        self.array = self._places.transpose(order)

    def read(self, view: np.ndarray) -> np.ndarray:
        """Return the values, in float32, at the places of a view of `array`."""
        if not view.size:
            return np.empty(view.shape, np.float32)
        first = _address(view) - _address(self._places)
        steps = [self._find_step(size, stride) for size, stride in zip(view.shape, view.strides, strict=True)]
        part = []
        for dim, start in enumerate(np.unravel_index(first, self._shape)):
            along = [(size, step) for size, (its_dim, step) in zip(view.shape, steps, strict=True) if its_dim == dim]
            last = int(start) + sum((size - 1) * step for size, step in along)
            part.append(range(int(start), last + 1, math.gcd(*(step for _, step in along)) or 1))
        values = np.empty([len(each) for each in part], np.float32)
        self._fill(values, tuple(part))
        strides = [step // part[dim].step * values.strides[dim] for dim, step in steps]
        return np.lib.stride_tricks.as_strided(values, view.shape, strides, writeable=False)

    def _find_step(self, size: int, stride: int) -> tuple[int, int]:
        """Return the dimension that an axis of a view goes along, and the step between its neighbours there."""
        if size == 1:
            return 0, 0
        dim = next(dim for dim, s in enumerate(self._places.strides) if s <= stride and self._shape[dim] > 1)
        assert stride % self._places.strides[dim] == 0, "an axis of the view goes along two dimensions"
        return dim, stride // self._places.strides[dim]

    def _fill(self, out: np.ndarray, part: Part) -> None:
        """Compute the values of a part, in pieces."""
        if out.size <= MAX_VALUES:
            with np.errstate(over="ignore", invalid="ignore"):  # who copies the values checks that they are finite
                out[...] = self._decode(part)
            return
        dim = next(dim for dim, size in enumerate(out.shape) if size > 1)
        half, before = len(part[dim]) // 2, (slice(None),) * dim
        self._fill(out[(*before, slice(half))], (*part[:dim], part[dim][:half], *part[dim + 1 :]))
        self._fill(out[(*before, slice(half, None))], (*part[:dim], part[dim][half:], *part[dim + 1 :]))


def _list_places(size: int) -> np.ndarray:
    return _map_places(max(size, 1).bit_length())[:size]


@functools.cache
def _map_places(bits: int) -> np.ndarray:
    """Return 2**bits bytes of addresses. All weights share them, and they take no memory."""
    return np.frombuffer(mmap.mmap(-1, 2**bits, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ), np.uint8)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@dataclass(frozen=True)
class Parts:
    """Tensors of one weight.

    Attributes:
        stem: start of their names.
        tensors: end of the name -> tensor.
    """

    stem: str
    tensors: Mapping[str, StoredTensor]

    def __contains__(self, end: str) -> bool:
        return end in self.tensors

    def error(self, end: str, problem: str) -> InputError:
        """Return the error for a tensor. problem: a clause with the tensor as its subject."""
        return InputError(f"{self.tensors[end].file}: tensor {self.stem + end!r} {problem}; {AGAIN}")

    def array(self, end: str, shape: tuple[int, ...], *dtypes: np.dtype) -> np.ndarray:
        """Return the view of all of a tensor.

        Raises InputError if its shape is not `shape`, apart from dimensions of size 1, or if its dtype is none of
        `dtypes`.
        """
        array = self.tensors[end].array
        if dtypes and array.dtype not in dtypes:
            raise self.error(end, f"is {array.dtype}, not one of {', '.join(map(str, dtypes))}")
        if [size for size in array.shape if size != 1] != [size for size in shape if size != 1]:
            raise self.error(end, f"has shape {list(array.shape)}, but the weight needs {list(shape)}")
        return array.reshape(shape)

    def matrix(self, end: str) -> np.ndarray:
        """Return the view of all of a tensor. Raise InputError if it is not a matrix."""
        array = self.tensors[end].array
        if array.ndim != 2 or not array.size:
            raise self.error(end, f"has shape {list(array.shape)}, but codes are those of a matrix")
        return array

    def read(self, end: str, view: np.ndarray, where: Where) -> np.ndarray:
        """Read the elements of a view of a tensor at some indices along each of its dimensions."""
        spans = [span(indices) for indices in where]
        found = self.tensors[end].read(view[tuple(spans)])
        for dim, (indices, bounds) in enumerate(zip(where, spans, strict=True)):
            if not isinstance(indices, range):
                found = found.take(indices - bounds.start, dim)
        return found

    def read_packed(self, end: str, words: np.ndarray, where: Where, dim: int, packing: "Packing") -> np.ndarray:
        """Read codes that are packed along a dimension of a view of a tensor. where: indices of codes along `dim`."""
        indices = np.asarray(where[dim])
        word, bit = packing.find(indices, 8 * words.itemsize)
        found = self.read(end, words, (*where[:dim], word, *where[dim + 1 :]))
        found = found.view(f"u{words.itemsize}") + np.asarray(packing.added, f"u{words.itemsize}")
        bits = bit.astype(found.dtype).reshape([-1 if each == dim else 1 for each in range(words.ndim)])
        return (found >> bits) & np.asarray(2**packing.bits - 1, found.dtype)

    def read_finite(self, end: str, view: np.ndarray, where: Where) -> np.ndarray:
        """Read numbers in float32. Raise InputError if one is not finite."""
        found = self.read(end, view, where).astype(np.float32)
        if not np.isfinite(found).all():
            raise self.error(end, "has values that are not finite")
        return found


@dataclass(frozen=True)
class Packing:
    """Several codes in one word.

    Attributes:
        bits: bits of a code.
        order: place of each code of a word, from the lowest bits on; empty: the first one has the lowest bits.
        added: number that is added to each word before it is taken apart.
    """

    bits: int
    order: tuple[int, ...] = ()
    added: int = 0

    def find(self, indices: np.ndarray, word_bits: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the words of some codes, and the lowest of their bits there."""
        per_word = word_bits // self.bits
        places = indices % per_word
        if self.order:
            places = np.asarray(self.order)[places]
        return indices // per_word, places * self.bits


def span(indices: Indices) -> slice:
    """Return the slice with some indices: only these, for a range, and else all from the first to the last one."""
    if isinstance(indices, range):
        return slice(indices.start, indices.stop, indices.step)
    return slice(int(indices.min()), int(indices.max()) + 1)


def blocks_of(indices: range, block: int | np.ndarray) -> Indices:
    """Return the block that each index is in; one if all are in the same.

    block: the size of a block, or the block of every index.
    """
    if not isinstance(block, int):
        return block[np.asarray(indices)]
    first, last = indices[0] // block, indices[-1] // block
    return range(first, first + 1) if first == last else np.asarray(indices) // block
