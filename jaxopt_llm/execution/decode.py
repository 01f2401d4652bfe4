"""Token-by-token generation with a key/value cache, with the same blocks as training.

Letters: B prompts, S tokens per call, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.compiler.xla_options import compiler_options
from jaxopt_llm.config import BATCH_AXES
from jaxopt_llm.core import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.kernels.attention_types import KeyRanges
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.placement import Placement

PADDING_ID = -1  # marks padded slots
MIN_PREFILL = 16  # minimum length of a prompt's computation; fewer tokens would not be cheaper
# A step reads all slots of the cache, so the cache grows with the text. Each of its sizes needs a program of its own:
# the sizes are SMALLEST_CACHE times 1, 1.5, 2, 3, 4, 6 and so on, and begin where the cache has this share of the
# weights' bytes. Below it there is little to save.
SMALLEST_CACHE = 256
SMALL_SHARE = 1 / 8


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling.

    Attributes:
        temperature: divides the logits; 0 selects the most likely token.
        top_k: sample only from the k most likely tokens; 0 means all.
        top_p: sample only from the most likely tokens whose probabilities sum to at least this value (nucleus sampling,
            Holtzman et al. 2020, arXiv:1904.09751).
        seed: seed of the random numbers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Return logits float32 [B, V], divided by the temperature; -inf for tokens outside top-k or top-p.

    Tokens with the same logit as the least likely remaining token remain too.
    """
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


def sample_tokens(logits: jax.Array, sampling: Sampling, seed: jax.Array, index: jax.Array) -> jax.Array:
    """Return the next token of each row, int32 [B].

    The random numbers depend only on (seed, row, index), not on the other rows of the batch.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    key = jax.random.fold_in(jax.random.key(seed), index)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, filter_logits(logits, sampling)).astype(jnp.int32)


def choose_slots(needed: int, most: int) -> int:
    """Return the smallest size of a cache with at least `needed` slots; at most `most`."""
    size = SMALLEST_CACHE  # a power of two
    while size < needed:
        # 2^n -> 3 · 2^(n - 1) -> 2^(n + 1)
        size = size * 4 // 3 if size % 3 == 0 else size * 3 // 2
    return min(size, most)


def make_step(
    model: Model, placement: Placement, vocabulary_size: int, sampling: Sampling, caches: tree.Tree
) -> Callable[..., tuple[jax.Array, tree.Tree]]:
    """Return the compiled function of one generation step.

    step(params, caches, tokens [B, S], padding [B], first, last, seed, index) -> (tokens [B], caches)

    It writes the keys and values of tokens to the cache slots from `first`, and returns the token after position `last`
    of `tokens`. `padding` is the number of unused slots at the start of each row. The input caches are donated; the
    output caches have the same shardings as `caches`.
    """

    def step(
        params: Params, caches: Any, tokens: jax.Array, padding: Any, first: Any, last: Any, seed: Any, index: Any
    ) -> tuple[jax.Array, Any]:
        slots = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = slots - padding[:, None]
        key_ranges = KeyRanges(*jnp.broadcast_arrays(padding[:, None], slots))
        lengths = (first + last + 1 - padding)[:, None]
        context = Context(positions, key_ranges, placement, cache_index=first, lengths=lengths)
        logits, caches = scan.forward(model, params, tokens, context, caches, only=last)
        return sample_tokens(logits[:, 0, :vocabulary_size], sampling, seed, index), caches

    # Fixed output shardings: an output whose sharding differs from the input's would cause a recompilation. Every
    # process of a job reads all tokens.
    results = placement.replicated, jax.tree.map(lambda x: x.sharding, caches)
    options = compiler_options(placement.mesh)
    return jax.jit(step, donate_argnums=1, out_shardings=results, compiler_options=options)


class TokenGenerator:
    """Generator of tokens after prompts.

    The keys and values of prompts and generated tokens stay in the cache between calls. If the next prompts start with
    the same tokens, only the rest is computed. The cache grows with the text, up to `length` slots.

    Args:
        model: the model.
        params: its parameters by layer.
        placement: shardings of parameters and cache.
        vocabulary_size: V, without padding.
        sampling: settings of sampling.
        rows: prompts per call.
        length: maximum slots of the cache, enough for the longest prompt and the tokens generated after it.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        placement: Placement,
        vocabulary_size: int,
        sampling: Sampling,
        rows: int,
        length: int,
    ) -> None:
        self._rows, self._length = rows + -rows % placement.size(*BATCH_AXES), length  # the batch is split over devices
        self._rope = model.rope
        self._seed, dtype = jnp.uint32(sampling.seed), placement.precision.compute_dtype
        self._make_caches = jax.jit(
            lambda slots: scan.make_caches(model, self._rows, slots, dtype, placement), static_argnums=0
        )
        one_slot = jax.eval_shape(functools.partial(self._make_caches, 1))
        slot = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(one_slot))
        # Devices divide the rows of the cache. The weights are gathered.
        share = (
            SMALL_SHARE
            * sum(x.nbytes for x in {id(x): x for x in jax.tree.leaves(params)}.values())
            * placement.size(*BATCH_AXES)
        )
        self._small = int(share // slot)
        self.load(params)
        self._step = make_step(model, placement, vocabulary_size, sampling, self._caches)

    def load(self, params: Params) -> None:
        """Use these parameters from now on, with an empty cache."""
        self._params, self._sampled = params, 0
        # Ids in the slots of the cache, [B, slots]. Rows are padded on the left. Two rows with different padding differ
        # at the slot where the first of them starts, because padded slots hold PADDING_ID.
        self._cached_ids = np.empty((self._rows, 0), np.int32)
        self._slots = choose_slots(self._small, self._length)
        self._caches: tree.Tree = self._make_caches(self._slots)

    def unload(self) -> None:
        """Free the cache and the parameters, until `load` is called. The compiled programs stay."""
        self._params, self._caches = {}, None

    def __call__(self, prompts: Sequence[NDArray[np.int32]], count: int) -> Iterator[NDArray[np.int32]]:
        """Yield the next token of every prompt, int32 [B], `count` times. The step after it runs asynchronously.

        prompts: ids of each prompt, at least one. Shorter prompts are padded on the left, and padding is masked.
        """
        given, longest = len(prompts), max(prompt.size for prompt in prompts)
        assert given <= self._rows and longest + count <= self._length
        prompts = [*prompts, *[prompts[-1]] * (self._rows - given)]
        padding = np.array([longest - prompt.size for prompt in prompts], np.int32)
        ids = np.stack([np.pad(prompt, (longest - prompt.size, 0), constant_values=PADDING_ID) for prompt in prompts])
        begin = min(_common_prefix(self._cached_ids, ids), longest - 1)
        if self._frequencies_differ(self._cached_ids.shape[1] - padding, longest - padding):
            begin = 0
        tokens = self._fill(ids, padding, begin)
        for slot in range(longest, longest + count - 1):
            previous = tokens
            # As in transformers: when a document outgrows its short factors, its keys are rotated again. With dynamic
            # scaling, the frequencies change with every token, and keys stay as they were rotated.
            if self._rope.scaling == "longrope" and self._frequencies_differ(slot - padding, slot + 1 - padding):
                tokens = self._fill(self._append(previous), padding, 0)
            else:
                self._reserve(slot + 1)
                tokens = self._advance(previous[:, None], padding, slot, 0)
                self._cached_ids = self._append(previous)
            yield self._cached_ids[:given, -1]
        yield np.asarray(tokens)[:given]

    def _append(self, tokens: jax.Array) -> NDArray[np.int32]:
        return np.concatenate([self._cached_ids, np.asarray(tokens)[:, None]], axis=1)

    def _frequencies_differ(self, lengths: NDArray[np.int32], others: NDArray[np.int32]) -> bool:
        """Return whether RoPE has other frequencies in some row if the row has another length."""
        return any(not self._rope.same_frequencies(*pair) for pair in zip(lengths, others, strict=True))

    def _fill(self, ids: NDArray[np.int32], padding: NDArray[np.int32], begin: int) -> jax.Array:
        """Write ids [B, slots] to the cache, of which it has the first `begin`, and return the token after them, [B].

        Each length needs its own compiled program, so lengths are powers of two. The slots after the last id are
        overwritten before a query attends to them. If the computation would extend beyond the cache, it starts earlier.
        """
        slots = ids.shape[1]
        self._reserve(slots)
        size = min(max(MIN_PREFILL, 1 << (slots - begin - 1).bit_length()), self._slots)
        begin = min(begin, self._slots - size)
        rest = np.pad(np.maximum(ids[:, begin:], 0), ((0, 0), (0, size - (slots - begin))))
        self._cached_ids = ids
        return self._advance(rest, padding, begin, slots - 1 - begin)

    def _reserve(self, slots: int) -> None:
        """Let the cache grow until it has this number of slots."""
        if slots > self._slots:
            self._slots = choose_slots(slots, self._length)
            # Array by array, so that only one is there twice.
            leaves, structure = jax.tree.flatten(self._caches)
            self._caches = None
            for i, x in enumerate(leaves):
                leaves[i] = _grow(x.sharding)(x, self._slots)
            self._caches = jax.tree.unflatten(structure, leaves)

    def _advance(self, tokens: Any, padding: NDArray[np.int32], first: int, last: int) -> jax.Array:
        """Write tokens [B, S] to the slots from `first`, and return the token after position `last` of them, [B]."""
        bounds, index = map(jnp.int32, (first, last)), jnp.int32(self._sampled)
        self._sampled += 1
        sampled, self._caches = self._step(self._params, self._caches, tokens, padding, *bounds, self._seed, index)
        return sampled


@functools.cache
def _grow(sharding: jax.sharding.Sharding) -> Callable[[jax.Array, int], jax.Array]:
    """Return a function that gives an array of a cache more slots."""

    def grow(x: jax.Array, slots: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), (0, 0)))

    return jax.jit(grow, static_argnums=1, out_shardings=sharding)


def _common_prefix(cached: NDArray[np.int32], ids: NDArray[np.int32]) -> int:
    """Return the number of first slots that are equal in all rows of two arrays [B, slots]."""
    shorter = min(cached.shape[1], ids.shape[1])
    same = (cached[:, :shorter] == ids[:, :shorter]).all(axis=0)
    return shorter if same.all() else int(same.argmin())
