"""Log-likelihoods of continuations: requests packed into rows, and the rows scored in batches."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.compiler.xla_options import compiler_options
from jaxopt_llm.config import BATCH_AXES, RematConfig
from jaxopt_llm.data.rows.packing import BestFit
from jaxopt_llm.execution import scan
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.model.batch import Batch

Advance = Callable[[int], Any]
SHORTEST_ROW = 128  # tokens; rows are this long, or 2, 4, 8, ... times as long, so that few programs are compiled


@dataclass(frozen=True)
class Request:
    """Tokens whose end is scored.

    tokens: context and continuation, [N]; the context has at least one token.
    scored: number of tokens of the continuation, below N.
    """

    tokens: Sequence[int]
    scored: int


class Score(NamedTuple):
    """Log-likelihood of a continuation, and whether each of its tokens is the most likely one."""

    log_likelihood: float
    is_greedy: bool


class Scorer:
    """Scorer of requests with a model.

    A row holds many requests, which do not see each other, as in training. Requests of similar length share rows.

    Args:
        source: the model.
        length: maximum number of tokens that the model reads; a request has at most one more, which is only a target.
        batch_tokens: tokens of the rows that are computed at once; at least one row is.
    """

    def __init__(self, source: LoadedModel, length: int, batch_tokens: int) -> None:
        self._params, self._length, self._batch_tokens = source.params, length, batch_tokens
        self._divisor = source.placement.size(*BATCH_AXES)
        self._compute = jax.jit(
            functools.partial(
                scan.read_tokens,
                source.model.score_targets,
                source.model,
                placement=source.placement,
                remat=RematConfig("none"),
            ),
            compiler_options=compiler_options(source.placement.mesh),
        )

    def __call__(self, requests: Sequence[Request], advance: Advance = lambda count: None) -> list[Score]:
        """Return the score of each request. Long requests are computed first.

        advance: callback that gets the number of requests of each batch once it is computed.
        """
        by_length = defaultdict[int, list[int]](list)
        for index, request in enumerate(requests):
            if request.scored:
                by_length[choose_row_length(len(request.tokens) - 1, self._length)].append(index)
        scores = [Score(0.0, True)] * len(requests)
        for row_length, members in sorted(by_length.items(), reverse=True):
            found = self._score_rows([requests[index] for index in members], row_length, advance)
            for index, score in zip(members, found, strict=True):
                scores[index] = score
        return scores

    def _score_rows(self, requests: Sequence[Request], row_length: int, advance: Advance) -> list[Score]:
        """Return the score of each request, computed in rows of this length."""
        stream = np.concatenate([np.asarray(request.tokens, np.int32) for request in requests])
        sizes = np.array([len(request.tokens) for request in requests], np.int64)
        ends = np.cumsum(sizes)
        packing = BestFit(ends - sizes, sizes - 1, row_length, limit=0)
        # Of each token of the stream as a target.
        log_probability, most_likely = np.zeros(stream.size, np.float64), np.zeros(stream.size, np.bool)
        count = max(self._batch_tokens // row_length, 1)
        count += -count % self._divisor  # the batch is split over devices
        for first in range(0, len(packing), count):
            documents = [packing.find_documents(row, None) for row in range(first, min(first + count, len(packing)))]
            batch, targets = make_batch(stream, documents, count, row_length)
            found = self._compute(self._params, jax.tree.map(lambda field: jnp.asarray(field[None]), batch))
            at = targets[targets > 0]
            log_probability[at], most_likely[at] = (np.asarray(field[0])[targets > 0] for field in found)
            advance(sum(starts.size for starts, _ in documents))
        return [
            Score(float(log_probability[part].sum()), bool(most_likely[part].all()))
            for part in (slice(end - each.scored, end) for end, each in zip(ends.tolist(), requests, strict=True))
        ]


def choose_row_length(tokens: int, length: int) -> int:
    """Return the length of the rows of requests with this number of input tokens; at most `length`."""
    return min(max(1 << (tokens - 1).bit_length(), SHORTEST_ROW), length)


def make_batch(
    stream: NDArray[np.int32],
    documents: Sequence[tuple[NDArray[np.int64], NDArray[np.int32]]],
    count: int,
    row_length: int,
) -> tuple[Batch, NDArray[np.int64]]:
    """Return a batch of rows, fields [count, row_length], and the position of each target in the stream; 0: no target.

    Args:
        stream: tokens of all documents.
        documents: of each row, the start of each document in the stream and its number of input tokens. The token after
            them is only a target.
        count: number of rows; rows without documents are padding.
        row_length: tokens of a row.
    """
    segment_ids, positions = np.zeros((2, count, row_length), np.int32)
    targets = np.zeros((count, row_length), np.int64)
    for row, (starts, sizes) in enumerate(documents):
        segments = np.repeat(np.arange(sizes.size), sizes)
        within = np.arange(segments.size) - (np.cumsum(sizes) - sizes)[segments]
        segment_ids[row, : segments.size], positions[row, : segments.size] = segments + 1, within
        targets[row, : segments.size] = starts[segments] + within + 1
    is_token = segment_ids > 0
    tokens = np.where(is_token, stream[targets - is_token], 0)
    return Batch(tokens, np.where(is_token, stream[targets], 0), is_token, segment_ids, positions), targets
