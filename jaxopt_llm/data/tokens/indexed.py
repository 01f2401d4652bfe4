"""Token files of other programs: Megatron's .bin/.idx pairs and NumPy's .npy files."""

import struct
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from jaxopt_llm.core.errors import InputError, one_line
from jaxopt_llm.core.files import check_is_regular
from jaxopt_llm.data.tokens.pieces import Array, FileArray, Piece

# Index of Megatron-LM's IndexedDataset: magic, version, dtype code, number of sequences, number of document boundaries;
# then the int32 length and the int64 byte offset of each sequence, and the int64 boundaries [documents + 1], which are
# indices of sequences.
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MAX_CHUNKS = 1024  # of a .npy file
_BLOCK = 2**12  # tokens searched at once


@dataclass(frozen=True, eq=False)
class MegatronPiece(Piece):
    """Documents of a Megatron .bin/.idx pair. The held-out key of a document depends on its index.

    Attributes:
        lengths: length of each sequence in tokens.
        pointers: start of each sequence in bytes.
        boundaries: int64 [documents + 1], the first sequence of each document, then the number of sequences.
    """

    lengths: Array
    pointers: Array
    boundaries: Array

    @property
    def groups(self) -> int:
        return self.boundaries.size - 1

    def group_starts(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._sequence_starts(self.boundaries[groups])

    def document_starts(self, first: int, last: int) -> NDArray[np.int64]:
        width = self.tokens.dtype.itemsize
        pointers, boundaries = self.pointers, self.boundaries
        low = bisect_left(pointers, first * width)
        high = bisect_left(pointers, last * width, low)
        # Includes the sequences before and after, whose bounds must match those of the first and the last one.
        near = slice(max(low - 1, 0), high + 1)
        stops = pointers[near] + self.lengths[near].astype(np.int64) * width
        if not np.array_equal(stops[:-1], pointers[near][1:]):
            raise InputError(f"{self.name}: the sequences are not contiguous; create the file again")
        begin = bisect_left(boundaries, low)
        end = bisect_left(boundaries, high, begin)
        if (np.diff(boundaries[max(begin - 1, 0) : end + 2]) < 0).any():
            raise InputError(f"{self.name}: the document boundaries are not in increasing order; create the file again")
        return self._sequence_starts(boundaries[begin:end])

    def describe_position(self, token: int) -> str:
        sequence = bisect_right(self.pointers, token * self.tokens.dtype.itemsize) - 1
        return f"{self.name}, document {bisect_right(self.boundaries, sequence) - 1}"

    def _sequence_starts(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        is_end = sequences == self.pointers.size
        if ((sequences < 0) | (sequences > self.pointers.size)).any():
            raise InputError(f"{self.name}: document boundaries refer to sequences that do not exist; create it again")
        if is_end.all():
            return np.full(sequences.shape, self.size)
        starts = self.pointers[np.where(is_end, 0, sequences)] // self.tokens.dtype.itemsize
        return np.where(is_end, self.size, starts)


def open_megatron(name: str, index: Path) -> MegatronPiece:
    """Open an .idx file and its .bin file. The entries of a document are checked when the document is read.

    Raises:
        InputError: a file is missing, truncated, or not in this format.
    """
    data = index.with_suffix(".bin")
    for file in (index, data):
        if not file.is_file():
            raise InputError(f"{file}: the file is missing; Megatron's format needs a .bin and an .idx file")
    with index.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise InputError(f"{index}: not an index in Megatron's format; name a .bin/.idx pair of Megatron-LM")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != 1 or code not in _TYPES:
        raise InputError(
            f"{index}: version {version} with dtype code {code} is unsupported; use version 1 and one of {_TYPES}"
        )
    size, needed = index.stat().st_size, _HEADER.size + sequences * 12 + boundaries * 8
    if size < needed:
        raise InputError(f"{index} is truncated: it has {size} bytes of {needed}; restore it")
    lengths = FileArray(index, np.dtype("<i4"), sequences, _HEADER.size)
    pointers = FileArray(index, np.dtype("<i8"), sequences, _HEADER.size + sequences * 4)
    documents = FileArray(index, np.dtype("<i8"), boundaries, _HEADER.size + sequences * 12)
    if not boundaries or documents[0] != 0 or documents[boundaries - 1] != sequences:
        raise InputError(f"{index}: the document boundaries do not cover {sequences} sequences; create the file again")
    dtype = np.dtype(_TYPES[code])
    size, needed = data.stat().st_size // dtype.itemsize, 0
    if sequences:
        needed = int(pointers[sequences - 1]) // dtype.itemsize + int(lengths[sequences - 1])
    if size < needed:
        raise InputError(f"{data} is truncated: it has {size} tokens of {needed}; restore it")
    return MegatronPiece(name, FileArray(data, dtype, needed), lengths, pointers, documents)


@dataclass(frozen=True, eq=False)
class DelimitedPiece(Piece):
    """Documents of a .npy file, each of which ends with an EOS token.

    A group contains the documents that start in one chunk of the tokens, so opening the file only searches for the
    boundaries of held-out groups. The length of a chunk is a power of two, so that a growing file keeps its chunks
    until its size has doubled.

    Attributes:
        eos: id of the EOS token.
    """

    eos: int
    documents = None

    @property
    def chunk_size(self) -> int:
        """Length of a chunk in tokens."""
        return max(1 << (self.size - 1).bit_length(), _MAX_CHUNKS) // _MAX_CHUNKS

    @property
    def groups(self) -> int:
        return -(-self.size // self.chunk_size)

    def group_starts(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = np.empty(groups.size, np.int64)
        start = 0
        for i, group in enumerate(groups):
            chunk = min(int(group) * self.chunk_size, self.size)
            if chunk > start:  # otherwise the previous document extends beyond the start of the chunk
                start = self._find_document_start(chunk)
            starts[i] = start
        return starts

    def document_starts(self, first: int, last: int) -> NDArray[np.int64]:
        before = max(first - 1, 0)
        after = np.flatnonzero(self.tokens[before : last - 1] == self.eos) + before + 1
        return np.concatenate([np.zeros(int(first == 0), np.int64), after])

    def describe_position(self, token: int) -> str:
        return f"{self.name}, token {token}"

    def _find_document_start(self, token: int) -> int:
        """Return the start of the first document at or after `token`."""
        for first in range(token - 1, self.size, _BLOCK):
            is_eos = self.tokens[first : first + _BLOCK] == self.eos
            if is_eos.any():
                return first + int(is_eos.argmax()) + 1
        return self.size


def open_numpy(name: str, path: Path, eos: int) -> DelimitedPiece:
    """Open a one-dimensional array of ids, in which each document ends with `eos`.

    Raises:
        InputError: the file is not such an array.
    """
    try:
        check_is_regular(path)
        with path.open("rb") as stream:
            version = npy.read_magic(stream)
            shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(stream)
            offset = stream.tell()
    except (ValueError, EOFError, SyntaxError, RecursionError, MemoryError, TokenError) as error:
        raise InputError(f"{path}: not a readable .npy file ({one_line(error)}); create it with numpy.save") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise InputError(f"{path}: must be a one-dimensional array of integers; save the token ids as one")
    has, needed = path.stat().st_size, offset + shape[0] * dtype.itemsize
    if shape[0] < 0 or has < needed:
        raise InputError(f"{path} is truncated: it has {has} bytes of {needed}; restore it")
    return DelimitedPiece(name, FileArray(path, dtype, shape[0], offset), eos)
