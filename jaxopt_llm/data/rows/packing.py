"""Packing of documents into rows of a fixed length, with splits at any token or only between documents.

Whole documents are packed by best fit: which documents share a row is a function of (seed, epoch). Best-fit decreasing
takes the documents from long to short, and puts each into the fullest row that has room. The number of rows depends
only on the lengths, so it is the same in every epoch, and a row of any epoch is found without packing the earlier ones.
Each epoch combines the documents differently: the lengths that set the order are multiplied by random factors, as large
as the number of rows allows, and documents of equal length change places.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.config.data import UNPAIRED, LongDocuments, Pairs
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.pulse import UNWATCHED, Pulse
from jaxopt_llm.data.tokens.pieces import TokenStream, hash_indices
from jaxopt_llm.model.batch import Batch

# --- Best fit


# Lengths are rounded up to 7 binary digits. This adds 0.5% of padding, and limits the number of different lengths to a
# few hundred. The time of packing is proportional to it, whatever the number of documents.
_DIGITS = 7
_BITS = 16  # of the factor by which a length is perturbed


@dataclass(frozen=True)
class Places:
    """Places for documents of one length in each row of a group.

    Attributes:
        length: index of the length.
        places: places in each row.
        first: index of the first row's first place among all places of this length; the places of later rows follow.
    """

    length: int
    places: int
    first: int


@dataclass(frozen=True)
class Group:
    """Rows with places for documents of the same lengths.

    rows: their number.
    """

    rows: int
    parts: tuple[Places, ...]

    @property
    def documents(self) -> int:
        """Number of documents in each row."""
        return sum(part.places for part in self.parts)

    def skip(self, rows: int) -> "Group":
        """Return the group without its first rows."""
        parts = (replace(part, first=part.first + rows * part.places) for part in self.parts)
        return Group(self.rows - rows, tuple(parts))


def pack(
    lengths: NDArray[np.int64], counts: NDArray[np.int64], order: Sequence[int], size: int, limit: int = 0
) -> list[Group]:
    """Pack documents into rows by best fit: each into the fullest row that has room.

    All documents of a length are packed at once, so the time depends on the number of lengths only.

    Args:
        lengths: the different lengths of documents, from 1 to `size`.
        counts: number of documents of each length.
        order: indices of the lengths, in the order of packing.
        size: tokens of a row.
        limit: maximum number of documents of a row; 0 for no limit.
    """
    limit = limit or size
    full: list[Group] = []
    by_room: dict[int, list[Group]] = {}  # groups with room for another document
    rooms = 0  # bit n is set if by_room[n] has a group

    def add(group: Group, room: int) -> None:
        nonlocal rooms
        if room == 0 or group.documents == limit:
            full.append(group)
        else:
            by_room.setdefault(room, []).append(group)
            rooms |= 1 << room

    for index in order:
        length, left, first = int(lengths[index]), int(counts[index]), 0
        while left:
            if fitting := rooms >> length:
                room = length + (fitting & -fitting).bit_length() - 1  # the smallest that is large enough
                group = by_room[room].pop()
                if not by_room[room]:
                    rooms ^= 1 << room
            else:
                room, group = size, Group(left, ())  # as many empty rows as could be needed
            places = min(room // length, limit - group.documents)
            rows, rest = divmod(left, places)
            for taking, each in [(group.rows, places)] if rows >= group.rows else [(rows, places), (1, rest)]:
                if taking and each:
                    taken = Group(taking, (*group.parts, Places(index, each, first)))
                    add(taken, room - each * length)
                    group, first, left = group.skip(taking), first + taking * each, left - taking * each
            if group.rows and group.parts:
                add(group, room)
    return full + [group for groups in by_room.values() for group in groups]


def split_rows(groups: Sequence[Group], more: int) -> list[Group]:
    """Return the groups with `more` additional rows. Each new row takes one document out of a row that has several."""
    done, pending = list[Group](), [*groups]
    while pending:
        group = pending.pop()
        rows = min(more, group.rows) if group.documents > 1 else 0
        if not rows:
            done.append(group)
            continue
        more -= rows
        *others, last = group.parts
        if last.places > 1:
            others.append(replace(last, places=last.places - 1))
        alone = Places(last.length, 1, last.first + rows * (last.places - 1))
        pending += [group.skip(rows)] * (rows < group.rows) + [Group(rows, tuple(others)), Group(rows, (alone,))]
    return done


def count_rows(groups: Sequence[Group]) -> int:
    return sum(group.rows for group in groups)


class Lengths:
    """Different lengths of documents, rounded, and the packings of documents of such lengths.

    Args:
        lengths: length of each document, from 1 to `size`, [documents].
        size: tokens of a row.
        limit: maximum number of documents of a row; 0 for no limit.

    Attributes:
        lengths: the different lengths after rounding, decreasing.
        counts: number of documents of each length.
        rows: number of rows of every packing.
        decreasing: packing by best-fit decreasing.
    """

    def __init__(self, lengths: NDArray[np.int64], size: int, limit: int) -> None:
        different, counts = np.unique(-round_up(lengths, size), return_counts=True)
        self.lengths, self.counts = -different, counts
        self._pack = functools.partial(pack, self.lengths, counts, size=size, limit=limit)
        self.decreasing = self._pack(range(different.size))
        self.rows = count_rows(self.decreasing)

    def pack_epoch(self, seed: int, epoch: int) -> list[Group]:
        """Pack the documents of an epoch: best-fit decreasing by lengths that are perturbed by a factor of 1 to 2.

        If this takes too many rows, the perturbation is halved. Without any, it is best-fit decreasing.
        """
        random = (hash_key(self.lengths.size, seed, epoch) >> np.uint64(64 - _BITS)).astype(np.int64)
        for halved in range(_BITS + 1):
            order = np.argsort(-self.lengths * ((1 << _BITS) + (random >> halved)), kind="stable")
            groups = self._pack(order.tolist())
            if (missing := self.rows - count_rows(groups)) >= 0:
                break
        return split_rows(groups, missing)


def round_up(lengths: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Round lengths up to `_DIGITS` binary digits, or to the tokens of a row."""
    _, digits = np.frexp(lengths)
    step = 1 << np.maximum(digits.astype(np.int64) - _DIGITS, 0)
    return np.minimum(-(-lengths // step) * step, size)


class BestFit:
    """Rows of whole documents. `len()` is the number of rows.

    It needs 12 bytes per document, 4 more for each of at most two epochs, and 8 bytes per row.

    Args:
        starts: position of each document's first token in the stream, increasing, [documents].
        lengths: number of tokens of each document, from 1 to `size`, [documents].
        size: tokens of a row.
        limit: maximum number of documents of a row; 0 for no limit.
    """

    def __init__(self, starts: NDArray[np.int64], lengths: NDArray[np.int64], size: int, limit: int) -> None:
        packings = Lengths(lengths, size, limit)
        order = np.argsort(-round_up(lengths, size), kind="stable")  # from long to short
        self._starts, self._lengths = starts[order], lengths[order].astype(np.int32)
        self._bounds = np.concatenate([[0], np.cumsum(packings.counts)])  # of the documents of each length
        self._fixed = _Table(packings.decreasing)
        self._order = np.argsort(np.concatenate([*map(self._find_first, packings.decreasing)]), kind="stable")
        # Of two epochs, because a batch may have rows of both.
        self._pack = functools.lru_cache(2)(lambda *epoch: _Table(packings.pack_epoch(*epoch)))
        self._assign = functools.lru_cache(2 * packings.counts.size)(self._assign_places)

    def __len__(self) -> int:
        return self._order.size

    def find_documents(self, row: int, epoch: tuple[int, int] | None) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the starts and the lengths of the documents of a row.

        Args:
            epoch: (seed, number of the epoch). None: the packing that depends on the documents only. Its rows are in
                the order of their first documents.
        """
        if epoch is None:
            found = [self._bounds[length] + places for length, places in self._fixed.find(int(self._order[row]))]
        else:
            found = [
                self._bounds[length] + self._assign(length, *epoch)[places]
                for length, places in self._pack(*epoch).find(row)
            ]
        documents = np.concatenate(found)
        return self._starts[documents], self._lengths[documents]

    def _find_first(self, group: Group) -> NDArray[np.int64]:
        """Return the start of the first document of each row of a group, in the packing without an epoch."""
        firsts = []
        for part in group.parts:
            first = int(self._bounds[part.length]) + part.first
            starts = self._starts[first : first + group.rows * part.places]
            firsts.append(starts.reshape(group.rows, part.places).min(axis=1))
        return np.minimum.reduce(firsts)

    def _assign_places(self, length: int, seed: int, epoch: int) -> NDArray[np.int32]:
        """Return the document of each place of a length."""
        count = int(self._bounds[length + 1] - self._bounds[length])
        return np.argsort(hash_key(count, seed, epoch, length), kind="stable").astype(np.int32)


class _Table:
    """Rows of groups, one after the other."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._firsts = np.cumsum([0, *(group.rows for group in groups)])

    def find(self, row: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the indices of the lengths in a row, and its places of each."""
        number = int(self._firsts.searchsorted(row, side="right")) - 1
        row -= int(self._firsts[number])
        for part in self._groups[number].parts:
            first = part.first + row * part.places
            yield part.length, np.arange(first, first + part.places)


def hash_key(count: int, *key: int) -> NDArray[np.uint64]:
    """Return random numbers that depend only on a key."""
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    first = int.from_bytes(digest[:8], "big") >> 2  # below 2**62, so that the last index has 64 bits
    return hash_indices(first, first + count)


# --- Rows


_BLOCK = 2**26  # tokens whose documents are found at once
_MASK_BLOCK = 2**22  # tokens whose mask is read at once
_SAMPLE = 2**24  # tokens at the start of a stream, by which the waste of a limit is measured


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Random-access source of rows, for Grain: `rows[i]` is a Batch of NumPy arrays, each [S].

    If long documents are split, row i reads stream positions i * S to i * S + S: the first S are its tokens, the last S
    its targets. One pass over all rows reads every token of the stream except the last one once, and has every token
    except the first one as a target once. Masked are targets that start a document, and targets that conversations
    mask. A document that continues from the previous row starts a new segment, in which positions restart at 0, so rows
    are independent. A row ends before the document that would exceed `documents_per_row`.

    Otherwise a row holds whole documents, as `BestFit` packs them, at most `documents_per_row`. The last token of a
    document is only a target. Of a document longer than a row, only the first part is read, or the document is dropped.
    Documents without a token that the loss counts are dropped.

    Pairs are packed like one document: a row holds them whole, the rejected document after the chosen one, or the
    mismatched one after the judged one. So segment 2k + 1 is the first document of pair k, and segment 2k + 2 the
    second one. Pairs longer than a row are dropped, and so are pairs with a document without a token that the loss
    counts. Rows with judged documents have their labels.

    With `scored`, rows hold whole documents, and the last token of a document is a token, too: its output is the
    document's score. The loss mask has all tokens, and rows have the labels of their documents, if there are any.

    Rows are padded with zeros. Padding has segment 0 and is masked.

    Args:
        stream: the documents.
        sequence_length: S.
        vocabulary_size: the model's.
        name: name of the data, for messages.
        long_documents, documents_per_row: see `data.long_documents`, `data.documents_per_row`.
        scored: whether documents get scores.
        pulse: notes the progress of reading all documents, where packing them needs it.

    Attributes:
        summary: statistics of packing whole documents; empty if documents are split.

    Raises:
        InputError: the stream has no token to predict, or the loss counts none, or a setting would divide pairs.
            `rows[i]` raises it for an id outside the vocabulary.
    """

    stream: TokenStream
    sequence_length: int
    vocabulary_size: int
    name: str = "the corpus"
    long_documents: LongDocuments = "auto"
    documents_per_row: int = 0
    scored: bool = False
    pulse: InitVar[Pulse] = UNWATCHED
    summary: str = field(init=False, default="")
    _bounds: NDArray[np.int64] | None = field(init=False, default=None)  # [rows, 2]: positions [first, last) of a row
    _whole: BestFit | None = field(init=False, default=None)

    def __post_init__(self, pulse: Pulse) -> None:
        if self.pairs:
            self._check_keeps_pairs()
        if self.scored and self.long_documents == "split":
            problem = "data.long_documents=split would divide documents, which get one score"
            raise InputError(f"{self.name}: {problem}; leave it out, or set cut or drop")
        if self.scored or _packs_whole(self.stream, self.long_documents):
            self._pack_whole(pulse)
            return
        if self.stream.size < 2:
            raise InputError(f"{self.name} has {self.stream}, so there is no token to predict: add documents")
        if self.documents_per_row:
            starts = _read_starts(self.stream, self.stream.size, pulse)
            if exceed_limit(starts, self.sequence_length, self.documents_per_row).size:
                bounds = split_by_documents(starts, self.stream.size, self.sequence_length, self.documents_per_row)
                object.__setattr__(self, "_bounds", bounds)

    def __len__(self) -> int:
        if self._whole is not None:
            return len(self._whole)
        return -(-(self.stream.size - 1) // self.sequence_length) if self._bounds is None else len(self._bounds)

    def __getitem__(self, index: int) -> Batch:
        return self.read(index)

    @property
    def pairs(self) -> Pairs:
        """Kind of the pairs that rows hold; see `Piece`."""
        return self.stream.pairs

    def read(self, index: int, epoch: tuple[int, int] | None = None) -> Batch:
        """Return a row of the packing of an epoch, given as (seed, epoch).

        None: the packing that depends on the documents only. Rows of split documents are the same in every epoch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        firsts, counts = self.find_ranges(index, epoch)
        ranges = list(zip(firsts.tolist(), counts.tolist(), strict=True))
        window = np.concatenate([self.stream.read(*each) for each in ranges])
        self._check_ids(window, firsts, counts)
        begins = np.zeros(window.size, bool)
        begins[np.cumsum(counts) - counts] = True
        starts = begins
        if self._whole is None:  # a document that continues from the previous row is a new segment
            starts = begins.copy()
            starts[self.stream.document_starts(*ranges[0]) - firsts[0]] = True
        offsets = np.arange(window.size)
        segments, positions = np.cumsum(starts), offsets - np.maximum.accumulate(np.where(starts, offsets, 0))
        if self.scored:
            row = self._make_scored(window, firsts, segments, positions)
        else:
            mask = np.concatenate([self.stream.read_mask(*each) for each in ranges])
            is_token, is_target = ~np.roll(begins, -1), ~begins  # the last token of a range is only a target
            row = Batch(
                tokens=window[is_token].astype(np.int32),
                targets=window[is_target].astype(np.int32),
                loss_mask=(~starts & mask)[is_target],
                segment_ids=segments[is_token].astype(np.int32),
                positions=positions[is_token].astype(np.int32),
            )
            if self.stream.holds("reference"):
                row = replace(row, reference=_place_reference(self.stream.read_reference(firsts), row))
            if self.stream.holds("teacher"):
                row = _place_taught([self.stream.read_teacher(first + 1, n - 1) for first, n in ranges if n > 1], row)
            if self.pairs == UNPAIRED:
                row = replace(row, labels=self._read_labels(firsts, row.segment_ids))
        padding = self.sequence_length - row.tokens.size
        return jax.tree.map(lambda field: _pad(field, padding), row) if padding else row

    def _make_scored(
        self, window: NDArray[np.int64], firsts: NDArray[Any], segments: NDArray[Any], positions: NDArray[Any]
    ) -> Batch:
        """Return a row of documents that get scores, without padding. firsts: their first positions in the stream."""
        labels = self._read_labels(firsts, segments) if self.stream.holds("labels") else None
        return Batch(
            tokens=window.astype(np.int32),
            targets=np.roll(window, -1).astype(np.int32),  # nothing reads them
            loss_mask=np.ones(window.size, bool),
            segment_ids=segments.astype(np.int32),
            positions=positions.astype(np.int32),
            labels=labels,
        )

    def _read_labels(self, firsts: NDArray[Any], segments: NDArray[Any]) -> NDArray[np.float32]:
        """Return the label of each token's document. firsts: of the documents; segments: of the tokens, from 1."""
        of_documents = np.array([self.stream.read_label(int(first)) for first in firsts], np.float32)
        return of_documents[segments - 1]

    def find_ranges(self, index: int, epoch: tuple[int, int] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the first positions and the sizes of the ranges of the stream that a row reads."""
        if self._whole is not None:
            starts, lengths = self._whole.find_documents(index, epoch)
            targets = 0 if self.scored else 2 if self.pairs else 1  # positions that are only targets
            return self._divide_pairs(starts, lengths + targets) if self.pairs else (starts, lengths + targets)
        if self._bounds is None:
            first = index * self.sequence_length
            last = min(first + self.sequence_length + 1, self.stream.size)
        else:
            first, last = map(int, self._bounds[index])
        return np.array([first]), np.array([last - first])

    def _divide_pairs(self, starts: NDArray[Any], sizes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the first positions and the sizes of the documents of pairs, which are given in the same way."""
        rejected = [self.stream.document_starts(at + 1, n - 1)[0] for at, n in np.stack([starts, sizes], 1).tolist()]
        firsts = np.stack([starts, rejected], 1)
        lasts = np.stack([rejected, starts + sizes], 1)
        return firsts.ravel(), (lasts - firsts).ravel()

    def _check_keeps_pairs(self) -> None:
        if self.long_documents in ("cut", "split"):
            problem = f"data.long_documents={self.long_documents} would divide them"
            raise InputError(f"{self.name} holds pairs of answers, and {problem}; leave it out, or set drop")
        if self.documents_per_row == 1:
            problem = "data.documents_per_row=1 leaves no room for the two documents of one"
            raise InputError(f"{self.name} holds pairs of answers, and {problem}; set 0, or at least 2")

    def _pack_whole(self, pulse: Pulse) -> None:
        starts = _read_starts(self.stream, self.stream.size, pulse)
        if self.pairs and (starts.size % 2 or not np.diff(starts, append=self.stream.size).all()):
            problem = "the index is damaged, a document of a pair is empty or missing"
            raise InputError(f"{self.name}: {problem}; prepare the corpus again")
        long_documents = "drop" if self.pairs else self.long_documents
        lengths, long = _measure_documents(
            starts, self.stream.size, self.sequence_length, long_documents, pairs=bool(self.pairs), scored=self.scored
        )
        counts = self._count_loss_tokens(starts, lengths, pulse)
        kind, unlearned, limit = "documents", "documents without tokens that the loss counts", self.documents_per_row
        if self.pairs:  # from here on, a pair is one document
            kind, unlearned, limit = "pairs", "pairs with an answer without tokens that the loss counts", limit // 2
            by_side = counts.reshape(-1, 2)
            starts, lengths, counts = starts[::2], _add_pairs(lengths), by_side.sum(axis=1) * by_side.all(axis=1)
        kept = counts > 0
        if not kept.any():
            problem = f"no row of training.sequence_length={self.sequence_length} has a token that the loss counts"
            raise InputError(f"{self.name} has {self.stream}, but {problem}: increase the length, or add documents")
        rows = BestFit(starts[kept], lengths[kept], self.sequence_length, limit)
        filled = int(lengths[kept].sum())
        counted = f"{len(rows):,} row{'s' * (len(rows) != 1)} of whole {kind}"
        summary = f"{self.name}: {counted}, {filled / (len(rows) * self.sequence_length):.0%} filled"
        if not self.scored:
            summary += f"; the loss counts {int(counts.sum()) / filled:.0%} of the tokens"
        if long:
            done = "dropped" if long_documents == "drop" else "cut"
            summary += f"; {long:,} of {starts.size:,} {kind} are longer than a row and {done}"
        if dropped := int((~kept & (lengths > 0)).sum()):
            summary += f"; {dropped:,} {unlearned} are dropped"
        object.__setattr__(self, "summary", summary)
        object.__setattr__(self, "_whole", rows)

    def _count_loss_tokens(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], pulse: Pulse
    ) -> NDArray[np.int64]:
        """Return the number of tokens of each document that the loss counts. The first token never counts."""
        if self.scored or not self.stream.holds("mask"):
            return lengths
        counts, document = np.zeros_like(lengths), 0
        while document < starts.size:
            first = int(starts[document])
            following = max(int(starts.searchsorted(first + _MASK_BLOCK)), document + 1)
            block = slice(document, following)
            last = int(starts[following - 1] + lengths[following - 1]) + 1
            mask = self.stream.read_mask(first, last - first)
            before = np.concatenate([[0], np.cumsum(mask)])  # tokens that count before each position
            begins = starts[block] - first + 1
            counts[block] = before[begins + lengths[block]] - before[begins]
            pulse.beat()
            document = following
        return counts

    def _check_ids(self, window: NDArray[np.int64], firsts: NDArray[Any], counts: NDArray[Any]) -> None:
        """Raise InputError for an id outside the vocabulary.

        The lookup in the embedding table, on the device, would silently use another token.
        """
        if window.min() >= 0 and window.max() < self.vocabulary_size:
            return
        index = int(((window < 0) | (window >= self.vocabulary_size)).argmax())
        within = int(np.cumsum(counts).searchsorted(index, side="right"))
        where = self.stream.describe_position(int(firsts[within]) + index - int(counts[:within].sum()))
        problem = f"has the token id {window[index]}, outside model.vocabulary_size={self.vocabulary_size}"
        raise InputError(f"{where} {problem}: increase that size, or use the tokenizer of this data")


def _place_reference(found: NDArray[np.float32], row: Batch) -> NDArray[np.float32]:
    """Return the log-probability of each document at the last of its tokens that the loss counts, and zeros elsewhere.

    Objectives read only the sums of documents.

    Args:
        found: of the documents of the row, each of which has a token that the loss counts.
        row: fields [S].
    """
    (counted,) = np.nonzero(row.loss_mask)
    documents = row.segment_ids[counted]
    placed = np.zeros(row.tokens.size, np.float32)
    placed[counted[np.diff(documents, append=0) != 0]] = found
    return placed


def _place_taught(found: Sequence[NDArray[np.void]], row: Batch) -> Batch:
    """Return the row with what a teacher says of its targets. found: of those that count, in order."""
    values = np.concatenate(found)
    fields = {
        "teacher_ids": (values["ids"], np.int32),
        "teacher_log_probabilities": (values["log_probabilities"], None),
    }
    placed = {}
    for name, (each, dtype) in fields.items():
        placed[name] = np.zeros((row.tokens.size, each.shape[1]), dtype or each.dtype)
        placed[name][row.loss_mask] = each
    return replace(row, **placed)


def _pad(field: NDArray[Any], count: int) -> NDArray[Any]:
    """Return the values [S, ...] of tokens with zeros for `count` more."""
    return np.concatenate([field, np.zeros((count, *field.shape[1:]), field.dtype)])


def _measure_documents(
    starts: NDArray[np.int64],
    size: int,
    length: int,
    long_documents: LongDocuments,
    pairs: bool,
    scored: bool = False,
) -> tuple[NDArray[np.int64], int]:
    """Return the tokens of each document that a row of whole documents holds, and the number of longer ones.

    A document of n tokens counts n - 1, or n if it gets a score, at most `length`, and 0 if it is dropped. Both
    documents of a pair are dropped if the pair is longer than a row; the number is that of pairs.

    Args:
        starts: start of each document, [documents].
        size: end of the last document.
        pairs: whether the documents are pairs.
        scored: whether documents get scores.
    """
    lengths = np.maximum(np.diff(starts, append=size) - (not scored), 0)
    if pairs:
        long = _add_pairs(lengths) > length
        return np.where(np.repeat(long, 2), 0, lengths), int(long.sum())
    long = lengths > length
    return np.where(long, 0 if long_documents == "drop" else length, lengths), int(long.sum())


def _add_pairs(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of the lengths of the two documents of each pair."""
    return lengths.reshape(-1, 2).sum(axis=1)


def exceed_limit(starts: NDArray[np.int64], length: int, limit: int) -> NDArray[np.int64]:
    """Return the starts of documents from which on a row of `length` tokens may exceed `limit` documents.

    A row that begins within the document before this one would also have the `limit` documents from this one on.
    """
    begins = starts[: max(starts.size - limit + 1, 0)]
    return begins[starts[limit - 1 :] - begins <= length]


def split_by_documents(starts: NDArray[np.int64], size: int, length: int, limit: int) -> NDArray[np.int64]:
    """Split documents at any token into rows of `length` tokens with at most `limit` documents.

    The last token of a row is the target of the one before it. If the row ends before a document because of the limit,
    the next row begins with this document, otherwise with that last token.

    Args:
        starts: start of each document, [documents].
        size: end of the last document.

    Returns:
        The rows as ranges [first, last), [rows, 2]. Rows without a target, of one token, are left out.
    """
    starts = np.unique(starts)  # without empty documents
    crowded = exceed_limit(starts, length, limit)
    rows, position = [np.empty((0, 2), np.int64)], 0
    while position < size - 1:
        after = int(starts.searchsorted(position, side="right"))  # the first document that begins behind `position`
        next_crowded = int(crowded.searchsorted(position, side="right"))
        safe_end = int(crowded[next_crowded]) if next_crowded < crowded.size else size
        free = (safe_end - 1 - position) // length  # rows that end before the limit can matter
        if free > 0:
            firsts = position + length * np.arange(free)
            rows.append(np.stack([firsts, np.minimum(firsts + length + 1, size)], axis=1))
            position += length * free
            continue
        last, limited = min(position + length + 1, size), after + limit - 1
        if limited < starts.size and starts[limited] <= last:
            last = next_position = int(starts[limited])
        else:
            next_position = position + length
        if last - position > 1:
            rows.append(np.array([[position, last]]))
        position = next_position
    return np.concatenate(rows)


def measure_waste(stream: TokenStream, length: int, long_documents: LongDocuments, limit: int) -> float:
    """Return the share of the tokens of rows that a limit of the documents in a row turns into padding.

    It is measured on the first tokens of a long stream.
    """
    size = min(stream.size, _SAMPLE)
    starts = _read_starts(stream, size)
    if stream.pairs:
        if limit == 1:
            return 1.0  # a row has room for no pair
        if starts.size % 2:  # the sample ends within a pair
            starts, size = starts[:-1], int(starts[-1])
    if _packs_whole(stream, long_documents):
        lengths, _ = _measure_documents(starts, size, length, long_documents, bool(stream.pairs))
        if stream.pairs:
            lengths, limit = _add_pairs(lengths), limit // 2
        with_limit, without = (Lengths(lengths[lengths > 0], length, n).rows for n in (limit, 0))
    else:
        with_limit, without = len(split_by_documents(starts, size, length, limit)), -(-(size - 1) // length)
    return 1 - without / with_limit if with_limit > without else 0.0


def _packs_whole(stream: TokenStream, long_documents: LongDocuments) -> bool:
    is_cut = long_documents in ("cut", "drop") or (long_documents == "auto" and stream.holds("mask"))
    return bool(stream.pairs) or is_cut


def _read_starts(stream: TokenStream, size: int, pulse: Pulse = UNWATCHED) -> NDArray[np.int64]:
    """Return the starts of the documents among the first `size` tokens."""
    blocks = []
    for first in range(0, size, _BLOCK):
        blocks.append(stream.document_starts(first, min(_BLOCK, size - first)))
        pulse.beat()
    return np.concatenate(blocks) if blocks else np.empty(0, np.int64)
