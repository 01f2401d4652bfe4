"""Log-probabilities of the tokens of given texts, each by the tokens before it.

Letters: B rows, S tokens of a row, K most likely tokens.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.compiler.xla_options import compiler_options
from jaxopt_llm.config import BATCH_AXES, RematConfig
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.decode import MAX_FILL_TOKENS
from jaxopt_llm.execution.sampling import read_log_probabilities
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.placement import Placement

SHORTEST_ROW = 128  # tokens of a prompt that is read; rows are this long, or 2, 4, 8, ... times as long
CHUNKS = 16  # of a row; the logits of only one chunk exist at a time


class PromptScores(NamedTuple):
    """Scores of the tokens of a prompt after its first one.

    Attributes:
        own: log-probability of each token.
        ids, highest: the most likely tokens in its place and their log-probabilities, highest first, each [K].
    """

    own: list[float]
    ids: list[list[int]]
    highest: list[list[float]]


class PromptReader:
    """Reader of the log-probabilities of the tokens of prompts.

    A prompt is a row, as in training. The logits of a row exist only in chunks.

    Args:
        model, placement: as of the parameters.
        vocabulary_size: without padding.
        most_likely: K.
    """

    def __init__(self, model: Model, placement: Placement, vocabulary_size: int, most_likely: int = 0) -> None:
        self._groups = placement.size(*BATCH_AXES)  # of devices, which divide the rows
        self._replicated = placement.replicated

        def read(non_layer: Params, x: jax.Array, batch: Batch, context: Context) -> tuple[jax.Array, ...]:
            def read_chunk(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
                logits = model.logits(non_layer, chunk[0], context)[..., :vocabulary_size]
                return read_log_probabilities(logits, chunk[1], min(most_likely, vocabulary_size))

            def split(field: jax.Array) -> jax.Array:  # [B, S, ...] to [CHUNKS, B, S / CHUNKS, ...]
                return jnp.moveaxis(field.reshape(field.shape[0], CHUNKS, -1, *field.shape[2:]), 1, 0)

            found = jax.lax.map(read_chunk, (split(x), split(batch.targets)))
            return tuple(jnp.moveaxis(each, 0, 1).reshape(*batch.tokens.shape, *each.shape[3:]) for each in found)

        self._compute = jax.jit(
            functools.partial(scan.read_tokens, read, model, placement=placement, remat=RematConfig("none")),
            out_shardings=placement.replicated,
            compiler_options=compiler_options(placement.mesh),
        )

    def read(self, params: Params, prompts: Sequence[Sequence[int]]) -> list[PromptScores]:
        """Return the scores of each prompt. Those of similar length are read together. params: by layer."""
        by_length = defaultdict[int, list[int]](list)
        for index, prompt in enumerate(prompts):
            by_length[max(1 << (len(prompt) - 1).bit_length(), SHORTEST_ROW)].append(index)
        found = [PromptScores([], [], [])] * len(prompts)
        for length, members in by_length.items():
            count = self._groups * max(MAX_FILL_TOKENS // (length * self._groups), 1)
            for first in range(0, len(members), count):
                some = members[first : first + count]
                rows = self._groups << (-(-len(some) // self._groups) - 1).bit_length()  # few programs
                values = self._read_rows(params, [prompts[index] for index in some], rows, length)
                for index, *scores in zip(some, *values, strict=False):
                    tokens = len(prompts[index]) - 1  # rows are padded
                    found[index] = PromptScores(*(each[:tokens] for each in scores))
        return found

    def _read_rows(self, params: Params, prompts: Sequence[Sequence[int]], rows: int, length: int) -> tuple[Any, ...]:
        """Return the log-probability of each target, [B][S], and the most likely tokens with theirs, [B][S][K]."""
        tokens, targets, segment_ids, positions = np.zeros((4, rows, length), np.int32)
        for row, prompt in enumerate(prompts):
            inputs = len(prompt) - 1
            tokens[row, :inputs], targets[row, :inputs], segment_ids[row, :inputs] = prompt[:-1], prompt[1:], 1
            positions[row, :inputs] = np.arange(inputs)
        batch = Batch(tokens, targets, segment_ids > 0, segment_ids, positions)
        found = self._compute(params, jax.tree.map(self._replicate, batch))
        return tuple(np.asarray(each)[0].tolist() for each in found)

    def _replicate(self, field: NDArray[Any]) -> jax.Array:
        """Return a field [B, S] as [1, B, S] on all devices. All processes have the same values."""
        return jax.make_array_from_callback((1, *field.shape), self._replicated, lambda index: field[None][index])
