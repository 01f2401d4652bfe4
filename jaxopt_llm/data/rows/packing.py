"""Packing of documents into rows of a fixed length, with splits at any token or only between documents."""

from dataclasses import InitVar, dataclass, field
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.config.data import LongDocuments
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.pulse import UNWATCHED, Pulse
from jaxopt_llm.data.rows.best_fit import BestFit, Lengths
from jaxopt_llm.data.tokens.pieces import TokenStream
from jaxopt_llm.model.batch import Batch

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
    _whole: BestFit | None = field(init=False, default=None)

    def __post_init__(self, pulse: Pulse) -> None:
        if _packs_whole(self.stream, self.long_documents):
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

    def read(self, index: int, epoch: tuple[int, int] | None = None) -> Batch:
        """Return a row of the packing of an epoch, given as (seed, epoch).

        None: the packing that depends on the documents only. Rows of split documents are the same in every epoch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        firsts, counts = self._find_ranges(index, epoch)
        ranges = list(zip(firsts.tolist(), counts.tolist(), strict=True))
        window = np.concatenate([self.stream.read(*each) for each in ranges])
        self._check_ids(window, firsts, counts)
        begins = np.zeros(window.size, bool)
        begins[np.cumsum(counts) - counts] = True
        starts = begins
        if self._whole is None:  # a document that continues from the previous row is a new segment
            starts = begins.copy()
            starts[self.stream.document_starts(*ranges[0]) - firsts[0]] = True
        mask, offsets = np.concatenate([self.stream.read_mask(*each) for each in ranges]), np.arange(window.size)
        is_token, is_target = ~np.roll(begins, -1), ~begins  # the last token of a range is only a target
        row = Batch(
            tokens=window[is_token].astype(np.int32),
            targets=window[is_target].astype(np.int32),
            loss_mask=(~starts & mask)[is_target],
            segment_ids=np.cumsum(starts)[is_token].astype(np.int32),
            positions=(offsets - np.maximum.accumulate(np.where(starts, offsets, 0)))[is_token].astype(np.int32),
        )
        padding = self.sequence_length - row.tokens.size
        return jax.tree.map(lambda field: np.pad(field, (0, padding)), row) if padding else row

    def _find_ranges(self, index: int, epoch: tuple[int, int] | None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the first positions and the sizes of the ranges of the stream that a row reads."""
        if self._whole is not None:
            starts, lengths = self._whole.find_documents(index, epoch)
            return starts, lengths + 1
        if self._bounds is None:
            first = index * self.sequence_length
            last = min(first + self.sequence_length + 1, self.stream.size)
        else:
            first, last = map(int, self._bounds[index])
        return np.array([first]), np.array([last - first])

    def _pack_whole(self, pulse: Pulse) -> None:
        starts = _read_starts(self.stream, self.stream.size, pulse)
        lengths, long = _measure_documents(starts, self.stream.size, self.sequence_length, self.long_documents)
        counts = self._count_loss_tokens(starts, lengths, pulse)
        kept = counts > 0
        if not kept.any():
            problem = f"no row of training.sequence_length={self.sequence_length} has a token that the loss counts"
            raise InputError(f"{self.name} has {self.stream}, but {problem}: increase the length, or add documents")
        rows = BestFit(starts[kept], lengths[kept], self.sequence_length, self.documents_per_row)
        filled = int(lengths[kept].sum())
        summary = (
            f"{self.name}: {len(rows):,} rows of whole documents, {filled / (len(rows) * self.sequence_length):.0%} "
            f"filled; the loss counts {int(counts.sum()) / filled:.0%} of the tokens"
        )
        if long:
            done = "dropped" if self.long_documents == "drop" else "cut"
            summary += f"; {long:,} of {starts.size:,} documents are longer than a row and {done}"
        if unlearned := int((~kept & (lengths > 0)).sum()):
            summary += f"; {unlearned:,} documents without tokens that the loss counts are dropped"
        object.__setattr__(self, "summary", summary)
        object.__setattr__(self, "_whole", rows)

    def _count_loss_tokens(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], pulse: Pulse
    ) -> NDArray[np.int64]:
        """Return the number of tokens of each document that the loss counts. The first token never counts."""
        if not self.stream.has_mask:
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


def _measure_documents(
    starts: NDArray[np.int64], size: int, length: int, long_documents: LongDocuments
) -> tuple[NDArray[np.int64], int]:
    """Return the tokens of each document that a row of whole documents holds, and the number of longer documents.

    A document of n tokens counts n - 1, at most `length`, and 0 if it is dropped.

    Args:
        starts: start of each document, [documents].
        size: end of the last document.
    """
    lengths = np.maximum(np.diff(starts, append=size) - 1, 0)
    long = lengths > length
    return np.where(long, 0 if long_documents == "drop" else length, lengths), int(long.sum())


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
        lengths, _ = _measure_documents(starts, size, length, long_documents)
        with_limit, without = (Lengths(lengths[lengths > 0], length, n).rows for n in (limit, 0))
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
