"""Documents laid end to end and cut into rows of one length, without padding."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.data.source import Document
from jaxopt_llm.data.tokenizer import ByteTokenizer
from jaxopt_llm.errors import InputError
from jaxopt_llm.model.batch import Batch


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents end to end: `tokens` int32 [N], and where each document begins, `starts` int64 [documents]."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]


def token_stream(documents: Iterable[bytes], tokenizer: ByteTokenizer) -> TokenStream:
    """Joins documents in their order, each as beginning_of_document, its tokens, end_of_document."""
    beginning, end = np.array([[tokenizer.beginning_of_document], [tokenizer.end_of_document]], np.int32)
    pieces = [np.concatenate([beginning, tokenizer.encode(document), end]) for document in documents]
    tokens = np.concatenate([np.empty(0, np.int32), *pieces])
    tokens.flags.writeable = False  # A batch of one row is a view of the stream.
    lengths = np.array([piece.size for piece in pieces], np.int64)
    return TokenStream(tokens, starts=np.cumsum(lengths) - lengths)


def check_ids(stream: TokenStream, documents: Sequence[Document], vocabulary_size: int) -> None:
    """Raises InputError, naming the first, where an id is none of the model's: on the device, where the embedding
    table is read, it would become another token in silence."""
    outside = (stream.tokens < 0) | (stream.tokens >= vocabulary_size)
    if outside.any():
        at = int(outside.argmax())
        document = documents[int(np.searchsorted(stream.starts, at, side="right")) - 1]
        raise InputError(
            f"{document.name} has the token id {stream.tokens[at]}, outside model.vocabulary_size={vocabulary_size}: "
            "raise it, or read this data with the tokenizer that it was made for"
        )


@dataclass(frozen=True, eq=False)
class PackedRows:
    """A random-access source of rows, for Grain: `rows[i]` is a Batch of NumPy arrays, each [S].

    Row i reads stream positions i*S to i*S + S: the first S are its tokens, the last S its targets. So every token of
    the stream is a target once, except the very first and a tail of at most S - 1 that would not fill a row. A
    document that continues from the row before is a new segment, whose positions restart at 0: rows are independent.

    Raises:
        InputError: the stream does not fill one row.
    """

    stream: TokenStream
    sequence_length: int

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise InputError(f"training.sequence_length is {self.sequence_length}: it must be at least 1")
        if self.stream.tokens.size <= self.sequence_length:
            raise InputError(
                f"{self.stream.starts.size} documents hold {self.stream.tokens.size} tokens, but one row of "
                f"training.sequence_length {self.sequence_length} reads {self.sequence_length + 1}: "
                "shorten it or add documents"
            )

    def __len__(self) -> int:
        return (self.stream.tokens.size - 1) // self.sequence_length

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = index * self.sequence_length
        at = np.arange(first, first + self.sequence_length + 1)  # [S + 1] stream positions
        window = self.stream.tokens[first : first + self.sequence_length + 1]
        document = np.searchsorted(self.stream.starts, at, side="right") - 1
        segment_start = np.maximum(self.stream.starts[document], first)
        return Batch(
            tokens=window[:-1],
            targets=window[1:],
            loss_mask=document[1:] == document[:-1],
            segment_ids=(document - document[0] + 1)[:-1].astype(np.int32),
            positions=(at - segment_start)[:-1].astype(np.int32),
        )
