"""Token files of other programs, memory-mapped: Megatron's .bin/.idx pair, and NumPy's .npy."""

import struct
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.data.mapped import Array, MappedArray
from jaxopt_llm.data.tokens import numbered_keys
from jaxopt_llm.errors import InputError

# Megatron-LM's IndexedDataset: magic, version, code of the token type, number of sequences, number of document
# boundaries; then int32 lengths, int64 byte offsets of the sequences, int64 boundaries [documents + 1] among them.
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_STRETCHES = 1024  # of a .npy, at most
_BLOCK = 2**12  # tokens looked at in one go


@dataclass(frozen=True, eq=False)
class MegatronPiece:
    """tokens: [N]. lengths, pointers: of each sequence, in tokens and bytes. boundaries: int64 [documents + 1], the
    sequence with which each document begins, and their number. Documents are held out by their number."""

    name: str
    tokens: Array
    lengths: Array
    pointers: Array
    boundaries: Array
    mask: None = None

    @property
    def size(self) -> int:
        return self.tokens.size

    @property
    def groups(self) -> int:
        return self.boundaries.size - 1

    @property
    def documents(self) -> int:
        return self.boundaries.size - 1

    def read(self, first: int, last: int) -> NDArray[np.integer]:
        tokens: NDArray[np.integer] = self.tokens[first:last]
        return tokens

    def group_keys(self, first: int, last: int) -> NDArray[np.uint64]:
        return numbered_keys(first, last)

    def begins(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._begins(self.boundaries[groups])

    def borders(self, first: int, last: int) -> NDArray[np.int64]:
        width = self.tokens.dtype.itemsize
        pointers, boundaries = self.pointers[:], self.boundaries[:]
        low = bisect_left(pointers, first * width)
        high = bisect_left(pointers, last * width, low)
        # With the sequence before, and the one after, which the first and the last of these must meet.
        near = slice(max(low - 1, 0), high + 1)
        stops = pointers[near] + self.lengths[near].astype(np.int64) * width
        if not np.array_equal(stops[:-1], pointers[near][1:]):
            raise InputError(f"{self.name}: its sequences do not lie end to end; merge them anew")
        begin = bisect_left(boundaries, low)
        end = bisect_left(boundaries, high, begin)
        if (np.diff(boundaries[max(begin - 1, 0) : end + 2]) < 0).any():
            raise InputError(f"{self.name}: its document boundaries do not rise; make it anew")
        return self._begins(boundaries[begin:end])

    def where(self, token: int) -> str:
        sequence = bisect_right(self.pointers[:], token * self.tokens.dtype.itemsize) - 1
        return f"{self.name}, document {bisect_right(self.boundaries[:], sequence) - 1}"

    def _begins(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        past = sequences == self.pointers.size
        if ((sequences < 0) | (sequences > self.pointers.size)).any():
            raise InputError(f"{self.name}: its document boundaries name sequences that it has not; make it anew")
        if past.all():
            return np.full(sequences.shape, self.size)
        begins = self.pointers[np.where(past, 0, sequences)] // self.tokens.dtype.itemsize
        return np.where(past, self.size, begins)


def megatron_piece(name: str, index: Path) -> MegatronPiece:
    """Maps an .idx and the .bin beside it. What they say of each document is checked where it is read.

    Raises:
        InputError: either is missing, cut short, or not of this format.
    """
    data = index.with_suffix(".bin")
    for file in (index, data):
        if not file.is_file():
            raise InputError(f"{file}: missing; Megatron's format is a pair of .bin and .idx")
    with index.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise InputError(f"{index}: not an index of Megatron's format")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != 1 or code not in _TYPES:
        raise InputError(f"{index}: version {version}, type {code} of Megatron's format; known: version 1, {_TYPES}")
    has, needed = index.stat().st_size, _HEADER.size + sequences * 12 + boundaries * 8
    if has < needed:
        raise InputError(f"{index} is cut: it has {has} bytes of {needed}")
    lengths = MappedArray(index, np.dtype("<i4"), sequences, _HEADER.size)
    pointers = MappedArray(index, np.dtype("<i8"), sequences, _HEADER.size + sequences * 4)
    documents = MappedArray(index, np.dtype("<i8"), boundaries, _HEADER.size + sequences * 12)
    if not boundaries or documents[0] != 0 or documents[boundaries - 1] != sequences:
        raise InputError(f"{index}: its document boundaries are not those of {sequences} sequences")
    dtype = np.dtype(_TYPES[code])
    has, needed = data.stat().st_size // dtype.itemsize, 0
    if sequences:
        needed = int(pointers[sequences - 1]) // dtype.itemsize + int(lengths[sequences - 1])
    if has < needed:
        raise InputError(f"{data} is cut: it has {has} tokens of {needed}")
    return MegatronPiece(name, MappedArray(data, dtype, needed), lengths, pointers, documents)


@dataclass(frozen=True, eq=False)
class DelimitedPiece:
    """tokens: [N], in which each `end` ends a document. A group is the documents that begin in a stretch of tokens, so
    that only the borders of what is held out are looked for. A stretch is a power of two long, so that a file that
    grows keeps its stretches until it has doubled."""

    name: str
    tokens: Array
    end: int
    documents: None = None
    mask: None = None

    @property
    def size(self) -> int:
        return self.tokens.size

    @property
    def stretch(self) -> int:
        return max(1 << (self.size - 1).bit_length(), _STRETCHES) // _STRETCHES

    @property
    def groups(self) -> int:
        return -(-self.size // self.stretch)

    def read(self, first: int, last: int) -> NDArray[np.integer]:
        tokens: NDArray[np.integer] = self.tokens[first:last]
        return tokens

    def group_keys(self, first: int, last: int) -> NDArray[np.uint64]:
        return numbered_keys(first, last)

    def begins(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        begins = np.empty(groups.size, np.int64)
        begin = 0
        for number, group in enumerate(groups):
            stretch = min(int(group) * self.stretch, self.size)
            if stretch > begin:  # else the document before runs across it
                begin = self._next(stretch)
            begins[number] = begin
        return begins

    def borders(self, first: int, last: int) -> NDArray[np.int64]:
        before = max(first - 1, 0)
        after = np.flatnonzero(self.tokens[before : last - 1] == self.end) + before + 1
        return np.concatenate([np.zeros(int(first == 0), np.int64), after])

    def where(self, token: int) -> str:
        return f"{self.name}, token {token}"

    def _next(self, token: int) -> int:
        """Where the first document from a token on begins."""
        for first in range(token - 1, self.size, _BLOCK):
            found = self.tokens[first : first + _BLOCK] == self.end
            if found.any():
                return first + int(found.argmax()) + 1
        return self.size


def numpy_piece(name: str, path: Path, end: int) -> DelimitedPiece:
    """Maps a one-dimensional array of ids, in which each `end` ends a document.

    Raises:
        InputError: another array, or no array.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"{path}: no readable .npy ({error})") from error
    if not isinstance(tokens, np.memmap) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(f"{path}: must be a one-dimensional array of whole numbers")
    return DelimitedPiece(name, MappedArray(path, tokens.dtype, tokens.size, tokens.offset), end)
