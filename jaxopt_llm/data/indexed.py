"""Token files of other programs, memory-mapped: Megatron's .bin/.idx pair, and NumPy's .npy."""

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.data.tokens import Piece, numbered_keys
from jaxopt_llm.errors import InputError

# Megatron-LM's IndexedDataset: magic, version, code of the token type, number of sequences, number of document
# boundaries; then int32 lengths, int64 byte offsets of the sequences, int64 boundaries [documents + 1] among them.
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_BLOCK = 2**24  # tokens looked at in one go


def megatron_piece(name: str, index: Path) -> Piece:
    """Reads an .idx and maps the .bin beside it. Documents are held out by their number.

    Raises:
        InputError: either is missing, cut short, or not of this format.
    """
    data = index.with_suffix(".bin")
    for file in (index, data):
        if not file.is_file():
            raise InputError(f"{file}: missing; Megatron's format is a pair of .bin and .idx")
    content = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.empty(0, np.uint8)
    header = bytes(content[: _HEADER.size])
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise InputError(f"{index}: not an index of Megatron's format")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != 1 or code not in _TYPES:
        raise InputError(f"{index}: version {version}, type {code} of Megatron's format; known: version 1, {_TYPES}")
    needed = _HEADER.size + sequences * 12 + boundaries * 8
    if content.size < needed:
        raise InputError(f"{index} is cut: it has {content.size} bytes of {needed}")

    def array(dtype: str, count: int, first: int) -> NDArray[np.integer]:
        return np.frombuffer(content, dtype, count, first)

    lengths = array("<i4", sequences, _HEADER.size)
    pointers = array("<i8", sequences, _HEADER.size + sequences * 4)
    documents = array("<i8", boundaries, _HEADER.size + sequences * 12)
    tokens = _mapped(data, np.dtype(_TYPES[code]))
    stops = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if not np.array_equal(pointers, stops[:-1] * tokens.itemsize):
        raise InputError(f"{index}: its sequences do not lie end to end in {data.name}; merge them anew")
    if stops[-1] > tokens.size:
        raise InputError(f"{data} is cut: it has {tokens.size} tokens of {stops[-1]}")
    if not boundaries or documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise InputError(f"{index}: its document boundaries are not those of {sequences} sequences")
    ends = stops[documents[1:]]
    return Piece(name, tokens[: stops[-1]], ends, numbered_keys(ends.size))


def numpy_piece(name: str, path: Path, end: int) -> Piece:
    """Maps a one-dimensional array of ids, in which each `end` ends a document. Reads it once, to find them.

    Raises:
        InputError: another array, or no array.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"{path}: no readable .npy ({error})") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(f"{path}: must be a one-dimensional array of whole numbers")
    found = [np.flatnonzero(tokens[at : at + _BLOCK] == end) + at + 1 for at in range(0, tokens.size, _BLOCK)]
    ends = np.concatenate([np.empty(0, np.int64), *found])
    if tokens.size and (not ends.size or ends[-1] != tokens.size):
        ends = np.append(ends, tokens.size)
    return Piece(name, tokens, ends, numbered_keys(ends.size))


def _mapped(path: Path, dtype: np.dtype[np.integer]) -> NDArray[np.integer]:
    count = path.stat().st_size // dtype.itemsize
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)  # an empty file maps to nothing
