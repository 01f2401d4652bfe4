"""Continuing prompts token by token, over the same blocks as training, with a cache.

Letters: B prompts, S tokens at once, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.kernels.spans import Spans
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Params, Parts
from jaxopt_llm.parallel.mesh import BATCH_AXES
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.parallel.xla_options import compiler_options

PADDING = -1  # in place of an id
SHORTEST = 16  # tokens of a prompt, of which fewer cost as much


@dataclass(frozen=True)
class Sampling:
    """temperature: divides the logits; 0 takes the likeliest token. top_k: only that many likeliest tokens; 0 is all.
    top_p: only the likeliest tokens whose probabilities sum to it at least (Holtzman et al. 2020, arXiv:1904.09751)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def candidates(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits float32 [B, V] over the temperature, -inf where a token is not to be chosen. Equally likely ones at the
    border all stay."""
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = jax.lax.top_k(scaled, sampling.top_k)[0][:, -1:]
        scaled = jnp.where(scaled < least, -jnp.inf, scaled)
    if sampling.top_p < 1:
        ordered = jnp.sort(scaled, axis=-1, descending=True)
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        least = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        scaled = jnp.where(scaled < least, -jnp.inf, scaled)
    return scaled


def choose(logits: jax.Array, sampling: Sampling, seed: jax.Array, index: jax.Array) -> jax.Array:
    """The next token of each row, int32 [B]: of (seed, row, index) alone, whatever else is in the batch."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    key = jax.random.fold_in(jax.random.key(seed), index)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, candidates(logits, sampling)).astype(jnp.int32)


def make_step(
    parts: Parts, placement: Placement, vocabulary_size: int, sampling: Sampling, caches: tree.Tree
) -> Callable[..., tuple[jax.Array, tree.Tree]]:
    """step(params, caches, tokens [B, S], padding [B], first, last, seed, index) -> (tokens [B], caches): writes tokens
    from the slot `first` on and chooses what follows the one at `last`. The caches are given away, and come back placed
    as `caches` are.

    padding: slots at the start of a row that hold nothing.
    """

    def step(
        params: Params, caches: Any, tokens: jax.Array, padding: Any, first: Any, last: Any, seed: Any, index: Any
    ) -> tuple[jax.Array, Any]:
        slots = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = slots - padding[:, None]
        spans = Spans(*jnp.broadcast_arrays(padding[:, None], slots))
        context = Context(positions, spans, placement, cache_index=first)
        logits, caches = scan.forward(parts, params, tokens, context, caches, only=last)
        return choose(logits[:, 0, :vocabulary_size], sampling, seed, index), caches

    # Pinned: an array that came out otherwise than it goes in would have the program compiled again.
    results = placement.activation("batch"), jax.tree.map(lambda x: x.sharding, caches)
    options = compiler_options(placement.mesh)
    return jax.jit(step, donate_argnums=1, out_shardings=results, compiler_options=options)


class Decoder:
    """Continues prompts token by token. The keys and values of what it has read and written stay in one cache from call
    to call: of a prompt that begins as the last one did only what follows is computed.

    rows: prompts of each call; length: slots of the cache, for the longest prompt and what is added to it.
    """

    def __init__(
        self,
        parts: Parts,
        params: Params,
        placement: Placement,
        vocabulary_size: int,
        sampling: Sampling,
        seed: int,
        rows: int,
        length: int,
    ) -> None:
        self._rows, self._length = rows + -rows % placement.size(*BATCH_AXES), length  # a batch divides over devices
        self._params, self._seed, self._drawn = params, jnp.uint32(seed), 0
        # What the cache's slots hold, [B, slots]. A row that is padded to the left differs from any that is padded
        # otherwise where the first of the two begins.
        self._held = np.empty((self._rows, 0), np.int32)
        dtype = placement.precision.compute_dtype
        self._caches = jax.jit(lambda: scan.make_caches(parts, self._rows, length, dtype, placement))()
        self._step = make_step(parts, placement, vocabulary_size, sampling, self._caches)

    def __call__(self, prompts: Sequence[NDArray[np.int32]], count: int) -> Iterator[NDArray[np.int32]]:
        """Yields the next token of every prompt, int32 [B], up to `count` times; the next is computed meanwhile.

        prompts: ids, none empty. Shorter ones are padded on the left, where their rows see nothing.
        """
        given, longest = len(prompts), max(prompt.size for prompt in prompts)
        assert given <= self._rows and longest + count <= self._length
        prompts = [*prompts, *[prompts[-1]] * (self._rows - given)]
        padding = np.array([longest - prompt.size for prompt in prompts], np.int32)
        whole = np.stack([np.pad(prompt, (longest - prompt.size, 0), constant_values=PADDING) for prompt in prompts])
        begin = min(_common(self._held, whole), longest - 1)
        # Every length is a program to compile: powers of two are few. The slots after the prompt's last are written
        # again before a query comes to them. What would reach beyond the cache begins earlier instead.
        size = min(max(SHORTEST, 1 << (longest - begin - 1).bit_length()), self._length)
        begin = min(begin, self._length - size)
        piece = np.pad(np.maximum(whole[:, begin:], 0), ((0, 0), (0, size - (longest - begin))))
        self._held = whole
        tokens = self._advance(piece, padding, begin, longest - 1 - begin)
        for slot in range(longest, longest + count - 1):
            before = tokens
            tokens = self._advance(before[:, None], padding, slot, 0)
            self._held = np.concatenate([self._held, np.asarray(before)[:, None]], axis=1)
            yield self._held[:given, -1]
        yield np.asarray(tokens)[:given]

    def _advance(self, tokens: Any, padding: NDArray[np.int32], first: int, last: int) -> jax.Array:
        """Writes tokens [B, S] from the slot `first` on and draws what follows the one at `last`, [B]."""
        index, self._drawn = self._drawn, self._drawn + 1
        where = map(jnp.int32, (first, last))
        drawn, self._caches = self._step(
            self._params, self._caches, tokens, padding, *where, self._seed, jnp.int32(index)
        )
        return drawn


def _common(held: NDArray[np.int32], wanted: NDArray[np.int32]) -> int:
    """How many slots, [B, slots], begin alike in all rows."""
    shorter = min(held.shape[1], wanted.shape[1])
    same = (held[:, :shorter] == wanted[:, :shorter]).all(axis=0)
    return shorter if same.all() else int(same.argmin())
