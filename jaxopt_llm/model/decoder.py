"""The decoder as parts: pure functions over weights, and the layout of its stacks.

An executor (execution/) decides how the parts are run; they know neither mesh nor loop.
Letters: B batch, S sequence, D width, V vocabulary (padded).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxopt_llm.kernels.cross_entropy import cross_entropy
from jaxopt_llm.model import weights
from jaxopt_llm.model.attention import Cache, attention_specs, self_attention
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.layers import rms_norm, swiglu, swiglu_specs
from jaxopt_llm.model.param import ParamSpec, normal, ones
from jaxopt_llm.model.weights import Weight
from jaxopt_llm.parallel.sharding import Placement

VOCABULARY_MULTIPLE = 128  # table rows are padded to it; a constant, so that values never depend on the mesh

Kind = Literal["global", "sliding"]
Params = dict[str, Any]


@dataclass(frozen=True)
class ModelConfig:
    vocabulary_size: int = 258
    """token ids; the byte tokenizer has 258"""
    width: int = 128
    """size of the residual stream"""
    layers: int = 4
    """number of blocks"""
    heads: int = 4
    """query heads"""
    kv_heads: int = 2
    """key-value heads, each shared by heads / kv_heads query heads"""
    head_dim: int = 32
    """size of one head; even, because rotary positions turn pairs"""
    mlp_width: int = 384
    """hidden size of the MLP"""
    pattern: tuple[Kind, ...] = ("global",)
    """attention of successive blocks, repeated: global sees the whole document, sliding the last `window` tokens"""
    window: int = 128
    """tokens that a sliding block sees, its own among them"""
    rope_theta: float = 10_000.0
    """base of the rotary frequencies"""
    norm_epsilon: float = 1e-5
    """added to the mean square in norms"""
    tied_head: bool = True
    """whether the embedding table is the head"""

    def problems(self) -> list[str]:
        found = [
            f"model.{name}={getattr(self, name)}: must be at least 1"
            for name in ("vocabulary_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width", "window")
            if getattr(self, name) < 1
        ]
        found += [
            f"model.{name}={getattr(self, name)}: must be above 0"
            for name in ("rope_theta", "norm_epsilon")
            if not getattr(self, name) > 0
        ]
        if not self.pattern:
            found.append("model.pattern: must name at least one kind of block")
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            found.append(f"model.heads={self.heads} does not divide by model.kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            found.append(f"model.head_dim={self.head_dim}: must be even")
        return found


@dataclass(frozen=True)
class Segment:
    """A period of block kinds, repeated. Its leaves are stacked [repeats, ...].

    per_layer: constants scanned beside the weights, each [repeats, period, ...]; `index` is the layer's number.
    """

    kinds: tuple[Kind, ...]
    repeats: int
    per_layer: dict[str, np.ndarray]


@struct.dataclass
class Auxiliary:
    """What a block adds beside its output: one structure for all kinds.

    loss: float32, already weighted and summed over tokens, so that the main loss's denominator serves it.
    statistics: sums for the metrics.
    """

    loss: jax.Array
    statistics: dict[str, jax.Array]

    def __add__(self, other: "Auxiliary") -> "Auxiliary":
        return jax.tree.map(jnp.add, self, other)


@dataclass(frozen=True)
class Parts:
    """A model as an executor takes it.

    specs: {"outer": leaves outside the stacks, "segment_0": stacked leaves by block, ...}.
    make_context(batch of one microbatch, placement) -> Context
    embed(outer, tokens [B, S], context) -> x [B, S, D]
    block(kind, weights, x, context, layer, cache) -> (x, cache, Auxiliary)
    logits(outer, x, context) -> float32 [B, S, V]
    head_loss(outer, x, batch, context) -> float32, the sum over real tokens
    make_cache(kind, batch, length, dtype) -> an empty cache of one layer
    zero_auxiliary() -> what a block with nothing to add returns
    """

    specs: Params
    layout: tuple[Segment, ...]
    make_context: Callable[[Batch, Placement], Context]
    embed: Callable[[Params, jax.Array, Context], jax.Array]
    block: Callable[[Kind, Params, jax.Array, Context, dict[str, jax.Array], Any], tuple[jax.Array, Any, Auxiliary]]
    logits: Callable[[Params, jax.Array, Context], jax.Array]
    head_loss: Callable[[Params, jax.Array, Batch, Context], jax.Array]
    make_cache: Callable[[Kind, int, int, Any], Any]
    zero_auxiliary: Callable[[], Auxiliary]


def layout(config: ModelConfig) -> tuple[Segment, ...]:
    """The pattern as often as it fits, and what is left of it as a second segment."""
    period = len(config.pattern)
    whole, rest = divmod(config.layers, period)
    segments = []
    for kinds, repeats, first in ((config.pattern, whole, 0), (config.pattern[:rest], 1, whole * period)):
        if kinds and repeats:
            index = first + np.arange(repeats * len(kinds), dtype=np.int32).reshape(repeats, len(kinds))
            segments.append(Segment(kinds, repeats, {"index": index}))
    return tuple(segments)


def param_specs(config: ModelConfig) -> Params:
    vocabulary = -(-config.vocabulary_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    # A row of the table is both a vector of the residual stream and, tied, a classifier over it: fan-in `width`.
    table = ParamSpec((vocabulary, config.width), ("vocabulary", "embed"), (1,), normal())
    norm = {"scale": ParamSpec((config.width,), ("embed",), (), ones)}
    outer = {"embedding": {"table": table}, "final_norm": norm}
    if not config.tied_head:
        outer["head"] = {"table": table}
    # Each block adds to the residual stream twice; its variance stays near 1 (Radford et al. 2019, GPT-2).
    residual_scale = 1 / math.sqrt(2 * config.layers)
    block = {
        "attention_norm": norm,
        "attention": attention_specs(config.width, config.heads, config.kv_heads, config.head_dim, residual_scale),
        "mlp_norm": norm,
        "mlp": swiglu_specs(config.width, config.mlp_width, residual_scale),
    }
    specs: Params = {"outer": outer}
    for number, segment in enumerate(layout(config)):
        stacked = jax.tree.map(lambda spec, repeats=segment.repeats: spec.stack(repeats), block)
        specs[f"segment_{number}"] = {f"block_{position}": stacked for position in range(len(segment.kinds))}
    return specs


def make_parts(config: ModelConfig) -> Parts:
    """The parts of a decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head."""

    def make_context(batch: Batch, placement: Placement) -> Context:
        return Context(positions=batch.positions, segment_ids=batch.segment_ids, placement=placement)

    def embed(outer: Params, tokens: jax.Array, context: Context) -> jax.Array:
        x = weights.take(outer["embedding"]["table"], tokens)
        return context.placement.constrain(x, "batch", "sequence", "embed")

    def block(
        kind: Kind, params: Params, x: jax.Array, context: Context, layer: dict[str, jax.Array], cache: Cache | None
    ) -> tuple[jax.Array, Cache | None, Auxiliary]:
        def residual(x: jax.Array, update: jax.Array) -> jax.Array:
            return context.placement.constrain(x + update, "batch", "sequence", "embed")

        def norm(name: str) -> Callable[[jax.Array], jax.Array]:
            return lambda x: rms_norm(x, params[name]["scale"], config.norm_epsilon)

        attended, cache = self_attention(
            params["attention"],
            norm("attention_norm"),
            x,
            context,
            rope_theta=config.rope_theta,
            window=config.window if kind == "sliding" else None,
            cache=cache,
        )
        x = residual(x, attended)
        x = residual(x, swiglu(params["mlp"], norm("mlp_norm"), x))
        return x, cache, zero_auxiliary()

    def logits(outer: Params, x: jax.Array, context: Context) -> jax.Array:
        x = rms_norm(x, outer["final_norm"]["scale"], config.norm_epsilon)
        table: Weight = outer["embedding" if config.tied_head else "head"]["table"]
        out = weights.einsum("BSD,VD->BSV", x, table, dtype=jnp.dtype(jnp.float32))
        return context.placement.constrain(out, "batch", "sequence", "vocabulary")

    def head_loss(outer: Params, x: jax.Array, batch: Batch, context: Context) -> jax.Array:
        losses = cross_entropy(logits(outer, x, context), batch.targets, config.vocabulary_size)
        return jnp.sum(jnp.where(batch.loss_mask, losses, 0.0))

    def zero_auxiliary() -> Auxiliary:
        return Auxiliary(loss=jnp.zeros((), jnp.float32), statistics={})

    def make_cache(kind: Kind, batch: int, length: int, dtype: Any) -> Cache:
        shape = (batch, length, config.kv_heads, config.head_dim)
        return Cache(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))

    return Parts(
        specs=param_specs(config),
        layout=layout(config),
        make_context=make_context,
        embed=embed,
        block=block,
        logits=logits,
        head_loss=head_loss,
        make_cache=make_cache,
        zero_auxiliary=zero_auxiliary,
    )
