"""Documents laid end to end and cut into rows of one length: anywhere, or between documents."""

from dataclasses import dataclass, field

import jax
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.data.config import LongDocuments
from jaxopt_llm.data.tokens import TokenStream
from jaxopt_llm.errors import InputError
from jaxopt_llm.model.batch import Batch


@dataclass(frozen=True, eq=False)
class PackedRows:
    """A random-access source of rows, for Grain: `rows[i]` is a Batch of NumPy arrays, each [S].

    Where documents are split, row i reads stream positions i*S to i*S + S: the first S are its tokens, the last S its
    targets. So one pass over all rows reads every token of the stream but the last once, and has every token but the
    first as a target once; targets that begin a document are masked, and what conversations mask. A document that
    continues from the row before is a new segment, whose positions restart at 0: rows are independent.

    Else a row is as many whole documents, next to each other in the stream, as it has room for; of one that is longer,
    the beginning alone, or nothing. A row in which nothing would be learnt is left out.

    What a row lacks is padding: zeros, in a segment 0 of its own, masked.

    Args:
        long_documents: as data.long_documents.

    Raises:
        InputError: the stream does not fill one row, or nothing is learnt from it; from `rows[i]`, an id that is none
            of the model's.
    """

    stream: TokenStream
    sequence_length: int
    vocabulary_size: int
    name: str = "the corpus"
    long_documents: LongDocuments = "auto"
    packing: str = field(init=False, default="")  # what is to be told of it
    _bounds: NDArray[np.int64] | None = field(init=False, default=None)  # [rows, 2]: what each reads, [first, last)

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise InputError(f"training.sequence_length is {self.sequence_length}: it must be at least 1")
        if self.long_documents in ("cut", "drop") or (self.long_documents == "auto" and self.stream.masked):
            self._pack_whole(drop=self.long_documents == "drop")
            return
        if self.stream.size <= self.sequence_length:
            raise InputError(
                f"{self.name} has {self.stream}, but one row of training.sequence_length "
                f"{self.sequence_length} reads {self.sequence_length + 1}: shorten it or add documents"
            )

    def __len__(self) -> int:
        if self._bounds is not None:
            return len(self._bounds)
        return -(-(self.stream.size - 1) // self.sequence_length)

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
        begins = np.zeros(count, bool)
        begins[self.stream.borders(first, count) - first] = True
        begins[0] = True  # a document from the row before is a new segment
        at = np.arange(count)
        row = Batch(
            tokens=window[:-1].astype(np.int32),
            targets=window[1:].astype(np.int32),
            loss_mask=(~begins & self.stream.mask(first, count))[1:],
            segment_ids=np.cumsum(begins)[:-1].astype(np.int32),
            positions=(at - np.maximum.accumulate(np.where(begins, at, 0)))[:-1].astype(np.int32),
        )
        if count > self.sequence_length:
            return row
        padded: Batch = jax.tree.map(lambda field: np.pad(field, (0, self.sequence_length + 1 - count)), row)
        return padded

    def _pack_whole(self, drop: bool) -> None:
        begins = self.stream.borders(0, self.stream.size)
        bounds, long = whole_documents(begins, self.stream.size, self.sequence_length + 1, drop)
        counts = [self._learnt(first, last) for first, last in bounds]
        table = np.array([each for each, count in zip(bounds, counts, strict=True) if count], np.int64)
        if not table.size:
            raise InputError(
                f"{self.name} has {self.stream}, but no row of training.sequence_length {self.sequence_length} of them "
                "has anything to learn: lengthen it, or add documents"
            )
        filled = int((table[:, 1] - table[:, 0] - 1).sum())
        told = (
            f"{self.name}: {len(table):,} rows of whole documents, {filled / (len(table) * self.sequence_length):.0%} "
            f"filled, {sum(counts) / filled:.0%} of that learnt"
        )
        if long:
            told += f"; {long:,} of {begins.size:,} documents are longer, and {'left out' if drop else 'cut'}"
        if len(bounds) > len(table):
            told += f"; {len(bounds) - len(table):,} rows without anything to learn left out"
        object.__setattr__(self, "packing", told)
        object.__setattr__(self, "_bounds", table)

    def _learnt(self, first: int, last: int) -> int:
        """How many tokens of a row the loss counts: a document's first is none of them."""
        mask = self.stream.mask(first, last - first)
        mask[self.stream.borders(first, last - first) - first] = False
        return int(mask.sum())

    def _check_ids(self, window: NDArray[np.int64], first: int) -> None:
        """On the device, where the embedding table is read, another id would become some token in silence."""
        if window.min() >= 0 and window.max() < self.vocabulary_size:
            return
        at = int(((window < 0) | (window >= self.vocabulary_size)).argmax())
        raise InputError(
            f"{self.stream.where(first + at)} has the token id {window[at]}, outside "
            f"model.vocabulary_size={self.vocabulary_size}: raise it, or read this data with the tokenizer that it was "
            "made for"
        )


def whole_documents(begins: NDArray[np.int64], size: int, most: int, drop: bool) -> tuple[list[tuple[int, int]], int]:
    """Rows [first, last) of as many documents as `most` tokens hold, and how many documents alone are longer: of these
    a row is the beginning, or there is none.

    Args:
        begins: where each document begins [documents].
        size: where the last one ends.
    """
    ends = np.append(begins[1:], size)
    rows, document, long = [], 0, 0
    while document < begins.size:
        first = int(begins[document])
        after = int(ends.searchsorted(first + most, side="right"))  # the documents before it fit
        if after > document:
            rows.append((first, int(ends[after - 1])))
        else:
            long += 1
            if not drop:
                rows.append((first, first + most))
        document = max(after, document + 1)
    return rows, long
