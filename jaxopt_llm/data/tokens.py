"""Documents as tokens: pieces of arrays or memory-mapped files, and the streams that are laid through them."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.data.source import Document
from jaxopt_llm.data.tokenizer import Tokenizer

_BATCH_BYTES = 2**22  # of text, given to the tokenizer at once: it uses all cores
_SAMPLES, _SAMPLE_BYTES = 64, 2**12


@dataclass(frozen=True, eq=False)
class Piece:
    """Documents end to end, in memory or in a mapped file.

    tokens: any integer type [N], delimiters included. ends: int64 [documents], where each ends in `tokens`.
    keys: uint64 [documents], evenly spread: a document is held out if its key is small.
    """

    name: str
    tokens: NDArray[np.integer]
    ends: NDArray[np.int64]
    keys: NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents of pieces, end to end, of which nothing is copied. `starts`: int64 [documents + 1], where each begins
    in the stream, and the stream's length; `origins`: int64 [documents], where each begins in the pieces end to end."""

    pieces: tuple[Piece, ...]
    starts: NDArray[np.int64]
    origins: NDArray[np.int64]
    _bounds: NDArray[np.int64] = field(init=False)  # [pieces + 1], of the pieces end to end
    # Runs of documents that follow on each other in one piece: where each begins in the stream, and in the pieces.
    _span_starts: NDArray[np.int64] = field(init=False)
    _span_origins: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        bounds = _cumulative([piece.tokens.size for piece in self.pieces])
        follows = self.origins[1:] == self.origins[:-1] + np.diff(self.starts)[:-1]
        follows &= ~np.isin(self.origins[1:], bounds)
        object.__setattr__(self, "_bounds", bounds)
        first = np.flatnonzero(np.concatenate([[True], ~follows])[: self.documents])
        object.__setattr__(self, "_span_starts", self.starts[np.append(first, self.documents)])
        object.__setattr__(self, "_span_origins", self.origins[first])

    @property
    def size(self) -> int:
        return int(self.starts[-1])

    @property
    def documents(self) -> int:
        return self.origins.size

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Returns stream positions [first, first + count)."""
        read = np.empty(count, np.int64)
        done, span = 0, int(np.searchsorted(self._span_starts, first, side="right")) - 1
        while done < count:
            into = first + done - int(self._span_starts[span])
            take = min(count - done, int(self._span_starts[span + 1] - self._span_starts[span]) - into)
            piece, offset = self._locate(int(self._span_origins[span]) + into)
            read[done : done + take] = piece.tokens[offset : offset + take]
            done, span = done + take, span + 1
        return read

    def documents_of(self, first: int, count: int) -> NDArray[np.int64]:
        """Returns the number of the document at each of stream positions [first, first + count)."""
        low, high = np.searchsorted(self.starts, [first, first + count - 1], side="right") - 1
        at = np.arange(first, first + count)
        return low - 1 + np.searchsorted(self.starts[low : high + 1], at, side="right")

    def where(self, document: int) -> str:
        """The file of a document and its number there, for a message."""
        origin = int(self.origins[document])
        piece, offset = self._locate(origin)
        return f"{piece.name}, document {int(np.searchsorted(piece.ends, offset, side='right'))}"

    def _locate(self, origin: int) -> tuple[Piece, int]:
        number = int(np.searchsorted(self._bounds, origin, side="right")) - 1
        return self.pieces[number], origin - int(self._bounds[number])


def join(pieces: Sequence[Piece], chosen: Sequence[NDArray[np.bool_]]) -> TokenStream:
    """The stream of the chosen documents, [documents] of each piece, in order; empty ones vanish."""
    bounds = _cumulative([piece.tokens.size for piece in pieces])
    nothing = np.empty(0, np.int64)
    origins, lengths = [nothing], [nothing]
    for piece, chosen_here, bound in zip(pieces, chosen, bounds, strict=False):
        begins = np.concatenate([[0], piece.ends])[:-1]
        kept = chosen_here & (piece.ends > begins)
        origins.append(bound + begins[kept])
        lengths.append((piece.ends - begins)[kept])
    return TokenStream(tuple(pieces), _cumulative(np.concatenate(lengths)), np.concatenate(origins))


def split(pieces: Sequence[Piece], share: float) -> tuple[list[NDArray[np.bool_]], list[NDArray[np.bool_]]]:
    """Which documents train and which are held out: those with a key in the lowest `share` of all. Each has one.

    A larger share only adds documents, and adding documents moves none (but the one that a share too small for them
    held out).
    """
    keys = np.concatenate([np.empty(0, np.uint64), *(piece.keys for piece in pieces)])
    below = keys.astype(np.float64) / 2**64 < share
    if keys.size and not below.any():
        below[keys.argmin()] = True
    if keys.size and below.all():
        below[keys.argmax()] = False
    cuts = np.cumsum([piece.keys.size for piece in pieces])[:-1]
    held_out = np.split(below, cuts)
    return [~each for each in held_out], held_out


def tokenize(name: str, documents: Iterable[Document], tokenizer: Tokenizer) -> Piece:
    """Each document as beginning, its tokens, end; in the narrowest type that the vocabulary fits."""
    dtype = token_dtype(tokenizer.vocabulary_size)
    beginning = np.array([] if tokenizer.beginning is None else [tokenizer.beginning], dtype)
    end = np.array([tokenizer.end], dtype)
    arrays: list[NDArray[np.integer]] = []
    keys: list[int] = []
    for batch in _batches(documents):
        for document, ids in zip(batch, tokenizer.encode([each.content for each in batch]), strict=True):
            arrays.append(np.concatenate([beginning, ids.astype(dtype), end]))
            keys.append(int.from_bytes(hashlib.sha256(document.key).digest()[:8], "big"))
    tokens = np.concatenate([np.empty(0, dtype), *arrays])
    ends = np.cumsum([array.size for array in arrays], dtype=np.int64)
    return Piece(name, tokens, ends, np.array(keys, np.uint64))


def token_dtype(vocabulary_size: int) -> np.dtype[np.integer]:
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


def numbered_keys(count: int) -> NDArray[np.uint64]:
    """Keys of documents that are known by their number alone (splitmix64, Steele et al. 2014)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fingerprint(path: Path) -> str:
    """A hash of a file's size and of blocks spread over it: affordable for any size, whole for a small one."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for sample in range(_SAMPLES):
                file.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _cumulative(sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
