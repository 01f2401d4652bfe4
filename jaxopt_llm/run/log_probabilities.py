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
from jaxopt_llm.execution.decode import MAX_FILL_TOKENS
from jaxopt_llm.execution.executor import ReadTokens
from jaxopt_llm.execution.sampling import read_log_probabilities
from jaxopt_llm.kernels.support import map_chunks
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.placement import Placement

Advance = Callable[[int], Any]  # receives numbers of tokens as they are read
CHUNKS = 16  # of a row whose logits are read; those of only one chunk exist at a time
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
    """Reader of what a model says of the tokens of documents. A program serves all rows of one length.

    A row holds many documents, which do not see each other, as in training. Devices divide the rows of a batch.

    Args:
        model, placement: the model, and where its parameters are.
        vocabulary_size: number of ids.
        batch_tokens: tokens of the rows that are read at once; at least one row of each device is.
        read: what is read of each token; by default `model.read_targets`.
        waits: whether somebody waits for few documents. Fewer rows are then read at once, by programs of their own.
    """

    def __init__(
        self,
        model: Model,
        placement: Placement,
        vocabulary_size: int,
        batch_tokens: int,
        read: ReadTokens | None = None,
        waits: bool = False,
    ) -> None:
        self._vocabulary_size, self._batch_tokens, self._waits = vocabulary_size, batch_tokens, waits
        self._groups = placement.size(*BATCH_AXES)  # of devices, which divide the rows
        self._sharding = placement.activation(None, "batch", "sequence")
        read = model.read_targets if read is None else read
        self._compute = jax.jit(
            functools.partial(scan.read_tokens, read, model, placement=placement, remat=RematConfig("none")),
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
            for firsts, row, (found, is_best) in self.read_rows(params, self.pack(documents, length)):
                own = _find_documents(documents, firsts, row)
                np.add.at(sums, own, found[row.loss_mask])
                np.logical_and.at(is_greedy, own, is_best[row.loss_mask])
                read = int(np.count_nonzero(row.segment_ids))
                advance(read)
                left -= read
        advance(left)
        return sums, is_greedy

    def pack(self, documents: IndexedPiece, length: int) -> PackedRows:
        """Return rows of whole documents. Those without counted tokens, or longer than a row, are in no row."""
        return PackedRows(join_all([documents]), length, self._vocabulary_size, documents.name, "drop")

    def read_rows(self, params: Params, rows: PackedRows) -> Iterator[tuple[NDArray[Any], Batch, Any]]:
        """Yield for each row the first positions of its ranges, its fields [S], and what is read of its tokens."""
        shares = max(self._batch_tokens // (rows.sequence_length * self._groups), 1)
        if self._waits:
            shares = min(1 << (-(-len(rows) // self._groups) - 1).bit_length(), shares)
        count = shares * self._groups
        for at, batch in enumerate(read_in_order(rows, count)):
            values = jax.device_get(self._compute(params, jax.tree.map(self._place, batch)))
            of_batch = batch, jax.tree.map(lambda each: each[0], values)
            for index in range(min(count, len(rows) - at * count)):
                row, of_row = jax.tree.map(lambda each, index=index: each[index], of_batch)
                yield rows.find_ranges(at * count + index)[0], row, of_row

    def _place(self, field: NDArray[Any]) -> jax.Array:
        """Return a field of a batch on the devices. All processes have the same values."""
        return jax.make_array_from_callback((1, *field.shape), self._sharding, lambda index: field[None][index])

    def read_requests(
        self, params: Params, requests: Sequence[Request], length: int, advance: Advance = lambda tokens: None
    ) -> list[LogLikelihood]:
        """Return the log-likelihood of each continuation. Requests of similar length share rows, long ones first.

        length: maximum tokens of a row; a request has at most one more, which is only a target.
        """
        found = [LogLikelihood(0.0, True)] * len(requests)
        for row_length, members in _group(requests, length):
            documents = _join_requests([requests[index] for index in members])
            for index, *values in zip(members, *self.read(params, documents, row_length, advance), strict=True):
                found[index] = LogLikelihood(float(values[0]), bool(values[1]))
        return found

    def read_each(self, params: Params, requests: Sequence[Request], length: int) -> list[Any]:
        """Return what is read of the continuation of each request, [count, ...]; None of an empty one."""
        found: list[Any] = [None] * len(requests)
        for row_length, members in _group(requests, length):
            members = [index for index in members if requests[index].count]
            documents = _join_requests([requests[index] for index in members])
            for firsts, row, values in self.read_rows(params, self.pack(documents, row_length)) if members else ():
                own = _find_documents(documents, firsts, row)
                for place in np.unique(own):
                    is_own = np.flatnonzero(row.loss_mask)[own == place]
                    found[members[place]] = jax.tree.map(lambda each, is_own=is_own: each[is_own], values)
        return found


def make_prompt_reader(
    model: Model, placement: Placement, vocabulary_size: int, most_likely: int = 0
) -> DocumentReader:
    """Return the reader of the tokens of prompts, by what `read_log_probabilities` returns of each.

    The logits of a row exist only in chunks.

    most_likely: number of the most likely tokens that are read in the place of each.
    """

    def read(non_layer: Params, x: jax.Array, batch: Batch, context: Context) -> tuple[jax.Array, ...]:
        def read_chunk(x: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
            logits = model.logits(non_layer, x, context)[..., :vocabulary_size]
            return read_log_probabilities(logits, targets, min(most_likely, vocabulary_size))

        return map_chunks(read_chunk, -(-x.shape[1] // CHUNKS), x, batch.targets)

    return DocumentReader(model, placement, vocabulary_size, MAX_FILL_TOKENS, read, waits=True)


def make_requests(prompts: Sequence[Sequence[int]]) -> list[Request]:
    """Return requests for all tokens of prompts but the first ones, which nothing predicts."""
    return [Request(prompt, len(prompt) - 1) for prompt in prompts]


def _group(requests: Sequence[Request], length: int) -> list[tuple[int, list[int]]]:
    """Return the lengths of rows, the longest first, with the indices of their requests."""
    by_length = defaultdict[int, list[int]](list)
    for index, request in enumerate(requests):
        by_length[choose_row_length(len(request.tokens) - 1, length)].append(index)
    return sorted(by_length.items(), reverse=True)


def _find_documents(documents: IndexedPiece, firsts: NDArray[Any], row: Batch) -> NDArray[np.int64]:
    """Return the document of each token of a row that counts, given the first positions of its ranges."""
    places: NDArray[np.int64] = documents.ends[:].searchsorted(firsts, side="right")
    return places[row.segment_ids[row.loss_mask] - 1]


def choose_row_length(tokens: int, length: int) -> int:
    """Return the length of the rows of requests with this number of input tokens; at most `length`."""
    return min(max(1 << (tokens - 1).bit_length(), SHORTEST_ROW), length)


def _join_requests(requests: Sequence[Request]) -> IndexedPiece:
    """Return requests as documents of which the loss counts the continuations."""
    sizes = np.array([len(request.tokens) for request in requests], np.int64)
    ends, counts = np.cumsum(sizes), np.array([request.count for request in requests], np.int64)
    tokens = np.concatenate([np.asarray(request.tokens, np.int64) for request in requests])
    mask = np.arange(tokens.size) >= np.repeat(ends - counts, sizes)
    return IndexedPiece("the requests", tokens, ends, np.zeros(ends.size, np.uint64), mask=mask)
