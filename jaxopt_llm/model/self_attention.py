"""Grouped-query self-attention with its projections.

Letters: B batch, S sequence, T slots of the cache, D width, H heads, G key-value heads, K head size.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxopt_llm.config import Kind, ModelConfig, RopeConfig
from jaxopt_llm.config.model import GATED_DELTA
from jaxopt_llm.kernels import attention_xla
from jaxopt_llm.kernels.attention import (
    IMPLEMENTATIONS,
    Implementation,
    attend,
    select_for_ring,
    select_implementation,
)
from jaxopt_llm.kernels.attention_auto import AttentionCall
from jaxopt_llm.kernels.attention_check import check_ring
from jaxopt_llm.kernels.attention_types import AttentionParameters, KeyRanges
from jaxopt_llm.kernels.attention_wrappers import AllToAll, Padded, common_size
from jaxopt_llm.kernels.ring import Ring
from jaxopt_llm.model.cache import Cache, write
from jaxopt_llm.model.context import Context, NewCache
from jaxopt_llm.model.layers import Function, project, project_all, recomputed, with_biases
from jaxopt_llm.model.linear import weights
from jaxopt_llm.model.linear.weights import Weight
from jaxopt_llm.model.param import ParamSpec, normal, zeros
from jaxopt_llm.model.rotary import Rotary, grow_queries
from jaxopt_llm.parallel.activations import PerDevice, all_gather_sequence, count_head_shards, reduce_scatter_sequence
from jaxopt_llm.parallel.mesh import visible_devices
from jaxopt_llm.parallel.placement import Placement, constrain, mark

BIASED_PROJECTIONS = {
    **dict.fromkeys(("none", "mlp"), ()),
    "qkv": ("query", "key", "value"),
    **dict.fromkeys(("attention", "all"), ("query", "key", "value", "output")),
}


@dataclass(frozen=True)
class AttentionOptions:
    """Settings of an attention sublayer.

    rotary: rotary position embedding; None: no positions. window, scale, softcap: see AttentionParameters.
    implementation: name in kernels/attention.py; or "auto": the surrounding program's, as `attention` selects it.
    max_segments: AttentionParameters.segments. rotates_first: whether the norms of queries and keys follow RoPE.
    chunk: tokens of a chunk of a document, outside which a query sees no key; None: documents are whole.
    growth: settings of the queries' growth; None: queries do not grow.
    """

    rotary: Rotary | None
    window: int | None
    scale: float
    softcap: float | None
    implementation: str
    max_segments: int | None = None
    rotates_first: bool = False
    chunk: int | None = None
    growth: RopeConfig | None = None

    @property
    def last_keys(self) -> int | None:
        """Number of the last keys, its own included, after which a query sees no other; None if it may see all."""
        return self.window or self.chunk


def attention_specs(config: ModelConfig, residual_scale: float) -> dict[str, ParamSpec]:
    width, heads, kv_heads, head_dim = config.width, config.heads, config.kv_heads, config.head_dim
    kv = ParamSpec((width, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), (0,), normal())
    specs = {
        "query": ParamSpec((width, heads, head_dim), ("embed", "heads", "head_dim"), (0,), normal()),
        "key": kv,
        **({} if config.values_from_keys else {"value": kv}),
        "output": ParamSpec((heads, head_dim, width), ("heads", "head_dim", "embed"), (0, 1), normal(residual_scale)),
    }
    if config.attention_gate == "element":
        specs["gate"] = specs["query"]
    specs = with_biases(specs, *(name for name in BIASED_PROJECTIONS[config.biases] if name in specs))
    return specs | ({"sinks": ParamSpec((heads,), ("heads",), (), zeros)} if config.attention_sinks else {})


# Products of attention's input, by the names of their weights.
INPUT_PRODUCTS = {
    **dict.fromkeys(("query", "gate"), "BSD,DHK->BSHK"),
    **dict.fromkeys(("key", "value"), "BSD,DGK->BSGK"),
}
GATES = ("gate",)  # those of them that gate the output


def self_attention(
    params: dict[str, Weight],
    x: jax.Array,
    context: Context,
    *,
    norms: Mapping[str, Function],
    options: AttentionOptions,
    cache: Cache | NewCache | None,
) -> tuple[jax.Array, Cache | NewCache | None]:
    """Attend to x [B, S, D], normed. Return the output, and the cache with the keys and values of this call.

    They are written at `context.cache_index`.
    norms: `attention_norm` of x, and `query_norm`, `key_norm` and `value_norm` of its projections.
    cache: also NewCache; without a key projection, the cache of another layer, which is only read.
    """
    keep = functools.partial(keep_projection, context.placement)

    def rotate(x: jax.Array) -> jax.Array:
        return x if options.rotary is None else options.rotary(x, context.positions, context.lengths)

    def place(x: jax.Array, norm: Function) -> jax.Array:
        return norm(rotate(x)) if options.rotates_first else rotate(norm(x))

    @recomputed
    def project_in(x: jax.Array) -> tuple[jax.Array, ...]:
        x = all_gather_sequence(norms["attention_norm"](x), context.placement)
        x = mark(x, "attention_input", "input", "batch", "sequence", "embed")
        products = {name: subscripts for name, subscripts in INPUT_PRODUCTS.items() if name in params}
        found = dict(zip(products, project_all(x, params, products, context.placement), strict=True))
        axes = ("batch", "sequence", "heads", "head_dim")
        gates = [found[name] for name in GATES if name in found]
        gates = [constrain(context.placement, gate, "attention_gate", "product", *axes[: gate.ndim]) for gate in gates]
        q = keep(found["query"], "query", "heads")
        keys = [keep(found[name], name, "kv_heads") for name in ("key", "value") if name in found]
        return q, *keys, *keys[:1] * ("value" not in found), *gates

    @recomputed
    def project_out(out: jax.Array, *gates: jax.Array) -> jax.Array:
        for gate in gates:
            out = (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)
        return project("BSHK,HKD->BSD", out, params, "output", context.placement)

    q, *others = project_in(x)
    q = place(q, norms["query_norm"])
    if options.growth is not None:
        q = grow_queries(options.growth, q, context.positions)
    if "key" in params:
        k, v, *gates = others
        k, v = place(k, norms["key_norm"]), norms["value_norm"](v)
        cache = _write_caches(cache, k, v, context, options)
    else:
        gates = others
    if isinstance(cache, Cache):
        k, v = (jnp.swapaxes(written, 1, 2) for written in cache.in_order or (cache.key, cache.value))
    k, v = (_copy_heads(x, context.placement) for x in (k, v))
    attend_to = attend_to_sequence if context.cache_index is None else attend_to_cache
    sinks = weights.materialise(params["sinks"], jnp.dtype(jnp.float32)) if "sinks" in params else None
    out = constrain_heads(context.placement, attend_to(q, k, v, context, options, sinks), "heads")
    out = reduce_scatter_sequence(project_out(out, *gates), context.placement)
    return mark(out, "attention_output", "product", "batch", "residual_sequence", "embed"), cache


def _copy_heads(x: jax.Array, placement: Placement) -> jax.Array:
    """Return keys or values [B, S, G, K] with as many copies of each head as devices share it, side by side.

    A device holds whole heads, so with more devices than heads several devices share one.
    """
    copies = math.lcm(x.shape[2], count_head_shards(placement)) // x.shape[2]
    if copies == 1:
        return x
    # Also constrained before the copies, so that their gradients are summed in 16 bits and not in the dtype of earlier
    # operations.
    x = constrain_heads(placement, x, "kv_heads")
    return constrain_heads(placement, jnp.repeat(x, copies, axis=2), "kv_heads")


def _write_caches(
    cache: Cache | NewCache | None, k: jax.Array, v: jax.Array, context: Context, options: AttentionOptions
) -> Cache | None:
    """Return the cache with keys and values [B, S, G, K] written; None without one."""
    if isinstance(cache, NewCache):
        return Cache(*(jnp.swapaxes(new, 1, 2) for new in (k, v)))
    if cache is None:
        return None
    key, keys = write(cache.key, k, context, options.last_keys)
    value, values = write(cache.value, v, context, options.last_keys)
    return Cache(key, value, None if keys is key else (keys, values))


def constrain_heads(placement: Placement, x: jax.Array, heads: str) -> jax.Array:
    """Split [B, S, H, K] over devices by head. heads: logical axis of the heads."""
    return placement.constrain(x, "batch", "sequence", heads, "head_dim")


def keep_projection(placement: Placement, x: jax.Array, name: str, heads: str) -> jax.Array:
    """Split a projection [B, S, H, K] over devices by head, and mark it. heads: logical axis of the heads."""
    return constrain(placement, x, name, "projection", "batch", "sequence", heads, "head_dim")


def attend_to_sequence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    context: Context,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
) -> jax.Array:
    # No token sees a key after its own row. These bounds are the part of the window that is known at compile time.
    window, segments = options.window, count_chunks(options.max_segments, options.chunk, q.shape[1])
    limit = options.last_keys
    parameters = AttentionParameters(
        options.scale,
        options.softcap,
        keys_before=None if limit is None else limit - 1,
        keys_after=0,
        window=window,
        segments=segments,
    )
    if options.implementation == "auto":
        call = AttentionCall(q.shape[-1], q.dtype, k.shape[1], segments, window, options.softcap)
        kernel = select_implementation("auto", call, q, k, v)
    else:
        kernel = _select_implementation(options.implementation, context.placement, q.shape[-1], v.shape[-1])
    return attend(kernel, parameters, q, k, v, _find_ranges(context, options), sinks)


def attend_to_cache(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    context: Context,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend to the keys that `write` returns."""
    parameters, ranges = AttentionParameters(options.scale, options.softcap), _find_ranges(context, options)
    if q.shape[1] == 1:
        implementation = _select_for_ring(context.placement, parameters, q, v)
        return attend(implementation, replace(parameters, ring=True), q, k, v, ranges, sinks)
    if (limit := options.last_keys) is not None:  # the query in row s has its own key in row T + s
        slots = k.shape[1] - q.shape[1]
        ranges = KeyRanges(*(x + (slots - context.cache_index)[:, None] for x in ranges))
        parameters = replace(parameters, keys_before=limit - 1 - slots, keys_after=slots)
    return attend(attention_xla, parameters, q, k, v, ranges, sinks)


def _select_for_ring(
    placement: Placement, parameters: AttentionParameters, q: jax.Array, v: jax.Array
) -> Implementation:
    """Return the implementation for one query over a ring of keys: a kernel that is right on this GPU, or XLA's."""
    device = placement.mesh.devices.flat[0]
    kernel = select_for_ring(device, q, v)
    # XLA divides its own operations over any mesh, also those of latents, which devices hold whole.
    if kernel is attention_xla or v.shape[2] % count_head_shards(placement):
        return attention_xla
    if device in visible_devices():  # otherwise it is only compiled for
        with jax.ensure_compile_time_eval():  # the check runs now, and is no part of the program
            is_right = check_ring(kernel, parameters.softcap, q, v)
        if not is_right:
            return attention_xla
    return PerDevice(kernel, placement)


def _find_ranges(context: Context, options: AttentionOptions) -> KeyRanges:
    """Return the keys that each query sees: those of its document, in the window or the chunk."""
    return context.key_ranges.limit_to_window(options.window).limit_to_chunk(options.chunk)


def describe_call(
    model: ModelConfig, dtype: str, sequence_length: int, documents_per_row: int | None, parts: int
) -> AttentionCall:
    """Return the properties of the attention of a model over packed rows.

    Args:
        dtype: precision.compute_dtype.
        documents_per_row: maximum number of documents in a row; None if any number is possible.
        parts: number of parts in which attention gets the keys.
    """
    segments = None if documents_per_row is None else count_segments(documents_per_row)
    return AttentionCall(
        kernel_head_dim(model.of_layers(most_frequent_kind(model))),
        dtype,
        sequence_length // parts,
        count_chunks(segments, model.window if "chunked" in model.pattern else None, sequence_length),
        model.window if "sliding" in model.pattern else None,
        model.attention_softcap or None,
        parts,
    )


def count_segments(documents_per_row: int) -> int:
    """Return the maximum number of segments in a row.

    The padding at the end of a row is a segment, too. One document and its padding are called as one segment: the
    causal order hides the padding.
    """
    return 1 if documents_per_row == 1 else documents_per_row + 1


def count_chunks(segments: int | None, chunk: int | None, length: int) -> int | None:
    """Return the maximum number of segments in a row of `length` tokens whose documents are cut into chunks.

    To a kernel, a chunk is a document. Each document ends with one chunk that may be shorter than the others.

    segments: maximum number of whole documents; None if any number is possible. chunk: tokens; None: no chunks.
    """
    if segments is None or chunk is None or chunk >= length:
        return segments
    return max(segments, 2) + length // chunk


def most_frequent_kind(model: ModelConfig) -> Kind:
    """Return the kind of layers for which a model's kernel is chosen."""
    kinds: list[Kind] = [kind for kind in model.pattern if kind != GATED_DELTA] or ["global"]
    return max(kinds, key=kinds.count)


def find_implementation(model: ModelConfig, kind: Kind, chosen: str) -> str:
    """Return the implementation of the layers of one kind: XLA's for heads of another size than the kernel's.

    Few kernels support large heads, as in the global layers of Gemma 4.

    chosen: the implementation that is chosen for the model.
    """
    sizes = {kernel_head_dim(model.of_layers(each)) for each in (kind, most_frequent_kind(model))}
    return chosen if len(sizes) == 1 else "xla"


def kernel_head_dim(config: ModelConfig) -> int:
    """Return the head size with which a kernel of one head size is called."""
    return common_size(config.head_dim, config.value_dim)


def _select_implementation(name: str, placement: Placement, head_dim: int, value_dim: int) -> Implementation:
    kernel = IMPLEMENTATIONS[name]
    if name != "xla" and head_dim != value_dim:
        kernel = Padded(kernel, common_size(head_dim, value_dim))
    if placement.size("context") > 1:
        return PerDevice((Ring if placement.sharding.has_ring else AllToAll)(kernel, "context"), placement)
    return kernel if name == "xla" else PerDevice(kernel, placement)
