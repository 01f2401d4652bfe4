"""Whole documents in rows by best fit: which documents share a row is a function of (seed, epoch).

Best-fit decreasing takes the documents from long to short, and puts each into the fullest row that has room. The number
of rows depends only on the lengths, so it is the same in every epoch, and a row of any epoch is found without packing
the earlier ones. Each epoch combines the documents differently: the lengths that set the order are multiplied by random
factors, as large as the number of rows allows, and documents of equal length change places.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.data.tokens.pieces import hash_indices

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
