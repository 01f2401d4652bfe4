"""Grouped-query self-attention with its projections and its cache.

Letters: B batch, S sequence, T cache length, L layers, D width, H heads, G key-value heads, K head size.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxopt_llm.kernels import attention_xla
from jaxopt_llm.kernels.all_to_all import AllToAll
from jaxopt_llm.kernels.attention import IMPLEMENTATIONS, Implementation, attend
from jaxopt_llm.kernels.padded import Padded, common_size
from jaxopt_llm.kernels.ring import Ring
from jaxopt_llm.kernels.spans import Form, Spans
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.intermediates import tag
from jaxopt_llm.model.layers import Function, Rotary, project, recomputed, with_biases
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.model.weights import Weight
from jaxopt_llm.parallel.sharding import Placement

EXCHANGES: dict[str, Callable[[Implementation, str], Implementation]] = {"ring": Ring, "all_to_all": AllToAll}
BIASED = {"none": (), "qkv": ("query", "key", "value"), "all": ("query", "key", "value", "output")}


@struct.dataclass
class Cache:
    """Keys and values of the tokens seen so far by a stack of layers, [L, B, G, T, K], a slot each. By heads, as
    attention reads them: else XLA turns all of it round, and back, for every token."""

    key: jax.Array
    value: jax.Array


def attention_specs(config: ModelConfig, residual_scale: float) -> dict[str, ParamSpec]:
    width, heads, kv_heads, head_dim = config.width, config.heads, config.kv_heads, config.head_dim
    kv = ParamSpec((width, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), (0,), normal())
    specs = {
        "query": ParamSpec((width, heads, head_dim), ("embed", "heads", "head_dim"), (0,), normal()),
        "key": kv,
        "value": kv,
        "output": ParamSpec(
            (heads, head_dim, width), ("heads", "head_dim", "embed"), (0, 1), normal(residual_scale)
        ),
    }  # fmt: skip
    return with_biases(specs, *BIASED[config.biases])


def self_attention(
    params: dict[str, Weight],
    x: jax.Array,
    context: Context,
    *,
    norm: Function,
    query_norm: Function,
    key_norm: Function,
    rotary: Rotary | None,
    window: int | None,
    scale: float,
    softcap: float | None,
    implementation: str,
    cache: Cache | None,
) -> tuple[jax.Array, Cache | None]:
    """Attention to norm(x). x: [B, S, D] -> [B, S, D], and the cache with this call's keys and values written at
    `context.cache_index`.

    rotary: None turns nothing. window, scale, softcap, implementation: see kernels/attention.py.
    """
    by_head = functools.partial(divided_by_head, context.placement)

    @recomputed
    def inward(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = tag(context.placement.enter(norm(x)), "attention_input")
        return (
            by_head(project("BSD,DHK->BSHK", x, params, "query"), "heads"),
            by_head(project("BSD,DGK->BSGK", x, params, "key"), "kv_heads"),
            by_head(project("BSD,DGK->BSGK", x, params, "value"), "kv_heads"),
        )

    q, k, v = inward(x)
    q, k, v = tag(q, "query"), tag(k, "key"), tag(v, "value")
    q, k = query_norm(q), key_norm(k)
    if rotary is not None:
        q, k = rotary(q, context.positions), rotary(k, context.positions)
    if cache is not None:
        cache = Cache(write(cache.key, k, context), write(cache.value, v, context))
        k, v = read(cache.key, context), read(cache.value, context)
    shared = math.lcm(k.shape[2], context.placement.head_shards) // k.shape[2]
    if shared > 1:
        # By several devices, as each can have whole heads only. Pinned before it, too: their gradients are summed in 16
        # bits, not in what precedes.
        k, v = (by_head(each, "kv_heads") for each in (k, v))
        k, v = (by_head(jnp.repeat(each, shared, axis=2), "kv_heads") for each in (k, v))
    mix = attend_to_cache if cache is not None else functools.partial(attend_to_sequence, implementation)
    out = mix(q, k, v, context, window, scale, softcap)
    out = context.placement.leave(project("BSHK,HKD->BSD", by_head(out, "heads"), params, "output"))
    return tag(out, "attention_output"), cache


def divided_by_head(placement: Placement, x: jax.Array, heads: str) -> jax.Array:
    """[B, S, H, K], each device with its own heads; heads: their logical axis."""
    return placement.constrain(x, "batch", "sequence", heads, "head_dim")


def attend_to_sequence(
    implementation: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    context: Context,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    # A token sees its own row last: what of a window is known when the program is compiled.
    form = Form(scale, softcap, before=None if window is None else window - 1, after=0, window=window)
    kernel = _implementation(implementation, context.placement, q.shape[-1], v.shape[-1])
    return attend(kernel, form, q, k, v, context.spans.within(window))


def attend_to_cache(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    context: Context,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    # What reads a cache has few queries: bound by memory, and XLA's own operations divide over any mesh.
    return attend(attention_xla, Form(scale, softcap), q, k, v, context.spans.within(window))


def kernel_head_dim(config: ModelConfig) -> int:
    """The head size that a kernel of one size is given."""
    return common_size(config.head_dim, config.value_dim)


def _implementation(name: str, placement: Placement, head_dim: int, value_dim: int) -> Implementation:
    kernel = IMPLEMENTATIONS[name]
    if name != "xla" and head_dim != value_dim:
        kernel = Padded(kernel, common_size(head_dim, value_dim))
    if placement.size("context") > 1:
        return _OnEachDevice(EXCHANGES[placement.sharding.context_exchange](kernel, "context"), placement)
    return kernel if name == "xla" else _OnEachDevice(kernel, placement)


@dataclass(frozen=True)
class _OnEachDevice:
    """A kernel that is given each device's own rows and heads: of what XLA cannot look into, it would gather all."""

    kernel: Implementation
    placement: Placement

    def forward(
        self, form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans
    ) -> tuple[jax.Array, jax.Array]:
        heads, kv_heads, rows, sums = self._parts()
        run = self.placement.on_each_device(
            functools.partial(self.kernel.forward, form), (heads, kv_heads, kv_heads, rows), (heads, sums)
        )
        return run(q, k, v, spans)

    def backward(
        self,
        form: Form,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        spans: Spans,
        log_sum: jax.Array,
        mean: jax.Array,
        gradient: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads, kv_heads, rows, sums = self._parts()
        run = self.placement.on_each_device(
            functools.partial(self.kernel.backward, form),
            (heads, kv_heads, kv_heads, rows, sums, sums, heads),
            (heads, kv_heads, kv_heads),
        )
        return run(q, k, v, spans, log_sum, mean, gradient)

    def _parts(self) -> tuple[PartitionSpec, ...]:
        """Of q, of k and v, of spans, and of what is a number for each query and head."""
        spec = self.placement.activation
        return (
            spec("batch", "sequence", "heads", None).spec,
            spec("batch", "sequence", "kv_heads", None).spec,
            spec("batch", "sequence").spec,
            spec("batch", "heads", "sequence").spec,
        )


def write(cache: jax.Array, new: jax.Array, context: Context) -> jax.Array:
    """[B, S, G, K] into the layer's slots [L, B, G, T, K], from `context.cache_index` on."""
    by_head = jnp.swapaxes(new, 1, 2)[None].astype(cache.dtype)
    return jax.lax.dynamic_update_slice(cache, by_head, (context.cache_layer, 0, 0, context.cache_index, 0))


def read(cache: jax.Array, context: Context) -> jax.Array:
    """The layer's [B, T, G, K]."""
    return jnp.swapaxes(jax.lax.dynamic_index_in_dim(cache, context.cache_layer, keepdims=False), 1, 2)
