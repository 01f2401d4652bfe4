"""Drawing of tokens from logits, each row with settings of its own.

Letters: B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling.

    Attributes:
        temperature: divides the logits; 0 selects the most likely token.
        top_k: sample only from the k most likely tokens; 0 means all.
        top_p: sample only from the most likely tokens whose probabilities sum to at least this value (nucleus sampling,
            Holtzman et al. 2020, arXiv:1904.09751).
        min_p: sample only from tokens with at least this share of the probability of the most likely one (Nguyen et al.
            2024, arXiv:2407.01082).
        repetition_penalty: divides positive logits of tokens in the prompt or drawn before, and multiplies negative
            ones (CTRL, Keskar et al. 2019, arXiv:1909.05858). 1 means none.
        seed: seed of the random numbers.
        forced: id that is drawn in any case, so that its log-probability is known; -1 for none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    forced: int = -1

    def problems(self) -> dict[str, str]:
        """Return what each wrong setting must be, by its name."""
        valid = {
            "temperature": (lambda x: 0 <= x < float("inf"), "at least 0"),
            "top_k": (lambda x: x >= 0, "at least 0"),
            "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
            "min_p": (lambda x: 0 <= x < 1, "at least 0 and below 1"),
            "repetition_penalty": (lambda x: 0 < x < float("inf"), "above 0"),
        }
        given = {name: getattr(self, name) for name in valid}
        return {
            name: needed
            for name, (is_valid, needed) in valid.items()
            if not isinstance(given[name], int | float) or not is_valid(given[name])
        }

    @property
    def filters(self) -> bool:
        """True if some tokens are not sampled."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@struct.dataclass
class Draws:
    """Settings and random numbers of B rows.

    Attributes:
        index: int32 [B], number of tokens drawn before. number: int32 [B], of the request. Together with the seed they
            decide the random numbers.
        settings: fields of `Sampling`, each [B].
        seen: bool [B, V], tokens of the prompt and those drawn before; None if no row has a penalty.
        samples, filters: whether any row samples, or filters. They choose the program, so that a row without such
            settings costs nothing. What a row draws does not depend on them.
        most_likely: number of the most likely tokens that are returned besides the drawn one.
    """

    index: Any
    number: Any
    settings: dict[str, Any]
    seen: Any = None
    samples: bool = struct.field(default=False, pytree_node=False)
    filters: bool = struct.field(default=False, pytree_node=False)
    most_likely: int = struct.field(default=0, pytree_node=False)

    def add(self, tokens: jax.Array) -> "Draws":
        """Return the draws after these tokens [B]."""
        seen = self.seen
        if seen is not None:
            seen |= jnp.arange(seen.shape[1]) == tokens[:, None]
        return self.replace(index=self.index + 1, seen=seen)  # type: ignore[attr-defined]


def make_draws(settings: Sequence[Sampling], numbers: Sequence[int], indices: Sequence[int]) -> Draws:
    """Return the draws of rows, on the host, for a program that samples and filters nothing."""

    def gather(name: str, dtype: Any) -> NDArray[Any]:
        return np.array([getattr(each, name) for each in settings], dtype)

    reals = {name: gather(name, np.float32) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
    integers = {"top_k": gather("top_k", np.int32), "seed": gather("seed", np.uint32)}
    integers["forced"] = gather("forced", np.int32)
    return Draws(np.array(indices, np.int32), np.array(numbers, np.int32), reals | integers)


def draw_tokens(logits: jax.Array, draws: Draws) -> tuple[jax.Array, ...]:
    """Return the next token of each row, int32 [B], and its log-probability, float32 [B]. logits: float32 [B, V].

    Then follow those of the most likely tokens, each [B, draws.most_likely]. Log-probabilities are those of the logits
    as they are. Other rows change nothing.
    """
    chosen, settings = logits, draws.settings
    if draws.seen is not None:
        penalty = settings["repetition_penalty"][:, None]
        chosen = jnp.where(draws.seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    tokens = jnp.argmax(chosen, axis=-1).astype(jnp.int32)
    if draws.samples:
        sampled = jax.vmap(jax.random.categorical)(_make_keys(draws), _filter_logits(chosen, draws)).astype(jnp.int32)
        tokens = jnp.where(settings["temperature"] > 0, sampled, tokens)
    tokens = jnp.where(settings["forced"] >= 0, settings["forced"], tokens)
    return tokens, *read_log_probabilities(logits, tokens, draws.most_likely)


def read_log_probabilities(
    logits: jax.Array, tokens: jax.Array, most_likely: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the log-probabilities of tokens, int32 [...], and the most likely tokens with theirs, [..., most_likely].

    logits: float32 [..., V].
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, tokens[..., None], axis=-1) - normaliser
    highest, ids = jax.lax.top_k(logits, most_likely)
    return own[..., 0], ids, highest - normaliser


def _make_keys(draws: Draws) -> jax.Array:
    def make_key(seed: jax.Array, index: jax.Array, number: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), number)

    return jax.vmap(make_key)(draws.settings["seed"], draws.index, draws.number)


def _filter_logits(logits: jax.Array, draws: Draws) -> jax.Array:
    """Return logits [B, V] divided by the temperature; -inf for tokens that are not sampled.

    A token with the same logit as the least likely one that remains also remains.
    """
    settings = {name: values[:, None] for name, values in draws.settings.items()}
    scaled = logits / jnp.where(settings["temperature"] > 0, settings["temperature"], 1.0)
    if not draws.filters:
        return scaled
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    rank = jnp.arange(ordered.shape[1])
    stays = (settings["top_k"] == 0) | (rank < settings["top_k"])
    # top_p counts the probabilities of the tokens that top_k keeps.
    probability = jax.nn.softmax(jnp.where(stays, ordered, -jnp.inf), axis=-1)
    stays &= (jnp.cumsum(probability, axis=-1) - probability < settings["top_p"]) | (settings["top_p"] >= 1)
    stays &= probability >= settings["min_p"] * probability[:, :1]
    least = jnp.min(jnp.where(stays, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled < least, -jnp.inf, scaled)
