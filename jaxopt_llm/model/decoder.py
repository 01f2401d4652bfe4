"""The decoder as parts: pure functions over weights, and the layout of its stacks.

An executor (execution/) decides how the parts are run; they know neither mesh nor loop.
Letters: B batch, S sequence, D width, V vocabulary (padded).
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.kernels.cross_entropy import Classifier
from jaxopt_llm.kernels.spans import of_documents
from jaxopt_llm.model import experts, latent_attention, layers, tables, weights
from jaxopt_llm.model.attention import Cache, attention_specs, self_attention
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.config import Kind, ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.layers import Function, Rotary
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.model.weights import Weight
from jaxopt_llm.parallel import hlo
from jaxopt_llm.parallel.sharding import Placement

VOCABULARY_MULTIPLE = 128  # table rows are padded to it; a constant, so that values never depend on the mesh

Params = dict[str, Any]


@dataclass(frozen=True)
class Segment:
    """A period of block kinds, repeated. Its leaves are stacked [repeats, ...].

    per_layer: constants scanned beside the weights, each [repeats, period, ...]; `index` is the layer's number.
    experts: which blocks of the period have a mixture of them.
    """

    kinds: tuple[Kind, ...]
    repeats: int
    per_layer: dict[str, np.ndarray]
    experts: tuple[bool, ...]


@dataclass(frozen=True)
class Parts:
    """A model as an executor takes it.

    specs: {"outer": leaves outside the stacks, "segment_0": stacked leaves by block, ...}.
    make_context(batch of one microbatch, placement) -> Context
    embed(outer, tokens [B, S], context) -> x [B, S, D]
    block(kind, weights, x, context, layer, cache) -> (x, cache, Auxiliary)
    logits(outer, x, context) -> float32 [B, S, V]
    head_loss(outer, x, batch, context, cotangent) -> (objective, loss), float32 sums over real tokens: the loss is the
        cross-entropy, a measurement; the objective, times the cotangent already, is what is differentiated
    make_cache(kind, repeats, batch, length, dtype, placement) -> empty caches of so many layers, stacked
    zero_auxiliary() -> what a block with nothing to add returns
    """

    specs: Params
    layout: tuple[Segment, ...]
    make_context: Callable[[Batch, Placement], Context]
    embed: Callable[[Params, jax.Array, Context], jax.Array]
    block: Callable[[Kind, Params, jax.Array, Context, dict[str, jax.Array], Any], tuple[jax.Array, Any, Auxiliary]]
    logits: Callable[[Params, jax.Array, Context], jax.Array]
    head_loss: Callable[[Params, jax.Array, Batch, Context, jax.Array], tuple[jax.Array, jax.Array]]
    make_cache: Callable[[Kind, int, int, int, Any, Placement], Any]
    zero_auxiliary: Callable[[], Auxiliary]


def layout(config: ModelConfig) -> tuple[Segment, ...]:
    """The period of the layers as often as it fits, and what is left of it as another segment: of the layers before the
    first with experts, of the others, and of the last layers where they are stacks of their own."""
    period = config.period
    kinds = [config.pattern[layer % len(config.pattern)] for layer in range(config.layers)]
    cuts = {0, config.dense_layers if config.experts else 0, config.layers - config.last_layers, config.layers}
    segments = []
    for begin, end in itertools.pairwise(sorted(cuts)):
        rest = end - (end - begin) % period
        for first, length, repeats in ((begin, period, (rest - begin) // period), (rest, end - rest, 1)):
            if length and repeats:
                index = first + np.arange(repeats * length, dtype=np.int32).reshape(repeats, length)
                experts = tuple(config.has_experts(layer) for layer in range(first, first + length))
                segments.append(Segment(tuple(kinds[first : first + length]), repeats, {"index": index}, experts))
    return tuple(segments)


def places(config: ModelConfig) -> list[tuple[str, int, int]]:
    """Where each layer is, in the order of the stacks: how the paths of its leaves begin, its row in them, and its
    number."""
    return [
        (f"segment_{number}/block_{i}/", row, int(layer))
        for number, segment in enumerate(layout(config))
        for row, layers in enumerate(segment.per_layer["index"])
        for i, layer in enumerate(layers)
    ]


def padded_vocabulary(size: int) -> int:
    return -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def param_specs(config: ModelConfig) -> Params:
    vocabulary = padded_vocabulary(config.vocabulary_size)
    # A row of the table is both a vector of the residual stream and, tied, a classifier over it: fan-in `width`.
    table = ParamSpec((vocabulary, config.width), ("vocabulary", "embed"), (1,), normal())
    outer = {"embedding": {"table": table}, "final_norm": _norm_specs(config, embed=config.width)}
    if config.positions == "learned":
        rows = ParamSpec((config.max_positions, config.width), ("positions", "embed"), (1,), normal())
        outer["positions"] = {"table": rows}
    if not config.tied_head:
        outer["head"] = {"table": table}
    # Each block adds to the residual stream twice; its variance stays near 1 (Radford et al. 2019, GPT-2).
    residual_scale = 1 / math.sqrt(2 * config.layers)
    dense = layers.mlp_specs(config.mlp, config.width, config.mlp_width, residual_scale, biased=config.biases == "all")
    mixture = experts.experts_specs(config, residual_scale) if config.experts else {}
    block = {
        "attention": (latent_attention.specs if config.latent_rank else attention_specs)(config, residual_scale),
        **{name: _norm_specs(config, **dims) for name, dims in _block_norms(config).items()},
    }
    specs: Params = {"outer": outer}
    for number, segment in enumerate(layout(config)):
        specs[f"segment_{number}"] = {
            f"block_{position}": jax.tree.map(
                lambda spec, repeats=segment.repeats: spec.stack(repeats), block | {"mlp": mixture if mixed else dense}
            )
            for position, mixed in enumerate(segment.experts)
        }
    return specs


def _block_norms(config: ModelConfig) -> dict[str, dict[str, int]]:
    """A block's norms, each with the dimensions that it runs over, by logical axis."""
    heads, kv_heads, head = {"heads": config.heads}, {"kv_heads": config.kv_heads}, {"head_dim": config.head_dim}
    placed = {
        "pre": ("attention_norm", "mlp_norm"),
        "post": ("attention_post_norm", "mlp_post_norm"),
        "both": ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"),
    }[config.norm_placement]
    of_qk: dict[str, dict[str, dict[str, int]]] = {
        "none": {},
        "head": {"query_norm": head, "key_norm": head},
        "projection": {"query_norm": heads | head, "key_norm": kv_heads | head},
    }
    ranks = {"latent_norm": config.latent_rank, "query_latent_norm": config.latent_rank and config.query_rank}
    of_latents = {name: {"latent": rank} for name, rank in ranks.items() if rank}
    return {name: {"embed": config.width} for name in placed} | of_qk[config.qk_norm] | of_latents


def _norm_specs(config: ModelConfig, **dims: int) -> dict[str, ParamSpec]:
    return layers.norm_specs(config.norm, config.norm_zero_centered, tuple(dims.values()), tuple(dims))


def make_parts(
    config: ModelConfig,
    loss_chunk: int = 0,
    z_loss: float = 0.0,
    attention: str = "xla",
    expert_products: str = "xla",
) -> Parts:
    """The parts of a decoder, its switches read once: see ModelConfig and TrainingConfig."""
    norm = functools.partial(layers.norm, kind=config.norm, zero_centered=config.norm_zero_centered)
    rotary = Rotary.of(config) if config.positions == "rotary" else None
    classifier = Classifier(config.vocabulary_size, config.logit_softcap, z_loss, loss_chunk)
    windows: dict[Kind, int] = {"sliding": config.window}
    turning: dict[Kind, Rotary | None] = {"global": rotary, "sliding": rotary}
    attend: Callable[..., tuple[jax.Array, Any]] = functools.partial(
        latent_attention.attention if config.latent_rank else self_attention,
        scale=layers.score_scale(config),
        softcap=config.attention_softcap or None,
        implementation=attention,
    )
    norms_of_attention = ("query_latent_norm", "latent_norm") if config.latent_rank else ("query_norm", "key_norm")

    def make_context(batch: Batch, placement: Placement) -> Context:
        # Of rows in the sequence's order, then dealt with them.
        spans = of_documents(placement.constrain(batch.segment_ids, "batch", "sequence"))
        noise = None if batch.noise is None else placement.dealt(batch.noise)
        positions, counts = map(placement.dealt, (batch.positions, batch.loss_mask))
        real = placement.dealt(batch.segment_ids) != 0 if config.experts else None
        spans = jax.tree.map(placement.dealt, spans)
        return Context(positions, spans, placement, noise=noise, counts=counts, real=real)

    def embed(outer: Params, tokens: jax.Array, context: Context) -> jax.Array:
        tokens = context.placement.dealt(tokens)
        # Not pinned whole first, which would save a permute of it: inside a pipeline XLA of jax 0.11.2 aborts.
        x = context.placement.leave(tables.take(outer["embedding"]["table"], tokens, context.placement))
        if config.scale_embedding:
            x = x * math.sqrt(config.width)
        if config.positions == "learned":
            x = x + tables.take(outer["positions"]["table"], context.positions, context.placement)
        return context.placement.constrain(x, "batch", "residual_sequence", "embed")

    def block(
        kind: Kind, params: Params, x: jax.Array, context: Context, layer: dict[str, jax.Array], cache: Any
    ) -> tuple[jax.Array, Any, Auxiliary]:
        def residual(x: jax.Array, update: jax.Array) -> jax.Array:
            return context.placement.constrain(x + update, "batch", "residual_sequence", "embed")

        def normed(name: str) -> Function:
            """This norm, or nothing in a block that has none of this name."""
            if name not in params:
                return lambda x: x
            epsilon = latent_attention.EPSILON if name.endswith("latent_norm") else config.norm_epsilon
            return functools.partial(norm, params[name], epsilon=epsilon)

        with hlo.within(windows.get(kind), context.placement.key_parts):
            attended, cache = attend(
                params["attention"],
                x,
                context,
                norm=normed("attention_norm"),
                **{name: normed(name) for name in norms_of_attention},
                rotary=turning.get(kind),
                window=windows.get(kind),
                cache=cache,
            )
        x = residual(x, normed("attention_post_norm")(attended))
        if "router" in params["mlp"]:
            transformed, added = experts.mixture(
                params["mlp"],
                x,
                context,
                layer["index"],
                norm=normed("mlp_norm"),
                config=config,
                products=expert_products,
            )
        else:
            transformed = layers.mlp(params["mlp"], x, context, norm=normed("mlp_norm"), kind=config.mlp)
            added = zero_auxiliary()
        x = residual(x, normed("mlp_post_norm")(transformed))
        return x, cache, added

    def head(outer: Params, x: jax.Array, context: Context) -> tuple[jax.Array, Weight]:
        """The head's input, with all its positions, and the table."""
        table: Weight = outer["embedding" if config.tied_head else "head"]["table"]
        return context.placement.enter(norm(outer["final_norm"], x, epsilon=config.norm_epsilon)), table

    def logits(outer: Params, x: jax.Array, context: Context) -> jax.Array:
        out = weights.einsum("BSD,VD->BSV", *head(outer, x, context), dtype=jnp.dtype(jnp.float32))
        if config.logit_softcap:
            out = config.logit_softcap * jnp.tanh(out / config.logit_softcap)
        return context.placement.constrain(out, "batch", "sequence", "vocabulary")

    def head_loss(
        outer: Params, x: jax.Array, batch: Batch, context: Context, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        tokens = context.placement.dealt(batch.targets), context.placement.dealt(batch.loss_mask)
        return tables.cross_entropy(*head(outer, x, context), tokens, cotangent, classifier, context.placement)

    def zero_auxiliary() -> Auxiliary:
        return Auxiliary(jnp.zeros((), jnp.float32), experts.no_statistics(config) if config.experts else {})

    def make_cache(kind: Kind, repeats: int, batch: int, length: int, dtype: Any, placement: Placement) -> Any:
        def empty(heads: int, size: int) -> jax.Array:
            zeros = jnp.zeros((repeats, batch, heads, length, size), dtype)
            return placement.constrain(zeros, None, "batch", "kv_heads", None, "head_dim")

        if config.latent_rank:
            return latent_attention.LatentCache(empty(1, config.latent_rank), empty(1, config.rotary_head_dim))
        key, value = (empty(config.kv_heads, config.head_dim) for _ in range(2))
        return Cache(key, value)

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
