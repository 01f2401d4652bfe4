"""Documents laid end to end and cut into rows of one length; only the last row may be padded."""

from dataclasses import dataclass

import jax
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.data.tokens import TokenStream
from jaxopt_llm.errors import InputError
from jaxopt_llm.model.batch import Batch


@dataclass(frozen=True, eq=False)
class PackedRows:
    """A random-access source of rows, for Grain: `rows[i]` is a Batch of NumPy arrays, each [S].

    Row i reads stream positions i*S to i*S + S: the first S are its tokens, the last S its targets. So one pass over
    all rows reads every token of the stream but the last once, and has every token but the first as a target once;
    targets that begin a document are masked. A document that continues from the row before is a new segment, whose
    positions restart at 0: rows are independent. What the stream lacks of the last row is padding: zeros, in a segment
    0 of its own, masked.

    Raises:
        InputError: the stream does not fill one row; from `rows[i]`, an id that is none of the model's.
    """

    stream: TokenStream
    sequence_length: int
    vocabulary_size: int
    name: str = "the corpus"

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise InputError(f"training.sequence_length is {self.sequence_length}: it must be at least 1")
        if self.stream.size <= self.sequence_length:
            raise InputError(
                f"{self.name} has {self.stream}, but one row of training.sequence_length "
                f"{self.sequence_length} reads {self.sequence_length + 1}: shorten it or add documents"
            )

    def __len__(self) -> int:
        return -(-(self.stream.size - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = index * self.sequence_length
        count = min(self.sequence_length + 1, self.stream.size - first)
        window = self.stream.read(first, count)  # [S + 1], or fewer at the stream's end
        self._check_ids(window, first)
        begins = np.zeros(count, bool)
        begins[self.stream.borders(first, count) - first] = True
        begins[0] = True  # a document from the row before is a new segment
        at = np.arange(count)
        row = Batch(
            tokens=window[:-1].astype(np.int32),
            targets=window[1:].astype(np.int32),
            loss_mask=~begins[1:],
            segment_ids=np.cumsum(begins)[:-1].astype(np.int32),
            positions=(at - np.maximum.accumulate(np.where(begins, at, 0)))[:-1].astype(np.int32),
        )
        if count > self.sequence_length:
            return row
        padded: Batch = jax.tree.map(lambda field: np.pad(field, (0, self.sequence_length + 1 - count)), row)
        return padded

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
