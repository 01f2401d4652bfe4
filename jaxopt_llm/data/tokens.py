"""Documents as tokens: pieces in memory or in mapped files, and the streams that are laid through them."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.data.mapped import Array
from jaxopt_llm.data.source import Document
from jaxopt_llm.data.tokenizer import Tokenizer
from jaxopt_llm.errors import InputError

_BATCH_BYTES = 2**22  # of text, given to the tokenizer at once: it uses all cores
_BLOCK = 2**20  # groups whose keys are looked at in one go
_SAMPLES, _SAMPLE_BYTES = 64, 2**12


class Piece(Protocol):
    """Documents end to end, from one source. Nothing of it is held in memory for each document.

    size: tokens, delimiters included. groups: what is trained on, or held out, as a whole: its documents or, where
    only reading every token would tell these, stretches of documents. documents: their number, if it is known. mask:
    bool [size], whether the loss is to count each token as a target, in conversations; None: it counts all.
    """

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def documents(self) -> int | None: ...
    @property
    def mask(self) -> Array | None: ...

    def read(self, first: int, last: int) -> NDArray[np.integer]:
        """Returns tokens [first, last)."""

    def group_keys(self, first: int, last: int) -> NDArray[np.uint64]:
        """Returns a key for each of groups [first, last), evenly spread: those with a small one are held out."""

    def begins(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the token at which each group begins; the numbers do not fall, the one past the last is `size`."""

    def borders(self, first: int, last: int) -> NDArray[np.int64]:
        """Returns the tokens of [first, last) at which a document begins."""

    def where(self, token: int) -> str:
        """The place of a token, for a message."""


@dataclass(frozen=True, eq=False)
class IndexedPiece:
    """tokens: any integer type [N]. ends: int64 [documents], where each ends in `tokens`. keys: uint64 [documents]."""

    name: str
    tokens: Array
    ends: Array
    keys: Array
    mask: Array | None = None

    @property
    def size(self) -> int:
        return self.tokens.size

    @property
    def groups(self) -> int:
        return self.ends.size

    @property
    def documents(self) -> int:
        return self.ends.size

    def read(self, first: int, last: int) -> NDArray[np.integer]:
        tokens: NDArray[np.integer] = self.tokens[first:last]
        return tokens

    def group_keys(self, first: int, last: int) -> NDArray[np.uint64]:
        keys: NDArray[np.uint64] = self.keys[first:last]
        return keys

    def begins(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(groups > 0, self.ends[groups - 1], 0)

    def borders(self, first: int, last: int) -> NDArray[np.int64]:
        ends = self.ends[:]
        low, high = ends.searchsorted(first), ends.searchsorted(last)
        check_rising(ends[max(low - 1, 0) : high + 2], self.name)
        return np.concatenate([np.zeros(int(first == 0), np.int64), ends[low:high]])

    def where(self, token: int) -> str:
        return f"{self.name}, document {self.ends[:].searchsorted(token, side='right')}"


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Spans of pieces end to end, of which nothing is copied; each begins and ends with a document.

    starts: int64 [spans + 1], where each begins in the stream, and the stream's length. origins: int64 [spans], where
    each begins in the pieces end to end. documents: their number, if it is known; empty ones vanish, but count.
    """

    pieces: tuple[Piece, ...]
    starts: NDArray[np.int64]
    origins: NDArray[np.int64]
    documents: int | None
    _bounds: NDArray[np.int64] = field(init=False)  # [pieces + 1], of the pieces end to end

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bounds", _cumulative([piece.size for piece in self.pieces]))

    def __str__(self) -> str:
        known = "" if self.documents is None else f"{self.documents:,} documents, "
        return f"{known}{self.size:,} tokens"

    @property
    def size(self) -> int:
        return int(self.starts[-1])

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Returns stream positions [first, first + count)."""
        read = np.empty(count, np.int64)
        for at, piece, begin, end in self._parts(first, count):
            read[at - first : at - first + end - begin] = piece.read(begin, end)
        return read

    @property
    def masked(self) -> bool:
        """Whether there are conversations in it."""
        return any(piece.mask is not None for piece in self.pieces)

    def mask(self, first: int, count: int) -> NDArray[np.bool_]:
        """Returns of stream positions [first, first + count) whether the loss is to count them as targets."""
        mask = np.ones(count, bool)
        for at, piece, begin, end in self._parts(first, count):
            if piece.mask is not None:
                mask[at - first : at - first + end - begin] = piece.mask[begin:end]
        return mask

    def borders(self, first: int, count: int) -> NDArray[np.int64]:
        """Returns the positions of [first, first + count) at which a document begins."""
        parts = self._parts(first, count)
        return np.concatenate([piece.borders(begin, end) + (at - begin) for at, piece, begin, end in parts])

    def where(self, position: int) -> str:
        """The file and document of a position, for a message."""
        ((_, piece, token, _),) = self._parts(position, 1)
        return piece.where(token)

    def _parts(self, first: int, count: int) -> Iterator[tuple[int, Piece, int, int]]:
        """What stream positions [first, first + count) are: from which on, tokens [begin, end) of which piece."""
        at, span = first, int(self.starts.searchsorted(first, side="right")) - 1
        while at < first + count:
            origin = int(self.origins[span]) + at - int(self.starts[span])
            number = int(self._bounds.searchsorted(origin, side="right")) - 1
            begin = origin - int(self._bounds[number])
            take = min(first + count, int(self.starts[span + 1])) - at
            yield at, self.pieces[number], begin, begin + take
            at, span = at + take, span + 1


Runs = NDArray[np.int64]  # [n, 2]: groups [first, last) of a piece, rising


def join(pieces: Sequence[Piece], chosen: Sequence[Runs]) -> TokenStream:
    """The stream of the chosen runs of each piece, in order.

    Raises InputError where the index of a piece is damaged.
    """
    nothing = np.empty(0, np.int64)
    origins, lengths, documents = [nothing], [nothing], [0]
    bounds = _cumulative([piece.size for piece in pieces])
    for piece, runs, bound in zip(pieces, chosen, bounds, strict=False):
        edges = piece.begins(runs.ravel())
        check_rising(np.concatenate([[0], edges, [piece.size]]), piece.name)
        begins, ends = edges.reshape(-1, 2).T
        kept = ends > begins
        origins.append(bound + begins[kept])
        lengths.append((ends - begins)[kept])
        if piece.documents is not None:
            documents.append(int((runs[:, 1] - runs[:, 0]).sum()))
    known = all(piece.documents is not None for piece in pieces)
    starts = _cumulative(np.concatenate(lengths))
    return TokenStream(tuple(pieces), starts, np.concatenate(origins), sum(documents) if known else None)


def join_whole(pieces: Sequence[Piece]) -> TokenStream:
    return join(pieces, [_others(np.empty(0, np.int64), piece.groups) for piece in pieces])


def split(pieces: Sequence[Piece], share: float) -> tuple[list[Runs], list[Runs]]:
    """What trains and what is held out: the groups with a key in the lowest `share` of all. Each has one that is not
    empty, if there are two. Memory grows with the held-out alone.

    A larger share only adds documents, and adding documents moves none (but the one that a share too small for them
    held out).
    """
    held_out = [_below(piece, share) for piece in pieces]
    size = sum(piece.size for piece in pieces)

    def held_tokens() -> int:
        return sum(map(_tokens, pieces, map(_each, held_out)))

    if size and not held_tokens():
        number, group = _extreme(pieces, lowest=True)
        held_out[number] = np.union1d(held_out[number], [group])
    if size and held_tokens() == size:
        number, group = _extreme(pieces, lowest=False)
        held_out[number] = np.setdiff1d(held_out[number], [group])
    training = [_others(held, piece.groups) for piece, held in zip(pieces, held_out, strict=True)]
    return training, [_each(held) for held in held_out]


def _blocks(piece: Piece) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    for first in range(0, piece.groups, _BLOCK):
        yield first, piece.group_keys(first, min(first + _BLOCK, piece.groups))


def _below(piece: Piece, share: float) -> NDArray[np.int64]:
    found = [first + np.flatnonzero(keys.astype(np.float64) / 2**64 < share) for first, keys in _blocks(piece)]
    return np.concatenate([np.empty(0, np.int64), *found])


def _extreme(pieces: Sequence[Piece], lowest: bool) -> tuple[int, int]:
    """Piece and number of the group with the lowest or the highest key, of those that are not empty if there is one."""
    best = (True, 2**64, 0, 0)
    for number, piece in enumerate(pieces):
        for first, keys in _blocks(piece):
            empty = np.diff(piece.begins(np.arange(first, first + keys.size + 1))) == 0
            ranks = keys if lowest else ~keys
            at = int(np.lexsort([ranks, empty])[0])
            best = min(best, (bool(empty[at]), int(ranks[at]), number, first + at))
    return best[2:]


def _each(groups: NDArray[np.int64]) -> Runs:
    return np.stack([groups, groups + 1], axis=1)


def _others(groups: NDArray[np.int64], count: int) -> Runs:
    """The runs between some of `count` groups."""
    runs = np.stack([np.append(0, groups + 1), np.append(groups, count)], axis=1)
    return runs[runs[:, 0] < runs[:, 1]]


def _tokens(piece: Piece, runs: Runs) -> int:
    begins, ends = piece.begins(runs.ravel()).reshape(-1, 2).T
    return int((ends - begins).sum())


def tokenize(name: str, documents: Iterable[Document], tokenizer: Tokenizer) -> IndexedPiece:
    """The documents in memory."""
    batches = list(tokenized(documents, tokenizer))
    if not batches:
        none = np.empty(0, token_dtype(tokenizer.vocabulary_size)), np.empty(0, np.int64), np.empty(0, np.uint64)
        return IndexedPiece(name, *none)
    tokens, lengths, keys, *mask = map(np.concatenate, zip(*batches, strict=True))
    return IndexedPiece(name, tokens, np.cumsum(lengths), keys, *mask)


def tokenized(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[NDArray[Any], ...]]:
    """Each document as beginning, its tokens, end; in the narrowest type that the vocabulary fits. A conversation has
    the delimiters that its template writes. Yields tokens [N], int64 lengths [documents] and uint64 keys [documents] of
    a few megabytes of text at a time, and of conversations their mask, bool [N]."""
    dtype = token_dtype(tokenizer.vocabulary_size)
    beginning = [] if tokenizer.beginning is None else [tokenizer.beginning]
    for batch in _batches(documents):
        texts = [each.content for each in batch]
        mask: tuple[NDArray[np.bool_], ...] = ()
        if batch[0].spans is None:
            encoded = tokenizer.encode(texts)
            arrays = [each for ids in encoded for each in (beginning, ids, [tokenizer.end])]
            tokens = np.concatenate(arrays, dtype=dtype, casting="unsafe")
            lengths = np.array([len(beginning) + ids.size + 1 for ids in encoded], np.int64)
        else:
            encoded, begins = zip(*tokenizer.encode_placed(texts), strict=True)
            tokens = np.concatenate(encoded, dtype=dtype, casting="unsafe")
            lengths = np.array([ids.size for ids in encoded], np.int64)
            mask = (np.concatenate([within(at, each.spans or ()) for at, each in zip(begins, batch, strict=True)]),)
        keys = [int.from_bytes(hashlib.sha256(each.key).digest()[:8], "big") for each in batch]
        yield tokens, lengths, np.array(keys, np.uint64), *mask


def within(places: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Whether each place is in one of the spans [begin, end), which rise."""
    return np.array(spans, np.int64).ravel().searchsorted(places, side="right") % 2 == 1


def token_dtype(vocabulary_size: int) -> np.dtype[np.integer]:
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


def numbered_keys(first: int, last: int) -> NDArray[np.uint64]:
    """Keys of what is known by its number alone (splitmix64, Steele et al. 2014)."""
    z = np.arange(first + 1, last + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def check_rising(ends: NDArray[np.int64], name: str) -> None:
    if (ends[1:] < ends[:-1]).any():
        raise InputError(
            f"{name}: its index is damaged, documents end before they begin; bring the file back or make it anew "
            "(jaxopt_llm.prepare --verify reads a prepared corpus whole)"
        )


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
