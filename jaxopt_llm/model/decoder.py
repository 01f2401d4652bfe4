"""The decoder-only transformer: a Model whose switches are ModelConfig's.

Letters: B batch, S sequence, D width, V vocabulary (padded), L layers, P size of a layer's input.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.config import Kind, ModelConfig, RopeConfig
from jaxopt_llm.config.model import GATED_DELTA, WINDOWED
from jaxopt_llm.core import tree
from jaxopt_llm.kernels.attention_types import attention_scope, make_document_ranges
from jaxopt_llm.kernels.cross_entropy import Classifier
from jaxopt_llm.kernels.products import runs_on_one_cpu
from jaxopt_llm.model import decoder_specs, gated_delta, latent_attention, layers, rotary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.cache import Cache, count_slots
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.head import Head
from jaxopt_llm.model.layers import Function
from jaxopt_llm.model.linear import vocabulary, weights
from jaxopt_llm.model.linear.weights import Weight
from jaxopt_llm.model.model import AUXILIARY_LOSS, TEACHER_HEAD, Params, Segment, Sums
from jaxopt_llm.model.moe import experts
from jaxopt_llm.model.objectives import NextToken, Objective
from jaxopt_llm.model.rotary import Rotary
from jaxopt_llm.model.self_attention import AttentionOptions, find_implementation, self_attention
from jaxopt_llm.parallel.activations import (
    all_gather_sequence,
    count_key_parts,
    multiply_tokens,
    reduce_scatter_sequence,
    to_device_order,
    to_residual_order,
)
from jaxopt_llm.parallel.placement import Placement, constrain, mark


@dataclass(frozen=True)
class Decoder:
    """Decoder-only transformer; the methods are documented in Model.

    loss_chunk, z_loss, mtp_weight: see TrainingConfig. attention, grouped_matmul: names of implementations
        (self_attention.py, kernels/grouped_matmul.py). max_segments: maximum number of segments in a row, padding
        included; None if any number is possible.
    objective: what is learned.
    specs: the decoder's own by default; others if parameters are adapted, quantised or stacked by stage.
    """

    config: ModelConfig
    loss_chunk: int = 0
    z_loss: float = 0.0
    mtp_weight: float = 0.0
    attention: str = "xla"
    grouped_matmul: str = "xla"
    max_segments: int | None = None
    objective: Objective = field(default_factory=NextToken)
    specs: Params = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.specs:
            object.__setattr__(self, "specs", decoder_specs.param_specs(self.config))

    @functools.cached_property
    def layout(self) -> tuple[Segment, ...]:
        return decoder_specs.list_segments(self.config)

    @functools.cached_property
    def mtp_layout(self) -> tuple[Segment, ...]:
        return decoder_specs.list_mtp_modules(self.config)

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
        table, placement = non_layer["embedding"]["table"], context.placement

        def look_up(tokens: jax.Array) -> jax.Array:
            return vocabulary.look_up(table, placement.constrain(tokens, "batch", "sequence"), placement)

        x = multiply_tokens(look_up, tokens, placement)
        x = reduce_scatter_sequence(x, context.placement)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.config.positions == "learned":
            positions = to_residual_order(context.positions, context.placement)
            x = x + vocabulary.look_up(non_layer["positions"]["table"], positions, context.placement)
        return context.placement.constrain(x, "batch", "residual_sequence", "embed")

    def add_layer_inputs(self, non_layer: Params, tokens: jax.Array, x: jax.Array, context: Context) -> Context:
        size, placement = self.config.layer_input_size, context.placement
        if not size:
            return context
        params, tokens = non_layer["layer_inputs"], to_device_order(tokens, placement)
        of_tokens = vocabulary.look_up(params["table"], tokens, placement) * size**0.5  # [B, S, L * P]
        of_tokens = of_tokens.reshape(*tokens.shape, self.config.layers, size)
        projected = weights.einsum("BSD,DLP->BSLP", all_gather_sequence(x, placement), params["projection"])
        projected = self._norm(non_layer, "layer_inputs_norm")(projected * self.config.width**-0.5)
        inputs = jnp.moveaxis((projected + of_tokens) * 2**-0.5, 2, 0)
        inputs = placement.constrain(inputs, None, "batch", "sequence", "mlp")
        return dataclasses.replace(context, layer_inputs=inputs)

    def block(
        self, kind: Kind, params: Params, x: jax.Array, context: Context, layer: dict[str, jax.Array], cache: Any
    ) -> tuple[jax.Array, Any, Sums]:
        if "mtp" in params:
            x = self._join_tokens(params, x, context, layer["input"])
        attended, cache = self._attend(kind, params, x, context, cache)
        if self.config.parallel_block:
            transformed, auxiliary = self._transform(params, x, context, layer["index"])
            x = self._add_residual(x, attended + transformed, context)
        else:
            x = self._add_residual(x, attended, context)
            transformed, auxiliary = self._transform(params, x, context, layer["index"])
            x = self._add_residual(x, transformed, context)
        if "input_mlp" in params:
            x = self._add_residual(x, self._transform_input(params, x, context, layer["input"]), context)
        if self.config.layer_scales:
            scale = jax.lax.stop_gradient(weights.materialise(params["layer"]["scale"], jnp.dtype(jnp.float32)))
            x = (x * scale).astype(x.dtype)
        x = self._norm(params, "mtp_output_norm")(x)
        return x, cache, auxiliary

    def normalise(self, non_layer: Params, x: jax.Array) -> jax.Array:
        return self._norm(non_layer, "final_norm")(x)

    def mtp_loss(
        self, non_layer: Params, x: jax.Array, batch: Batch, context: Context, loss_weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        shared = {name: params for name, params in non_layer.items() if name != "final_norm"}
        return self.loss(shared, x, batch, context, loss_weight)

    def logits(self, non_layer: Params, x: jax.Array, context: Context) -> jax.Array:
        x = all_gather_sequence(self.final_norm(non_layer, x), context.placement)
        return self.classify(x, self.head_table(non_layer), context.placement)

    def classify(self, x: jax.Array, table: Weight, placement: Placement) -> jax.Array:
        """Return the logits, float32 [B, S, V], or the scores of the head's input x [B, S, D]. table: the head's."""
        out = weights.einsum("BSD,VD->BSV", x, table, dtype=jnp.dtype(jnp.float32))
        if self.config.scores:
            return placement.constrain(out, "batch", "sequence", None)
        if self.config.logit_softcap:
            out = self.config.logit_softcap * jnp.tanh(out / self.config.logit_softcap)
        return placement.constrain(out, "batch", "sequence", "vocabulary")

    def loss(
        self, non_layer: Params, x: jax.Array, batch: Batch, context: Context, loss_weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return self.objective.compute(self._head(non_layer, x, batch, context), batch, loss_weight)

    def log_probabilities(self, non_layer: Params, x: jax.Array, batch: Batch, context: Context) -> jax.Array:
        return self._head(non_layer, x, batch, context).log_probabilities()

    def read_targets(
        self, non_layer: Params, x: jax.Array, batch: Batch, context: Context
    ) -> tuple[jax.Array, jax.Array]:
        return self._head(non_layer, x, batch, context).read_targets()

    def read_most_likely(
        self, non_layer: Params, x: jax.Array, batch: Batch, context: Context, count: int
    ) -> tuple[jax.Array, jax.Array]:
        return self._head(non_layer, x, batch, context).read_most_likely(count)

    def make_cache(self, kind: Kind, batch: int, slots: int, dtype: Any, placement: Placement) -> Any:
        config, window = self.config.of_layers(kind), self.config.window if kind in WINDOWED else None
        if kind == GATED_DELTA:
            return gated_delta.make_state(config, batch, dtype, placement)

        def zeros(heads: int, size: int) -> jax.Array:
            empty = jnp.zeros((batch, heads, count_slots(slots, window), size), dtype)
            return placement.constrain(empty, "batch", "kv_heads", None, "head_dim")

        if config.mla.kv_rank:
            return latent_attention.LatentCache(zeros(1, config.mla.kv_rank + config.mla.rotary_head_dim))
        key, value = (zeros(config.kv_heads, config.head_dim) for _ in range(2))
        return Cache(key, value)

    def zero_auxiliary(self) -> Sums:
        statistics = experts.zero_statistics(self.config) if self.config.moe.experts else {}
        return {AUXILIARY_LOSS: jnp.zeros((), jnp.float32), **statistics}

    def _add_residual(self, x: jax.Array, update: jax.Array, context: Context) -> jax.Array:
        if self.config.residual_scale != 1:
            update = update * self.config.residual_scale
        return context.placement.constrain(x + update, "batch", "residual_sequence", "embed")

    def _attend(self, kind: Kind, params: Params, x: jax.Array, context: Context, cache: Any) -> tuple[jax.Array, Any]:
        """Return the output [B, S, D] of attention, or of another mixer, for x [B, S, D], and the cache."""
        if kind == GATED_DELTA:
            norm, output_norm = self._norm(params, "attention_norm"), self._norm(params, "delta_norm")
            mixed, cache = gated_delta.gated_delta(
                params["delta"], x, context, norm=norm, output_norm=output_norm, cache=cache
            )
            return self._norm(params, "attention_post_norm")(mixed), cache
        config = self.config.of_layers(kind)
        window, chunk = (config.window if kind == name else None for name in WINDOWED)
        is_rotated = config.positions == "rotary" and kind != "global_nope"
        grows = config.rope.query_growth and is_rotated == (config.rope.growth_layers == "rotary")
        attend: Callable[..., tuple[jax.Array, Any]] = self_attention
        names: tuple[str, ...] = ("query_norm", "key_norm", "value_norm")
        options = AttentionOptions(
            rotary=Rotary.from_config(config, kind) if is_rotated else None,
            window=window,
            scale=rotary.score_scale(config),
            softcap=config.attention_softcap or None,
            implementation=find_implementation(self.config, kind, self.attention),
            max_segments=self.max_segments,
            rotates_first=config.qk_norm in ("rotated_head", "rotated_unit"),
            chunk=chunk,
            growth=config.rope if grows and config.positions == "rotary" else None,
        )
        takes_keys = not config.mla.kv_rank and "key" not in params["attention"]
        if config.mla.kv_rank:
            attend, names = latent_attention.latent_attention, ("query_latent_norm", "latent_norm")
        units = {"query_norm", "key_norm"} if config.qk_norm == "rotated_unit" and is_rotated else set()
        units |= {"value_norm"} if config.value_norm else set()
        norms = {name: self._make_norm({}) if name in units else self._norm(params, name) for name in names}
        with attention_scope(window or chunk, count_key_parts(context.placement)):
            attended, written = attend(
                params["attention"],
                x,
                context,
                norms=norms | {"attention_norm": self._norm(params, "attention_norm")},
                options=options,
                cache=context.caches[kind] if takes_keys else cache,
            )
        return self._norm(params, "attention_post_norm")(attended), cache if takes_keys else written

    def _join_tokens(self, params: Params, x: jax.Array, context: Context, embedded: jax.Array) -> jax.Array:
        """Return the input of an MTP module's block: a projection of embeddings and hidden states x, each [B, S, D]."""
        placement = context.placement

        @layers.recomputed
        def join(embedded: jax.Array, x: jax.Array) -> jax.Array:
            halves = self._norm(params, "mtp_embedding_norm")(embedded), self._norm(params, "mtp_hidden_norm")(x)
            both = jnp.concatenate([all_gather_sequence(half, placement) for half in halves], axis=-1)
            both = constrain(placement, both, "mtp_input", "input", "batch", "sequence", "mlp")
            joined = layers.project("BSF,FD->BSD", both, params["mtp"], "projection", placement)
            return reduce_scatter_sequence(joined, placement)

        return mark(join(embedded, x), "mtp_joined", "product", "batch", "residual_sequence", "embed")

    def _transform_input(self, params: Params, x: jax.Array, context: Context, given: jax.Array) -> jax.Array:
        """Return the output [B, S, D] of the MLP whose gate, of x [B, S, D], the layer's input multiplies."""
        out = layers.mlp(
            params["input_mlp"], x, context, norm=lambda x: x, kind=self.config.mlp, name="input_mlp", up=(given,)
        )
        return self._norm(params, "input_mlp_post_norm")(out)

    def _transform(self, params: Params, x: jax.Array, context: Context, layer: jax.Array) -> tuple[jax.Array, Sums]:
        """Return the output [B, S, D] of the MLP or the MoE layer for x [B, S, D], and its auxiliary sums."""
        config, mlp = self.config, params["mlp"]
        # In a parallel block it is computed twice in the text, and once in the compiled program.
        norm = self._norm(params, "attention_norm" if config.parallel_block else "mlp_norm")
        if "router" not in mlp:
            transformed, auxiliary = layers.mlp(mlp, x, context, norm=norm, kind=config.mlp), self.zero_auxiliary()
        else:
            has_own = config.moe.own_norms
            norms = experts.Norms(
                experts=self._norm(params, "experts_norm") if has_own else norm,
                experts_post=self._norm(params, "experts_post_norm"),
                shared=norm,
                shared_post=self._norm(params, "shared_post_norm"),
                router=self._norm(params, "router_norm") if has_own else None,
            )
            transformed, auxiliary = experts.moe_layer(
                mlp, x, context, layer, norms=norms, config=config, products=self.grouped_matmul
            )
        return self._norm(params, "mlp_post_norm")(transformed), auxiliary

    def _norm(self, params: Params, name: str) -> Function:
        """Return the norm with this name in `params`, or the identity if the model has no such norm."""
        if name not in params:
            return lambda x: x
        if name == "delta_norm":
            epsilon = self.config.norm_epsilon
            return functools.partial(layers.norm, params[name], kind="rms", zero_centered=False, epsilon=epsilon)
        epsilon = latent_attention.NORM_EPSILON if name.endswith("latent_norm") else self.config.norm_epsilon
        return self._make_norm(params[name], epsilon)

    def _make_norm(self, params: Params, epsilon: float | None = None) -> Function:
        """Return the norm with these parameters; {}: one without."""
        config = self.config
        return functools.partial(
            layers.norm,
            params,
            kind=config.norm,
            zero_centered=config.norm_zero_centered,
            epsilon=epsilon or config.norm_epsilon,
        )

    def _head(self, non_layer: Params, x: jax.Array, batch: Batch, context: Context) -> Head:
        """Return the head over the last block's output x [B, S, D]."""
        placement = context.placement
        classifier = self.make_classifier(on_one_cpu=runs_on_one_cpu(placement.mesh))
        x = all_gather_sequence(self.final_norm(non_layer, x), placement)
        teacher_table = non_layer[TEACHER_HEAD]["table"] if TEACHER_HEAD in non_layer else None
        return Head(x, self.head_table(non_layer), batch, classifier, placement, teacher_table)

    def make_classifier(self, on_one_cpu: bool = False) -> Classifier:
        config = self.config
        return Classifier(config.vocabulary_size, config.logit_softcap, self.z_loss, self.loss_chunk, on_one_cpu)

    def head_input(self, non_layer: Params, x: jax.Array, batch: Batch, context: Context) -> jax.Array:
        x = self.final_norm(non_layer, x)
        return context.placement.constrain(x, "batch", "residual_sequence", "embed")

    def final_norm(self, non_layer: Params, x: jax.Array) -> jax.Array:
        """Return the head's input, multiplied with `logit_scale` in place of the logits. Scores have no such factor."""
        x, scale = self.normalise(non_layer, x), self.config.logit_scale
        return x if scale == 1 or self.config.scores else x * scale

    def head_table(self, non_layer: Params) -> tree.Leaf:
        """Return the head's table, [V, D] or with scores [N, D], or what a tree of parameters holds in its place."""
        return non_layer["score" if self.config.scores else "embedding" if self.config.tied_head else "head"]["table"]


def _document_lengths(batch: Batch) -> jax.Array:
    """Return the length of each token's document, int32 [B, S]: the position after its last token."""
    rows = jnp.arange(batch.segment_ids.shape[1], dtype=jnp.int32)
    return batch.positions + make_document_ranges(batch.segment_ids, causal=False).last - rows + 1
