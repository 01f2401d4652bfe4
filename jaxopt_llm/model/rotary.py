"""Rotary position embedding (RoPE; Su et al. 2021, arXiv:2104.09864) and its scalings for longer sequences.

Letters: B batch, S sequence, H heads, K size of the rotated part of a head.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.config import Kind, ModelConfig, RopeConfig
from jaxopt_llm.core.tree import Leaf


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of a model.

    size: K. Further features of a head stay as they are. adjacent: input features are paired with their neighbours, as
        in DeepSeek's checkpoints, instead of the first half with the second, as in Llama's. The result is in Llama's
        order in both cases: queries and keys are reordered in the same way, so their products do not change.
    """

    config: RopeConfig
    size: int
    adjacent: bool = False

    @classmethod
    def from_config(cls, config: ModelConfig, kind: Kind) -> "Rotary":
        """Return the embedding of the layers of one kind."""
        rope = config.rope.of_layers(kind)
        return cls(rope, config.of_layers(kind).rotary_dim, adjacent=rope.interleaved or config.mla.kv_rank > 0)

    def __call__(self, x: jax.Array, positions: jax.Array, lengths: Leaf = None) -> jax.Array:
        """Rotate the first K features of x, [B, S, H, ...], by its positions, int [B, S]. lengths: see Context."""
        frequencies = rotary_frequencies(self.config, self.size, lengths)
        angles = positions[..., None].astype(jnp.float32) * frequencies  # [B, S, K/2]
        cos, sin = (self.config.magnitude * function(angles)[:, :, None] for function in (jnp.cos, jnp.sin))
        wide = x[..., : self.size].astype(jnp.float32)
        if self.adjacent:
            x1, x2 = (jax.lax.slice_in_dim(wide, first, None, stride=2, axis=-1) for first in (0, 1))
        else:
            x1, x2 = jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
        return rotated if x.shape[-1] == self.size else jnp.concatenate([rotated, x[..., self.size :]], axis=-1)


def grow_queries(rope: RopeConfig, q: jax.Array, positions: jax.Array) -> jax.Array:
    """Multiply queries [B, S, H, K] by a factor that grows with their positions, int [B, S]: `rope.query_growth`."""
    counted = positions + 1 if rope.growth_layers == "nope" else positions
    length = rope.growth_length or rope.original_length
    factor = 1 + rope.query_growth * jnp.log1p((counted // length).astype(jnp.float32))
    return (q * factor[..., None, None]).astype(q.dtype)


def rotary_frequencies(rope: RopeConfig, size: int, lengths: Leaf = None) -> np.ndarray | jax.Array:
    """Return radians per token of each pair of features, float32 [K/2], or [..., K/2] if they depend on `lengths`.

    Those of pairs that do not rotate are 0.

    Args:
        rope: the settings.
        size: K.
        lengths: int [...], tokens of the document of each token; None: no document is longer than the original length.
    """
    half = size // 2
    frequencies = rope.theta ** (-np.arange(half) / half)
    if rope.rotated_pairs:
        frequencies = np.where(np.arange(half) < rope.rotated_pairs, frequencies, 0.0)
    if rope.scaling == "longrope":  # Ding et al. 2024, arXiv:2402.13753
        short, long = (
            np.asarray(frequencies / factors, np.float32) for factors in (rope.short_factors, rope.long_factors)
        )
        return short if lengths is None else jnp.where(lengths[..., None] > rope.original_length, long, short)
    if rope.scaling == "dynamic":
        unscaled = frequencies.astype(np.float32)
        if lengths is None:
            return unscaled
        # theta grows by `growth` ** (size / (size - 2)), as the lowest frequency falls by `growth`.
        growth = rope.factor * jnp.maximum(lengths / rope.original_length, 1.0) - (rope.factor - 1)
        exponents = (np.arange(half) * 2 / (size - 2)).astype(np.float32)
        return unscaled * growth[..., None] ** -exponents
    share = _unscaled_share(rope, frequencies)
    return np.asarray(frequencies * (share + (1 - share) / rope.factor), np.float32)


def _unscaled_share(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Return the share of each frequency that `rope.factor` does not lower."""
    if rope.scaling == "linear":
        return np.zeros(len(frequencies))
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    if rope.scaling == "llama3":  # Grattafiori et al. 2024, arXiv:2407.21783
        turns = rope.original_length * frequencies / (2 * math.pi)
        return np.asarray(np.clip((turns - low) / (high - low or 1e-12), 0, 1))
    # YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2): the pairs that make `high` and `low` turns over the
    # original length, with the rounding and the bounds of all implementations.
    half = len(frequencies)
    first, last = (
        half * math.log(rope.original_length / (turns * 2 * math.pi)) / math.log(rope.theta) for turns in (high, low)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    return np.asarray(1 - np.clip((np.arange(half) - first) / (last - first or 1e-3), 0, 1))


def score_scale(config: ModelConfig) -> float:
    """Return the factor of the attention scores."""
    scale = config.attention_scale or 1 / math.sqrt(config.head_dim)
    if config.rope.scaling == "yarn":
        return scale * config.rope.yarn_factor(config.rope.mscale_all_dim) ** 2
    return scale
