"""Continuing prompts token by token, over the same blocks as training, with a cache.

Letters: B prompts, P the longest prompt, V vocabulary, T cache length.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.execution import scan
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Params, Parts
from jaxopt_llm.parallel.mesh import BATCH_AXES
from jaxopt_llm.parallel.sharding import Placement


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


def continuations(
    parts: Parts,
    params: Params,
    prompts: Sequence[NDArray[np.int32]],
    count: int,
    vocabulary_size: int,
    sampling: Sampling,
    seed: int,
    placement: Placement,
) -> Iterator[NDArray[np.int32]]:
    """Yields the next token of every prompt, int32 [B], up to `count` times; the next is computed meanwhile.

    prompts: ids, none empty. Shorter ones are padded on the left, where their rows see nothing.
    """
    given = len(prompts)
    prompts = [*prompts, *[prompts[-1]] * (-given % placement.size(*BATCH_AXES))]  # a batch divides over devices
    longest = max(prompt.size for prompt in prompts)
    padding = np.array([longest - prompt.size for prompt in prompts], np.int32)
    padded = np.stack([np.pad(prompt, (longest - prompt.size, 0)) for prompt in prompts])

    def context(first: Any, tokens: int) -> Context:
        slots = first + jnp.arange(tokens, dtype=jnp.int32)
        positions = slots - padding[:, None]
        return Context(
            positions, (positions >= 0).astype(jnp.int32), placement, cache_index=first, cache_padding=padding
        )

    def step(params: Params, caches: Any, tokens: jax.Array, first: jax.Array, index: jax.Array) -> tuple[Any, Any]:
        logits, caches = scan.forward(parts, params, tokens, context(first, tokens.shape[1]), caches, last=True)
        return choose(logits[:, -1, :vocabulary_size], sampling, jnp.uint32(seed), index), caches

    compiled = jax.jit(step, donate_argnums=1)
    caches = scan.make_caches(parts, len(prompts), longest + count, placement.precision.compute_dtype)
    tokens, caches = compiled(params, caches, padded, jnp.int32(0), jnp.int32(0))
    for index in range(1, count):
        before = tokens
        tokens, caches = compiled(params, caches, tokens[:, None], jnp.int32(longest + index - 1), jnp.int32(index))
        yield np.asarray(before)[:given]
    yield np.asarray(tokens)[:given]
