"""Tokenized documents: pieces in memory or in files, and token streams over them."""

import functools
import hashlib
import os
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.config.data import PREFERENCE, Pairs
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.files import check_is_regular
from jaxopt_llm.core.pulse import UNWATCHED, Pulse
from jaxopt_llm.data.reading.source import Document
from jaxopt_llm.data.tokens.tokenizer import Tokenizer

# --- Arrays in files, read piece by piece
#
# They are not memory-mapped: a process that reads a mapped page of a file that has been truncated, or whose disk fails,
# ends with SIGBUS. A read that fails is an error that names the file.


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


# --- Pieces


_BATCH_BYTES = 2**22  # text per call of the tokenizer, which uses all cores
_KEYS = 2**20  # groups whose keys are read at once
_SAMPLES, _SAMPLE_BYTES = 64, 2**12  # samples of a large file that its fingerprint covers


@dataclass(frozen=True, eq=False)
class StoredLogProbabilities:
    """Log-probabilities of documents, or of their tokens, by another model.

    A reference, with which objectives compare, has one for each document: the sum over the tokens that the loss counts.
    A teacher has its most likely tokens in the place of each target of the loss. The targets are in order. The first
    token of a document is no target.

    Attributes:
        model: name of the model, for messages.
        sha256: digest of its weights.
        limit: length of the longest documents that it has read as a whole; 0: all. A reference says nothing of longer
            ones.
        values: of a reference, float32 [documents]; of a teacher, records of `prepared.teacher_dtype`.
        ends: of a teacher, int64 [documents], the end of each document in the values.
        vocabulary_size: of a teacher, number of its tokens.
    """

    model: str
    sha256: str
    limit: int
    values: Array
    ends: Array | None = None
    vocabulary_size: int = 0

    @property
    def top_k(self) -> int:
        """Number of tokens, K, of each place; 0 of a reference."""
        return 0 if self.ends is None else int(self.values.dtype["ids"].shape[0])


@dataclass(frozen=True, eq=False)
class Piece(ABC):
    """Concatenated documents of one file or of a part of it: the base class of all formats.

    A piece needs no memory per document.

    Attributes:
        name: name of the file, for messages.
        tokens: any integer dtype, [N], including BOS and EOS.
        size: N.
        groups: number of groups. A group is held out, or trained on, as a whole. It is one document; for formats
            without an index, where finding every document would mean reading every token, it is a chunk of documents.
        documents: number of documents, or None if it is not known.
        mask: bool [size], whether the loss counts each token as a target (conversations); None if it counts all.
        pairs: kind of the pairs that the documents are, in order; empty if they are none. No document of a pair is
            empty.
        reference: log-probabilities of the documents by a reference model; None if there are none.
        labels: float32 [documents], the label of each document; None without labels.
        rows: the row of each document, a prompt, as JSON; None for other documents.
        teacher: what a teacher says of the tokens; None without one.
    """

    name: str
    tokens: Array
    _: KW_ONLY
    mask: Array | None = None
    pairs: Pairs = ""
    reference: StoredLogProbabilities | None = None
    labels: Array | None = None
    rows: Sequence[bytes] | None = None
    teacher: StoredLogProbabilities | None = None

    @property
    def size(self) -> int:
        return self.tokens.size

    @property
    @abstractmethod
    def groups(self) -> int: ...

    @property
    def documents(self) -> int | None:
        return self.groups

    def group_keys(self, first: int, last: int) -> NDArray[np.uint64]:
        """Return a uniformly distributed key for each of groups [first, last). Small keys are held out."""
        return hash_indices(first, last)

    @abstractmethod
    def group_starts(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the first token of each group.

        The starts are non-decreasing. The start of group `self.groups` (one past the last) is `size`.
        """

    @abstractmethod
    def document_starts(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the indices in [first, last) at which a document starts."""

    @abstractmethod
    def describe_position(self, token: int) -> str:
        """Return the file and document of a token, for an error message."""


@dataclass(frozen=True, eq=False)
class IndexedPiece(Piece):
    """Documents with an index: the position where each ends.

    Attributes:
        ends: int64 [documents], the end of each document in `tokens`.
        keys: uint64 [documents], the held-out key of each document.
    """

    ends: Array
    keys: Array

    @property
    def groups(self) -> int:
        return self.ends.size

    def group_keys(self, first: int, last: int) -> NDArray[np.uint64]:
        return np.asarray(self.keys[first:last])

    def group_starts(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(groups > 0, self.ends[groups - 1], 0)

    def document_starts(self, first: int, last: int) -> NDArray[np.int64]:
        ends = self.ends
        low, high = (int(ends.searchsorted(token)) for token in (first, last))
        check_non_decreasing(ends[max(low - 1, 0) : high + 2], self.name)
        return np.concatenate([np.zeros(int(first == 0), np.int64), ends[low:high]])

    def describe_position(self, token: int) -> str:
        return f"{self.name}, document {self.ends.searchsorted(token, side='right')}"

    def read_teacher(self, begin: int, end: int) -> NDArray[np.void]:
        """Return what the teacher says of tokens [begin, end), where it says something."""
        assert self.teacher is not None
        found: NDArray[np.void] = self.teacher.values[self._count_taught(begin) : self._count_taught(end)]
        return found

    def _count_taught(self, token: int) -> int:
        """Return the number of tokens before this one of which the teacher says something."""
        assert self.teacher is not None and self.teacher.ends is not None
        document = int(self.ends.searchsorted(token, side="right"))
        start, count = (int(ends[document - 1]) if document else 0 for ends in (self.ends, self.teacher.ends))
        if token <= start + 1:
            return count
        after = token - start - 1 if self.mask is None else int(np.count_nonzero(self.mask[start + 1 : token]))
        return count + after


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Concatenation of spans of pieces, without a copy. Each span starts and ends at a document boundary.

    Attributes:
        starts: int64 [spans + 1], the start of each span in the stream, then the length of the stream.
        origins: int64 [spans], the start of each span in the concatenation of all pieces.
        documents: number of documents, or None if it is not known. Empty documents have no tokens, but count.
        pairs: kind of the pairs that the documents are; see `Piece`.
    """

    pieces: tuple[Piece, ...]
    starts: NDArray[np.int64]
    origins: NDArray[np.int64]
    documents: int | None
    pairs: Pairs = field(init=False)
    _bounds: NDArray[np.int64] = field(init=False)  # [pieces + 1]: as `starts`, for the pieces in their concatenation

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", next((piece.pairs for piece in self.pieces if piece.pairs), ""))
        object.__setattr__(self, "_bounds", _cumulative([piece.size for piece in self.pieces]))

    def __str__(self) -> str:
        known = "" if self.documents is None else f"{self.documents:,} documents, "
        return f"{known}{self.size:,} tokens"

    @property
    def size(self) -> int:
        return int(self.starts[-1])

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the tokens at positions [first, first + count), int64 [count]."""
        return self._fill(np.empty(count, np.int64), first, "tokens")

    def read_mask(self, first: int, count: int) -> NDArray[np.bool_]:
        """Return whether the loss counts each of positions [first, first + count) as a target, bool [count]."""
        return self._fill(np.ones(count, bool), first, "mask")

    def _fill(self, out: NDArray[Any], first: int, name: str) -> NDArray[Any]:
        """Write an array of the pieces from a position on into `out`, where they have one."""
        for position, piece, begin, end in self._slices(first, out.size):
            if (source := getattr(piece, name)) is not None:
                out[position - first : position - first + end - begin] = source[begin:end]
        return out

    def holds(self, name: str) -> bool:
        """Return whether some pieces have a `mask`, `labels`, a `reference` or a `teacher`."""
        return any(getattr(piece, name) is not None for piece in self.pieces)

    def without(self, *names: str) -> "TokenStream":
        """Return the same documents without their `reference` or `teacher`."""
        nothing: dict[str, Any] = dict.fromkeys(names)
        return replace(self, pieces=tuple(replace(piece, **nothing) for piece in self.pieces))

    def read_teacher(self, first: int, count: int) -> NDArray[np.void]:
        """Return what the teacher says of positions [first, first + count), where it says something."""
        found = []
        for _, piece, begin, end in self._slices(first, count):
            assert isinstance(piece, IndexedPiece)
            found.append(piece.read_teacher(begin, end))
        return np.concatenate(found)

    def read_reference(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the log-probabilities of the documents that start at these positions, float32 [N]."""
        found = np.empty(positions.size, np.float32)
        for index, position in enumerate(positions.tolist()):
            piece, document = self._find_document(position)
            assert piece.reference is not None
            found[index] = piece.reference.values[document]
        return found

    def read_prompts(self) -> Iterator[tuple[NDArray[np.int64], bytes]]:
        """Yield the tokens of each document, a prompt, and its row."""
        for _, piece, begin, end in self._slices(0, self.size):
            assert isinstance(piece, IndexedPiece) and piece.rows is not None
            first, last = (int(piece.ends.searchsorted(at, side="right")) for at in (begin, end))
            for document in range(first, last):
                at = int(piece.ends[document - 1]) if document else 0
                yield piece.tokens[at : int(piece.ends[document])].astype(np.int64), piece.rows[document]

    def find_label(self, is_wrong: Callable[[NDArray[np.float32]], NDArray[np.bool_]]) -> tuple[str, float] | None:
        """Return the file and document of the first label that is wrong, and the label; None if there is none.

        is_wrong: labels of documents -> whether each is wrong.
        """
        for piece in self.pieces:
            labels = np.empty(0, np.float32) if piece.labels is None else np.asarray(piece.labels[:])
            if wrong := np.flatnonzero(is_wrong(labels)).tolist():
                return f"{piece.name}, document {wrong[0]}", float(labels[wrong[0]])
        return None

    def read_label(self, position: int) -> float:
        """Return the label of the document at a position."""
        piece, document = self._find_document(position)
        assert piece.labels is not None
        return float(piece.labels[document])

    def _find_document(self, position: int) -> tuple[IndexedPiece, int]:
        """Return the piece at a position, which has an index, and the document there by its number in the piece."""
        ((_, piece, token, _),) = self._slices(position, 1)
        assert isinstance(piece, IndexedPiece)
        return piece, int(piece.ends.searchsorted(token, side="right"))

    def document_starts(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the positions in [first, first + count) at which a document starts."""
        slices = self._slices(first, count)
        found = [piece.document_starts(begin, end) + (position - begin) for position, piece, begin, end in slices]
        return np.concatenate([np.empty(0, np.int64), *found])

    def describe_position(self, position: int) -> str:
        """Return the file and document of a position, for an error message."""
        ((_, piece, token, _),) = self._slices(position, 1)
        return piece.describe_position(token)

    def _slices(self, first: int, count: int) -> Iterator[tuple[int, Piece, int, int]]:
        """Yield (position, piece, begin, end): tokens [begin, end) of the piece are at `position` of the stream.

        Together the slices cover positions [first, first + count).
        """
        position, span = first, int(self.starts.searchsorted(first, side="right")) - 1
        while position < first + count:
            origin = int(self.origins[span]) + position - int(self.starts[span])
            index = int(self._bounds.searchsorted(origin, side="right")) - 1
            begin = origin - int(self._bounds[index])
            size = min(first + count, int(self.starts[span + 1])) - position
            yield position, self.pieces[index], begin, begin + size
            position, span = position + size, span + 1


GroupRanges = NDArray[np.int64]  # [N, 2]: ranges [first, last) of groups of a piece, in increasing order


def join_ranges(pieces: Sequence[Piece], ranges: Sequence[GroupRanges]) -> TokenStream:
    """Return the stream of some groups of each piece, in order.

    Raises InputError if the index of a piece is damaged.
    """
    nothing = np.empty(0, np.int64)
    origins, lengths, documents = [nothing], [nothing], 0
    bounds = _cumulative([piece.size for piece in pieces])
    for piece, of_piece, bound in zip(pieces, ranges, bounds, strict=False):
        edges = piece.group_starts(of_piece.ravel())
        check_non_decreasing(np.concatenate([[0], edges, [piece.size]]), piece.name)
        begins, ends = edges.reshape(-1, 2).T
        nonempty = ends > begins
        origins.append(bound + begins[nonempty])
        lengths.append((ends - begins)[nonempty])
        documents += int((of_piece[:, 1] - of_piece[:, 0]).sum())
    known = all(piece.documents is not None for piece in pieces)
    starts = _cumulative(np.concatenate(lengths))
    return TokenStream(tuple(pieces), starts, np.concatenate(origins), documents if known else None)


def join_all(pieces: Sequence[Piece]) -> TokenStream:
    """Return the stream of all documents of the pieces, in order."""
    return join_ranges(pieces, [_complement(np.empty(0, np.int64), piece.groups) for piece in pieces])


def split_held_out(pieces: Sequence[Piece], share: float) -> tuple[list[GroupRanges], list[GroupRanges]]:
    """Split the groups of each piece into training and held-out ranges.

    Groups with a key in the lowest `share` of all keys are held out. Consecutive groups with the same key, such as the
    documents of one conversation, stay in one split. If at least two such runs of groups are not empty, each split gets
    one. Memory grows only with the number of held-out groups.

    A larger share only adds held-out documents. New documents do not move existing ones to the other split, except the
    one run that was held out because the share was too small to hold out any.
    """
    held_out = [_groups_below(piece, share) for piece in pieces]
    size = sum(piece.size for piece in pieces)

    def count_held_out() -> int:
        return sum(map(_count_tokens, pieces, map(_single_ranges, held_out)))

    if size and not count_held_out():
        index, groups = _find_extreme_groups(pieces, lowest=True)
        held_out[index] = np.union1d(held_out[index], groups)
    if size and count_held_out() == size:
        index, groups = _find_extreme_groups(pieces, lowest=False)
        held_out[index] = np.setdiff1d(held_out[index], groups)
    training = [_complement(groups, piece.groups) for piece, groups in zip(pieces, held_out, strict=True)]
    return training, [_single_ranges(groups) for groups in held_out]


def _key_blocks(piece: Piece) -> Iterator[tuple[int, NDArray[np.uint64]]]:
    for first in range(0, piece.groups, _KEYS):
        yield first, piece.group_keys(first, min(first + _KEYS, piece.groups))


def _groups_below(piece: Piece, share: float) -> NDArray[np.int64]:
    found = [first + np.flatnonzero(keys.astype(np.float64) / 2**64 < share) for first, keys in _key_blocks(piece)]
    return np.concatenate([np.empty(0, np.int64), *found])


def _find_extreme_groups(pieces: Sequence[Piece], lowest: bool) -> tuple[int, NDArray[np.int64]]:
    """Return the index of a piece, and its consecutive groups with the lowest or highest key of all.

    Empty groups count only if there are no others.
    """
    best = (True, 2**64, 0, 0)
    for index, piece in enumerate(pieces):
        for first, keys in _key_blocks(piece):
            empty = np.diff(piece.group_starts(np.arange(first, first + keys.size + 1))) == 0
            ranks = keys if lowest else ~keys
            at = int(np.lexsort([ranks, empty])[0])
            best = min(best, (bool(empty[at]), int(ranks[at]), index, first + at))
    index, group = best[2:]  # the first one with this key
    piece, end = pieces[index], group + 1
    while end < piece.groups and (piece.group_keys(end, end + 1) == piece.group_keys(group, group + 1)).all():
        end += 1
    return index, np.arange(group, end)


def _single_ranges(groups: NDArray[np.int64]) -> GroupRanges:
    return np.stack([groups, groups + 1], axis=1)


def _complement(groups: NDArray[np.int64], count: int) -> GroupRanges:
    """Return the ranges of the groups in [0, count) that are not in `groups`, which is sorted."""
    ranges = np.stack([np.append(0, groups + 1), np.append(groups, count)], axis=1)
    return ranges[ranges[:, 0] < ranges[:, 1]]


def _count_tokens(piece: Piece, ranges: GroupRanges) -> int:
    begins, ends = piece.group_starts(ranges.ravel()).reshape(-1, 2).T
    return int((ends - begins).sum())


def tokenize(name: str, documents: Iterable[Document], tokenizer: Tokenizer, pulse: Pulse = UNWATCHED) -> IndexedPiece:
    """Tokenize documents into memory. pulse: notes each few megabytes of text as progress."""
    batches = []
    for batch in tokenize_batches(documents, tokenizer):
        batches.append(batch)
        pulse.beat()
    if not batches:
        none = np.empty(0, token_dtype(tokenizer.vocabulary_size)), np.empty(0, np.int64), np.empty(0, np.uint64)
        return IndexedPiece(name, *none)
    tokens, lengths, keys = (np.concatenate([batch[field] for batch in batches]) for field in range(3))
    masks = [batch.mask for batch in batches if batch.mask is not None]
    labels = [batch.labels for batch in batches if batch.labels is not None]
    mask, label = (np.concatenate(parts) if parts else None for parts in (masks, labels))
    rows = [row for batch in batches for row in batch.rows or ()] or None
    ends, pairs = np.cumsum(lengths), batches[0].pairs
    return IndexedPiece(name, tokens, ends, keys, mask=mask, pairs=pairs, labels=label, rows=rows)


class TokenBatch(NamedTuple):
    """Tokenized documents of one part.

    Attributes:
        tokens: those of all documents, [N].
        lengths: number of tokens of each document, int64 [documents].
        keys: see `IndexedPiece`.
        mask: see `Piece`.
        pairs: kind of the pairs that the documents are of.
        labels, rows: see `Piece`.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    keys: NDArray[np.uint64]
    mask: NDArray[np.bool_] | None
    pairs: Pairs
    labels: NDArray[np.float32] | None
    rows: Sequence[bytes] | None


def tokenize_batches(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[TokenBatch]:
    """Tokenize documents, a few megabytes of text at a time.

    Each document becomes the tokenizer's prefix (BOS, if there is one), its tokens and the suffix (EOS), in the
    narrowest dtype that holds the vocabulary. A conversation gets neither, because its template writes them, unless it
    was written without one. A prompt gets no suffix. A text that spells them out, as a chat template wrote it, gets no
    second ones.

    Raises InputError if the tokenizer makes no token of a document of a pair.
    """
    dtype = token_dtype(tokenizer.vocabulary_size)
    prefix, suffix = tokenizer.prefix, tokenizer.suffix
    for batch in _make_batches(documents):
        first, texts, offsets = batch[0], [document.content for document in batch], None
        if first.spans is None or first.is_joined or first.row is not None:
            encoded: Sequence[NDArray[Any]] = tokenizer.encode(texts)
        else:
            encoded, offsets = zip(*tokenizer.encode_with_offsets(texts), strict=True)
        framed = [
            frame_ids(ids, prefix, suffix if document.row is None else ())
            if document.spans is None or document.is_joined
            else ((), ids, ())
            for ids, document in zip(encoded, batch, strict=True)
        ]
        tokens = np.concatenate([array for each in framed for array in each], dtype=dtype, casting="unsafe")
        lengths = np.array([sum(len(part) for part in each) for each in framed], np.int64)
        mask: NDArray[np.bool_] | None = None
        if offsets is not None:
            masks = [in_spans(begins, document.spans or ()) for begins, document in zip(offsets, batch, strict=True)]
            mask = np.concatenate(masks)
        elif first.is_joined:
            begins = [len(framed[at][0]) + begin for at, begin in enumerate(_find_answers(batch, encoded, tokenizer))]
            mask = np.concatenate([np.arange(n) >= begin for n, begin in zip(lengths, begins, strict=True)])
        rows = None if first.row is None else [document.row or b"" for document in batch]
        if (pairs := first.pairs) and not lengths.all():
            empty = batch[int(lengths.argmin())]
            raise InputError(f"{empty.name}: the tokenizer makes no token of the {empty.side} answer; remove the row")
        keys = [int.from_bytes(hashlib.sha256(document.key).digest()[:8], "big") for document in batch]
        labels = None if first.label is None else np.array([document.label for document in batch], np.float32)
        yield TokenBatch(tokens, lengths, np.array(keys, np.uint64), mask, pairs, labels, rows)


Framed = tuple[Sequence[int], NDArray[Any], Sequence[int]]


def frame_ids(ids: NDArray[Any], prefix: tuple[int, ...], suffix: tuple[int, ...]) -> Framed:
    """Return the ids of a text between those of the beginning and of the end that it does not have itself."""
    begins, ends = tuple(ids[: len(prefix)]) == prefix, tuple(ids[max(0, ids.size - len(suffix)) :]) == suffix
    return () if begins else prefix, ids, () if ends else suffix


def _find_answers(
    batch: Sequence[Document], encoded: Sequence[NDArray[Any]], tokenizer: Tokenizer
) -> NDArray[np.int64]:
    """Return the index of the first learned token of each document, which joins a prompt and an answer.

    This is the first id that differs from the ids of the prompt alone: the last characters of a prompt may be in one
    token with the answer. Both documents of a pair have the smaller index. TRL does the same (`common_prefix_length`).
    """
    prompts = tokenizer.encode([document.prompt.encode() for document in batch])
    begins = []
    for ids, prompt in zip(encoded, prompts, strict=True):
        size = min(ids.size, prompt.size)
        differs = np.flatnonzero(ids[:size] != prompt[:size])
        begins.append(int(differs[0]) if differs.size else size)
    found = np.array(begins, np.int64)
    return found.reshape(-1, 2).min(axis=1).repeat(2) if batch[0].pairs == PREFERENCE else found


def in_spans(positions: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return whether each position is in one of the spans [begin, end), which are sorted and do not overlap."""
    return np.array(spans, np.int64).ravel().searchsorted(positions, side="right") % 2 == 1


def token_dtype(vocabulary_size: int) -> np.dtype[np.integer]:
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


def hash_indices(first: int, last: int) -> NDArray[np.uint64]:
    """Return uint64 keys of indices [first, last): splitmix64 (Steele et al. 2014).

    Used for groups that have no content hash.
    """
    z = np.arange(first + 1, last + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def check_non_decreasing(ends: NDArray[np.int64], name: str) -> None:
    """Raise InputError if a document ends before it begins."""
    if (ends[1:] < ends[:-1]).any():
        raise InputError(
            f"{name}: the index is damaged, a document ends before it begins; restore the file or create it again "
            "(jaxopt_llm.prepare --verify checks all of a prepared corpus)"
        )


def fingerprint_file(path: Path) -> str:
    """Return a SHA-256 of the size of a file and of samples spread over it.

    The cost does not grow with the size of the file. Small files (up to 256 KiB) are hashed completely.
    """
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


def _make_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if size >= _BATCH_BYTES and not (document.side and len(batch) % 2):  # pairs stay together
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _cumulative(sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
