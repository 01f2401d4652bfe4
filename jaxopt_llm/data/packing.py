"""Packing of documents into rows of a fixed length, with splits at any token or only between documents."""

from dataclasses import InitVar, dataclass, field

import jax
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.config.data import LongDocuments
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.pulse import UNWATCHED, Pulse
from jaxopt_llm.data.tokens import TokenStream
from jaxopt_llm.model.batch import Batch

_BLOCK = 2**26  # tokens whose documents are found at once
_SAMPLE = 2**24  # tokens at the start of a stream, by which the waste of a limit is measured


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Random-access source of rows, for Grain: `rows[i]` is a Batch of NumPy arrays, each [S].

    If long documents are split, row i reads stream positions i * S to i * S + S: the first S are its tokens, the last S
    its targets. One pass over all rows reads every token of the stream except the last one once, and has every token
    except the first one as a target once. Masked are targets that start a document, and targets that conversations
    mask. A document that continues from the previous row starts a new segment, in which positions restart at 0, so rows
    are independent.

    Otherwise a row holds as many consecutive whole documents as fit. Of a longer document it holds only the first
    part, or the document is dropped. Rows in which the loss counts no token are dropped.

    In both forms, a row ends before the document that would exceed `documents_per_row`.

    Rows are padded with zeros. Padding has segment 0 and is masked.

    Args:
        stream: the documents.
        sequence_length: S.
        vocabulary_size: the model's.
        name: name of the data, for messages.
        long_documents, documents_per_row: see `data.long_documents`, `data.documents_per_row`.
        pulse: notes the progress of reading all documents, where packing them needs it.

    Attributes:
        summary: statistics of packing whole documents; empty if documents are split.

    Raises:
        InputError: the stream has no token to predict, or the loss counts none. `rows[i]` raises it for an id outside
            the vocabulary.
    """

    stream: TokenStream
    sequence_length: int
    vocabulary_size: int
    name: str = "the corpus"
    long_documents: LongDocuments = "auto"
    documents_per_row: int = 0
    pulse: InitVar[Pulse] = UNWATCHED
    summary: str = field(init=False, default="")
    _bounds: NDArray[np.int64] | None = field(init=False, default=None)  # [rows, 2]: positions [first, last) of a row

    def __post_init__(self, pulse: Pulse) -> None:
        if _packs_whole(self.stream, self.long_documents):
            self._pack_whole(self.long_documents == "drop", pulse)
            return
        if self.stream.size < 2:
            raise InputError(f"{self.name} has {self.stream}, so there is no token to predict: add documents")
        if self.documents_per_row:
            starts = _read_starts(self.stream, self.stream.size, pulse)
            if exceed_limit(starts, self.sequence_length, self.documents_per_row).size:
                bounds = split_by_documents(starts, self.stream.size, self.sequence_length, self.documents_per_row)
                object.__setattr__(self, "_bounds", bounds)

    def __len__(self) -> int:
        return -(-(self.stream.size - 1) // self.sequence_length) if self._bounds is None else len(self._bounds)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if self._bounds is None:
            first = index * self.sequence_length
            last = min(first + self.sequence_length + 1, self.stream.size)
        else:
            first, last = map(int, self._bounds[index])
        count = last - first
        window = self.stream.read(first, count)  # [S + 1], or fewer
        self._check_ids(window, first)
        starts = np.zeros(count, bool)
        starts[self.stream.document_starts(first, count) - first] = True
        starts[0] = True  # a document that continues from the previous row is a new segment
        offsets = np.arange(count)
        row = Batch(
            tokens=window[:-1].astype(np.int32),
            targets=window[1:].astype(np.int32),
            loss_mask=(~starts & self.stream.read_mask(first, count))[1:],
            segment_ids=np.cumsum(starts)[:-1].astype(np.int32),
            positions=(offsets - np.maximum.accumulate(np.where(starts, offsets, 0)))[:-1].astype(np.int32),
        )
        if count > self.sequence_length:
            return row
        return jax.tree.map(lambda field: np.pad(field, (0, self.sequence_length + 1 - count)), row)

    def _pack_whole(self, drop: bool, pulse: Pulse) -> None:
        size, most = self.stream.size, self.sequence_length + 1
        starts = _read_starts(self.stream, size, pulse)
        bounds, long = pack_whole_documents(starts, size, most, drop, self.documents_per_row)
        counts = []
        for first, last in bounds:
            counts.append(self._count_loss_tokens(first, last))
            pulse.beat()
        table = np.array([row for row, count in zip(bounds, counts, strict=True) if count], np.int64)
        if not table.size:
            problem = f"no row of training.sequence_length={self.sequence_length} has a token that the loss counts"
            raise InputError(f"{self.name} has {self.stream}, but {problem}: increase the length, or add documents")
        filled = int((table[:, 1] - table[:, 0] - 1).sum())
        summary = (
            f"{self.name}: {len(table):,} rows of whole documents, {filled / (len(table) * self.sequence_length):.0%} "
            f"filled; the loss counts {sum(counts) / filled:.0%} of the tokens"
        )
        if long:
            done = "dropped" if drop else "cut"
            summary += f"; {long:,} of {starts.size:,} documents are longer than a row and {done}"
        if len(bounds) > len(table):
            summary += f"; {len(bounds) - len(table):,} rows without tokens that the loss counts are dropped"
        object.__setattr__(self, "summary", summary)
        object.__setattr__(self, "_bounds", table)

    def _count_loss_tokens(self, first: int, last: int) -> int:
        """Return the number of tokens of a row that the loss counts. The first token of a document never counts."""
        mask = self.stream.read_mask(first, last - first)
        mask[self.stream.document_starts(first, last - first) - first] = False
        return int(mask.sum())

    def _check_ids(self, window: NDArray[np.int64], first: int) -> None:
        """Raise InputError for an id outside the vocabulary.

        The lookup in the embedding table, on the device, would silently use another token.
        """
        if window.min() >= 0 and window.max() < self.vocabulary_size:
            return
        index = int(((window < 0) | (window >= self.vocabulary_size)).argmax())
        where = self.stream.describe_position(first + index)
        problem = f"has the token id {window[index]}, outside model.vocabulary_size={self.vocabulary_size}"
        raise InputError(f"{where} {problem}: increase that size, or use the tokenizer of this data")


def pack_whole_documents(
    starts: NDArray[np.int64], size: int, most: int, drop: bool, limit: int = 0
) -> tuple[list[tuple[int, int]], int]:
    """Pack consecutive whole documents into rows of up to `most` tokens.

    Args:
        starts: start of each document, [documents].
        size: end of the last document.
        most: maximum number of tokens of a row.
        drop: whether a document longer than a row is dropped; otherwise its first `most` tokens are one row.
        limit: maximum number of documents of a row; 0 for no limit.

    Returns:
        The rows as ranges [first, last), and the number of documents that are longer than a row.
    """
    ends = np.append(starts[1:], size)
    rows, document, long = [], 0, 0
    while document < starts.size:
        first = int(starts[document])
        next_document = int(ends.searchsorted(first + most, side="right"))  # the documents before it fit
        next_document = min(next_document, document + limit) if limit else next_document
        if next_document > document:
            rows.append((first, int(ends[next_document - 1])))
        else:
            long += 1
            if not drop:
                rows.append((first, first + most))
        document = max(next_document, document + 1)
    return rows, long


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
    if _packs_whole(stream, long_documents):
        drop = long_documents == "drop"
        with_limit, without = (len(pack_whole_documents(starts, size, length + 1, drop, n)[0]) for n in (limit, 0))
    else:
        with_limit, without = len(split_by_documents(starts, size, length, limit)), -(-(size - 1) // length)
    return 1 - without / with_limit if with_limit > without else 0.0


def _packs_whole(stream: TokenStream, long_documents: LongDocuments) -> bool:
    return long_documents in ("cut", "drop") or (long_documents == "auto" and stream.has_mask)


def _read_starts(stream: TokenStream, size: int, pulse: Pulse = UNWATCHED) -> NDArray[np.int64]:
    """Return the starts of the documents among the first `size` tokens."""
    blocks = []
    for first in range(0, size, _BLOCK):
        blocks.append(stream.document_starts(first, min(_BLOCK, size - first)))
        pulse.beat()
    return np.concatenate(blocks) if blocks else np.empty(0, np.int64)
