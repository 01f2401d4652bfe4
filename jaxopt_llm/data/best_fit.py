"""Whole documents in rows by best fit: which documents share a row is a function of (seed, epoch).

A row has places for documents of certain lengths, the same in every epoch. Best-fit decreasing finds them from the lengths
of all documents: it takes the documents from long to short, and puts each into the fullest row that has room. Every epoch
then assigns the documents of a length to the places of this length anew. So each epoch has the same number of rows, and
a row of any epoch is found without the packing of earlier ones.
"""

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.data.tokens import hash_indices

# Lengths are rounded up to 7 binary digits. This adds 0.5% of padding. It lets documents change places with others of
# nearly the same length, and limits the number of different lengths, and so the time of packing, to a few hundred.
_DIGITS = 7


@dataclass(frozen=True)
class Part:
    """Places of one length in each row of a group.

    Attributes:
        length: index of the length.
        places: places in each row.
        first: place of the first row, counted over all rows. The places of the rows follow each other.
    """

    length: int
    places: int
    first: int


@dataclass(frozen=True)
class Group:
    """Rows with places of the same lengths.

    rows: their number.
    """

    rows: int
    parts: tuple[Part, ...]

    @property
    def documents(self) -> int:
        """Number of documents in each row."""
        return sum(part.places for part in self.parts)


def pack(lengths: NDArray[np.int64], counts: NDArray[np.int64], size: int, limit: int = 0) -> list[Group]:
    """Pack documents into rows by best-fit decreasing.

    Documents of one length are packed together, so that the time depends on the number of lengths only.

    Args:
        lengths: different lengths, decreasing, from `size` to 1.
        counts: number of documents of each length.
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

    for index, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        left = count
        while left:
            if fitting := rooms >> length:
                room = length + (fitting & -fitting).bit_length() - 1  # the smallest that fits
                group = by_room[room].pop()
                if not by_room[room]:
                    rooms ^= 1 << room
            else:
                room, group = size, Group(left, ())  # as many empty rows as could be needed
            places = min(room // length, limit - group.documents)
            rows, rest = divmod(left, places)
            taken = [(rows, places), (1, rest)] if rows < group.rows else [(group.rows, places)]
            unchanged = group.rows
            for rows, places in taken:
                if rows and places:
                    part = Part(index, places, count - left)
                    add(Group(rows, (*_skip(group, group.rows - unchanged), part)), room - places * length)
                    unchanged, left = unchanged - rows, left - rows * places
            if unchanged and group.parts:
                add(Group(unchanged, _skip(group, group.rows - unchanged)), room)
    return full + [group for groups in by_room.values() for group in groups]


def _skip(group: Group, rows: int) -> tuple[Part, ...]:
    """Return the parts of a group without its first rows."""
    return tuple(Part(part.length, part.places, part.first + rows * part.places) for part in group.parts)


def count_rows(lengths: NDArray[np.int64], size: int, limit: int) -> int:
    """Return the number of rows of `size` tokens, with at most `limit` documents each, that documents need."""
    different, counts = np.unique(_round_up(lengths, size), return_counts=True)
    return sum(group.rows for group in pack(different[::-1], counts[::-1], size, limit))


def _round_up(lengths: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    _, digits = np.frexp(lengths)
    step = 1 << np.maximum(digits.astype(np.int64) - _DIGITS, 0)
    return np.minimum(-(-lengths // step) * step, size)


class BestFit:
    """Rows of whole documents. `len()` is the number of rows.

    It needs 12 bytes per document, and 4 more for each of at most two epochs.

    Args:
        starts: position of each document's first token in the stream, increasing, [documents].
        lengths: number of tokens of each document, from 1 to `size`, [documents].
        size: tokens of a row.
        limit: maximum number of documents of a row; 0 for no limit.
    """

    def __init__(self, starts: NDArray[np.int64], lengths: NDArray[np.int64], size: int, limit: int) -> None:
        different, of, counts = np.unique(_round_up(lengths, size), return_inverse=True, return_counts=True)
        order = np.argsort(different.size - 1 - of, kind="stable")  # from long to short
        self._starts, self._lengths = starts[order], lengths[order].astype(np.int32)
        self._bounds = np.concatenate([[0], np.cumsum(counts[::-1])])  # of the documents of a length
        self._groups = pack(different[::-1], counts[::-1], size, limit)
        self._first_rows = np.cumsum([0, *(group.rows for group in self._groups)])
        self._order = np.argsort(np.concatenate([*map(self._find_first, self._groups)]), kind="stable")
        # The places of an epoch, and of the one before it: a batch may have rows of both.
        self._assign = functools.lru_cache(2 * different.size)(self._assign_places)

    def __len__(self) -> int:
        return self._order.size

    def find_documents(self, row: int, epoch: tuple[int, int] | None) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the starts and the lengths of the documents of a row.

        Args:
            epoch: seed and number of the epoch. None: documents of a length have their places in the order of the
                stream. In this packing, rows are in the order of their first documents.
        """
        place = int(self._order[row])
        number = int(self._first_rows.searchsorted(place, side="right")) - 1
        place -= int(self._first_rows[number])
        found = []
        for part in self._groups[number].parts:
            first = part.first + place * part.places
            places = np.arange(first, first + part.places)
            assigned = places if epoch is None else self._assign(part.length, *epoch)[places]
            found.append(self._bounds[part.length] + assigned)
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
        digest = hashlib.sha256(f"{seed} {epoch} {length}".encode()).digest()
        first = int.from_bytes(digest[:8], "big") >> 2  # a random stretch of the indices
        count = int(self._bounds[length + 1] - self._bounds[length])
        return np.argsort(hash_indices(first, first + count), kind="stable").astype(np.int32)
