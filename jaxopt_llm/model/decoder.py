"""The decoder-only transformer: a Model whose switches are ModelConfig's.

Letters: B batch, S sequence, D width, V vocabulary (padded).
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.config import Kind, ModelConfig, RopeConfig
from jaxopt_llm.kernels.attention_types import attention_scope, make_document_ranges
from jaxopt_llm.kernels.cross_entropy import Classifier
from jaxopt_llm.kernels.products import runs_on_one_cpu
from jaxopt_llm.model import decoder_specs, latent_attention, layers, rotary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.layers import Function
from jaxopt_llm.model.linear import outliers, vocabulary, weights
from jaxopt_llm.model.linear.weights import Weight
from jaxopt_llm.model.model import Auxiliary, Params, Segment
from jaxopt_llm.model.moe import experts
from jaxopt_llm.model.rotary import Rotary
from jaxopt_llm.model.self_attention import AttentionOptions, Cache, self_attention
from jaxopt_llm.parallel.activations import (
    all_gather_sequence,
    count_key_parts,
    reduce_scatter_sequence,
    to_device_order,
)
from jaxopt_llm.parallel.placement import Placement


@dataclass(frozen=True)
class Decoder:
    """Decoder-only transformer; the methods are documented in Model.

    loss_chunk, z_loss: see TrainingConfig. attention, grouped_matmul: names of implementations (self_attention.py,
        kernels/grouped_matmul.py). max_segments: maximum number of segments in a row, padding included; None if any
        number is possible.
    counts_outliers: whether blocks count the outlier columns that int8 products leave among the integers.
    specs: the decoder's own by default; others if parameters are adapted, quantised or stacked by stage.
    """

    config: ModelConfig
    loss_chunk: int = 0
    z_loss: float = 0.0
    attention: str = "xla"
    grouped_matmul: str = "xla"
    max_segments: int | None = None
    counts_outliers: bool = False
    specs: Params = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.specs:
            object.__setattr__(self, "specs", decoder_specs.param_specs(self.config))

    @functools.cached_property
    def layout(self) -> tuple[Segment, ...]:
        return decoder_specs.list_segments(self.config)

    @property
    def rope(self) -> RopeConfig:
        return self.config.rope

    def with_specs(self, specs: Params) -> "Decoder":
        return dataclasses.replace(self, specs=specs)

    def make_context(self, batch: Batch, placement: Placement) -> Context:
        # Key ranges count rows in the order of the sequence. They are reordered together with their tokens.
        key_ranges = make_document_ranges(placement.constrain(batch.segment_ids, "batch", "sequence"))
        noise = None if batch.noise is None else to_device_order(batch.noise, placement)
        positions, loss_mask = (to_device_order(x, placement) for x in (batch.positions, batch.loss_mask))
        token_mask = to_device_order(batch.segment_ids, placement) != 0 if self.config.moe.experts else None
        key_ranges = jax.tree.map(lambda x: to_device_order(x, placement), key_ranges)
        lengths = None
        if self.rope.by_length and batch.tokens.shape[1] > self.rope.original_length:
            lengths = to_device_order(_document_lengths(batch), placement)
        return Context(
            *(positions, key_ranges, placement),
            noise=noise,
            loss_mask=loss_mask,
            token_mask=token_mask,
            lengths=lengths,
        )

    def embed(self, non_layer: Params, tokens: jax.Array, context: Context) -> jax.Array:
        tokens = to_device_order(tokens, context.placement)
        # Constraining the whole array first would save a permute, but XLA of jax 0.11.2 aborts on it in a pipeline.
        x = vocabulary.look_up(non_layer["embedding"]["table"], tokens, context.placement)
        x = reduce_scatter_sequence(x, context.placement)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.config.positions == "learned":
            x = x + vocabulary.look_up(non_layer["positions"]["table"], context.positions, context.placement)
        return context.placement.constrain(x, "batch", "residual_sequence", "embed")

    def block(
        self, kind: Kind, params: Params, x: jax.Array, context: Context, layer: dict[str, jax.Array], cache: Any
    ) -> tuple[jax.Array, Any, Auxiliary]:
        with outliers.collect_left() as left:
            attended, cache = self._attend(kind, params, x, context, cache)
            x = self._add_residual(x, self._norm(params, "attention_post_norm")(attended), context)
            transformed, auxiliary = self._transform(params, x, context, layer["index"])
            x = self._add_residual(x, self._norm(params, "mlp_post_norm")(transformed), context)
        if self.counts_outliers:
            auxiliary = dataclasses.replace(
                auxiliary, statistics={outliers.LEFT: sum(left, jnp.zeros((), jnp.float32))}
            )
        return x, cache, auxiliary

    def logits(self, non_layer: Params, x: jax.Array, context: Context) -> jax.Array:
        return self.classify(*self._head(non_layer, x, context), context.placement)

    def classify(self, x: jax.Array, table: Weight, placement: Placement) -> jax.Array:
        """Return the logits, float32 [B, S, V], of the head's input x [B, S, D]; table: the head's, [V, D]."""
        out = weights.einsum("BSD,VD->BSV", x, table, dtype=jnp.dtype(jnp.float32))
        if self.config.logit_softcap:
            out = self.config.logit_softcap * jnp.tanh(out / self.config.logit_softcap)
        return placement.constrain(out, "batch", "sequence", "vocabulary")

    def loss(
        self, non_layer: Params, x: jax.Array, batch: Batch, context: Context, loss_weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        placement = context.placement
        tokens = to_device_order(batch.targets, placement), to_device_order(batch.loss_mask, placement)
        classifier = Classifier(
            self.config.vocabulary_size,
            self.config.logit_softcap,
            self.z_loss,
            self.loss_chunk,
            on_one_cpu=runs_on_one_cpu(placement.mesh),
        )
        return vocabulary.cross_entropy(*self._head(non_layer, x, context), tokens, loss_weight, classifier, placement)

    def make_cache(self, kind: Kind, batch: int, slots: int, dtype: Any, placement: Placement) -> Any:
        config = self.config

        def zeros(heads: int, size: int) -> jax.Array:
            empty = jnp.zeros((batch, heads, slots, size), dtype)
            return placement.constrain(empty, "batch", "kv_heads", None, "head_dim")

        if config.mla.kv_rank:
            return latent_attention.LatentCache(zeros(1, config.mla.kv_rank + config.mla.rotary_head_dim))
        key, value = (zeros(config.kv_heads, config.head_dim) for _ in range(2))
        return Cache(key, value)

    def zero_auxiliary(self) -> Auxiliary:
        statistics = experts.zero_statistics(self.config) if self.config.moe.experts else {}
        if self.counts_outliers:
            statistics = {outliers.LEFT: jnp.zeros((), jnp.float32)}
        return Auxiliary(jnp.zeros((), jnp.float32), statistics)

    def _add_residual(self, x: jax.Array, update: jax.Array, context: Context) -> jax.Array:
        if self.config.residual_scale != 1:
            update = update * self.config.residual_scale
        return context.placement.constrain(x + update, "batch", "residual_sequence", "embed")

    def _attend(self, kind: Kind, params: Params, x: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Return the attention sublayer's output [B, S, D] for x [B, S, D], and the cache."""
        config = self.config
        window = config.window if kind == "sliding" else None
        is_rotated = config.positions == "rotary" and kind != "global_nope"
        attend: Callable[..., tuple[jax.Array, Any]] = self_attention
        norms = ("query_norm", "key_norm")
        options = AttentionOptions(
            rotary=Rotary.from_config(config, kind) if is_rotated else None,
            window=window,
            scale=rotary.score_scale(config),
            softcap=config.attention_softcap or None,
            implementation=self.attention,
            max_segments=self.max_segments,
        )
        if config.mla.kv_rank:
            attend, norms = latent_attention.latent_attention, ("query_latent_norm", "latent_norm")
        with attention_scope(window, count_key_parts(context.placement)):
            return attend(
                params["attention"],
                x,
                context,
                norm=self._norm(params, "attention_norm"),
                **{name: self._norm(params, name) for name in norms},
                options=options,
                cache=cache,
            )

    def _transform(
        self, params: Params, x: jax.Array, context: Context, layer: jax.Array
    ) -> tuple[jax.Array, Auxiliary]:
        """Return the output [B, S, D] of the MLP or the MoE layer for x [B, S, D], and its auxiliary sums."""
        mlp, norm = params["mlp"], self._norm(params, "mlp_norm")
        if "router" not in mlp:
            return layers.mlp(mlp, x, context, norm=norm, kind=self.config.mlp), self.zero_auxiliary()
        return experts.moe_layer(mlp, x, context, layer, norm=norm, config=self.config, products=self.grouped_matmul)

    def _norm(self, params: Params, name: str) -> Function:
        """Return the norm with this name in `params`, or the identity if the model has no such norm."""
        if name not in params:
            return lambda x: x
        config = self.config
        epsilon = latent_attention.NORM_EPSILON if name.endswith("latent_norm") else config.norm_epsilon
        return functools.partial(
            layers.norm, params[name], kind=config.norm, zero_centered=config.norm_zero_centered, epsilon=epsilon
        )

    def _head(self, non_layer: Params, x: jax.Array, context: Context) -> tuple[jax.Array, Weight]:
        """Return the head's input [B, S, D], with all its positions, and the head's table [V, D]."""
        return all_gather_sequence(self.final_norm(non_layer, x), context.placement), self.head_table(non_layer)

    def final_norm(self, non_layer: Params, x: jax.Array) -> jax.Array:
        """Return the head's input, multiplied with `logit_scale` in place of the logits."""
        x = self._norm(non_layer, "final_norm")(x)
        return x if self.config.logit_scale == 1 else x * self.config.logit_scale

    def head_table(self, non_layer: Params) -> Weight:
        table: Weight = non_layer["embedding" if self.config.tied_head else "head"]["table"]
        return table


def _document_lengths(batch: Batch) -> jax.Array:
    """Return the length of each token's document, int32 [B, S]: the position after that of its last token."""
    rows = jnp.arange(batch.segment_ids.shape[1], dtype=jnp.int32)
    return batch.positions + make_document_ranges(batch.segment_ids, causal=False).last - rows + 1
