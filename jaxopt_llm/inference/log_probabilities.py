"""Log-probabilities of documents by a model: whole documents packed into rows, and the rows read in batches."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.compiler.xla_options import compiler_options
from jaxopt_llm.config import BATCH_AXES, RematConfig
from jaxopt_llm.data.rows.loader import read_in_order
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens.pieces import IndexedPiece, join_all
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.executor import ReadTokens
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.placement import Placement

Advance = Callable[[int], Any]  # receives numbers of tokens as they are read
# A row, fields [S]; the first position of each of its documents; and what was read of its tokens, two arrays [S, ...].
ReadRow = tuple[Batch, NDArray[np.int64], list[NDArray[Any]]]
SHORTEST_ROW = 128  # tokens; rows are this long, or 2, 4, 8, ... times as long, so that few programs are compiled


@dataclass(frozen=True)
class Request:
    """Tokens whose end is predicted.

    tokens: context and continuation, [N]; the context has at least one token.
    count: number of tokens of the continuation, below N.
    """

    tokens: Sequence[int]
    count: int


class LogLikelihood(NamedTuple):
    """Log-likelihood of a continuation, and whether each of its tokens is the most likely one."""

    value: float
    is_greedy: bool


class DocumentReader:
    """Reader of what a model says of documents. A program serves all rows of one length.

    A row holds many documents, which do not see each other, as in training. Devices divide the rows of a batch.

    Args:
        model, placement: the model, and where its parameters are.
        vocabulary_size: number of ids.
        batch_tokens: tokens of the rows that are read at once; at least one row of each device is.
        read: what is read of each token, two arrays; by default what `read` needs, `model.read_targets`.
    """

    def __init__(
        self,
        model: Model,
        placement: Placement,
        vocabulary_size: int,
        batch_tokens: int,
        read: ReadTokens | None = None,
    ) -> None:
        self._vocabulary_size, self._batch_tokens = vocabulary_size, batch_tokens
        self._groups = placement.size(*BATCH_AXES)  # of devices, which divide the rows
        self._sharding = placement.activation(None, "batch", "sequence")
        self._compute = jax.jit(
            functools.partial(
                scan.read_tokens,
                read or model.read_targets,
                model,
                placement=placement,
                remat=RematConfig("none"),
            ),
            out_shardings=placement.replicated,
            compiler_options=compiler_options(placement.mesh),
        )

    def read(
        self, params: Params, documents: IndexedPiece, length: int, advance: Advance
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return the log-probability of each document, [documents], and whether each of its tokens is most likely.

        It is the sum over the tokens that the loss counts, and NaN for a document that is longer than a row.

        Args:
            params: parameters of the model.
            documents: with a mask.
            length: tokens of a row.
            advance: together, the numbers of tokens that it receives are those of the documents.
        """
        assert documents.mask is not None
        ends = documents.ends[:]
        starts = np.append(0, ends[:-1])
        before = np.append(0, np.cumsum(documents.mask[:]))  # tokens that count before each position
        counts = before[ends] - before[starts + 1]  # nothing predicts the first token of a document
        is_long = ends - starts - 1 > length
        sums, is_greedy = np.where(is_long, np.nan, 0.0), ~is_long
        left = documents.size
        if np.any(counts[~is_long]):
            for row, firsts, (found, is_best) in self.read_rows(params, documents, length):
                counted, places = row.loss_mask, ends.searchsorted(firsts, side="right")
                own = places[row.segment_ids[counted] - 1]  # the document of each token that counts
                np.add.at(sums, own, found[counted])
                np.logical_and.at(is_greedy, own, is_best[counted])
                read = int(np.count_nonzero(row.segment_ids))
                advance(read)
                left -= read
        advance(left)
        return sums, is_greedy

    def read_rows(self, params: Params, documents: IndexedPiece, length: int) -> Iterator[ReadRow]:
        """Yield rows of whole documents, with the first position of each document and what was read of each token.

        Documents without tokens that the loss counts, or longer than a row, are in no row. Arguments as of `read`.

        Raises:
            InputError: no document is in a row.
        """
        rows = PackedRows(join_all([documents]), length, self._vocabulary_size, documents.name, "drop")
        count = self._groups * max(self._batch_tokens // (length * self._groups), 1)
        for at, batch in enumerate(read_in_order(rows, count)):
            found = [np.asarray(each)[0] for each in self._compute(params, jax.tree.map(self._place, batch))]
            for row in range(min(count, len(rows) - at * count)):
                firsts, _ = rows.find_ranges(at * count + row)
                yield jax.tree.map(lambda field, row=row: field[row], batch), firsts, [each[row] for each in found]

    def _place(self, field: NDArray[Any]) -> jax.Array:
        """Return a field of a batch on the devices. All processes have the same values."""
        return jax.make_array_from_callback((1, *field.shape), self._sharding, lambda index: field[None][index])

    def read_requests(
        self, params: Params, requests: Sequence[Request], length: int, advance: Advance = lambda tokens: None
    ) -> list[LogLikelihood]:
        """Return the log-likelihood of each continuation. Requests of similar length share rows, long ones first.

        length: maximum tokens of a row; a request has at most one more, which is only a target.
        """
        by_length = defaultdict[int, list[int]](list)
        for index, request in enumerate(requests):
            by_length[choose_row_length(len(request.tokens) - 1, length)].append(index)
        found = [LogLikelihood(0.0, True)] * len(requests)
        for row_length, members in sorted(by_length.items(), reverse=True):
            documents = _join_requests([requests[index] for index in members])
            for index, *values in zip(members, *self.read(params, documents, row_length, advance), strict=True):
                found[index] = LogLikelihood(float(values[0]), bool(values[1]))
        return found


def choose_row_length(tokens: int, length: int) -> int:
    """Return the length of the rows of requests with this number of input tokens; at most `length`."""
    return min(max(1 << (tokens - 1).bit_length(), SHORTEST_ROW), length)


def _join_requests(requests: Sequence[Request]) -> IndexedPiece:
    """Return requests as documents of which the loss counts the continuations."""
    sizes = np.array([len(request.tokens) for request in requests], np.int64)
    ends, counts = np.cumsum(sizes), np.array([request.count for request in requests], np.int64)
    tokens = np.concatenate([np.asarray(request.tokens, np.int64) for request in requests])
    mask = np.arange(tokens.size) >= np.repeat(ends - counts, sizes)
    return IndexedPiece("the requests", tokens, ends, np.zeros(ends.size, np.uint64), mask)
