"""Grouped-query self-attention with its projections and its cache.

Letters: B batch, S sequence, T cache length, D width, H heads, G key-value heads, K head size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from jaxopt_llm.kernels.attention import attention
from jaxopt_llm.model import weights
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.layers import recomputed, rotary
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.model.weights import Weight


@struct.dataclass
class Cache:
    """Keys and values of the tokens seen so far, [B, T, G, K]; slot t holds position t - context.cache_padding."""

    key: jax.Array
    value: jax.Array


def attention_specs(
    width: int, heads: int, kv_heads: int, head_dim: int, residual_scale: float
) -> dict[str, ParamSpec]:
    kv = ParamSpec((width, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), (0,), normal())
    return {
        "query": ParamSpec((width, heads, head_dim), ("embed", "heads", "head_dim"), (0,), normal()),
        "key": kv,
        "value": kv,
        "output": ParamSpec(
            (heads, head_dim, width), ("heads", "head_dim", "embed"), (0, 1), normal(residual_scale)
        ),
    }  # fmt: skip


def self_attention(
    params: dict[str, Weight],
    norm: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    context: Context,
    *,
    rope_theta: float,
    window: int | None,
    cache: Cache | None,
) -> tuple[jax.Array, Cache | None]:
    """Attention to norm(x). x: [B, S, D] -> [B, S, D], and the cache with this call's keys and values written at
    `context.cache_index`."""
    constrain = context.placement.constrain

    @recomputed
    def project(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = norm(x)
        return (
            weights.einsum("BSD,DHK->BSHK", x, params["query"]),
            weights.einsum("BSD,DGK->BSGK", x, params["key"]),
            weights.einsum("BSD,DGK->BSGK", x, params["value"]),
        )

    q, k, v = project(x)
    q = rotary(q, context.positions, rope_theta)
    k = rotary(k, context.positions, rope_theta)
    key_positions = key_segment_ids = None
    if cache is not None:
        at = (0, context.cache_index, 0, 0)
        cache = Cache(
            key=jax.lax.dynamic_update_slice(cache.key, k.astype(cache.key.dtype), at),
            value=jax.lax.dynamic_update_slice(cache.value, v.astype(cache.value.dtype), at),
        )
        k, v = cache.key, cache.value
        # Slots not yet written lie after every query's position: the causal mask hides them.
        key_positions = jnp.arange(k.shape[1]) - context.cache_padding[:, None]
        key_segment_ids = (key_positions >= 0).astype(jnp.int32)  # the tokens are 1, what pads them is 0
    if context.placement.replicates("kv_heads", k.shape[2]):
        # Repeated, heads split over `tensor` again: a group cannot be cut.
        k = constrain(jnp.repeat(k, q.shape[2] // k.shape[2], axis=2), "batch", "sequence", "heads", "head_dim")
        v = constrain(jnp.repeat(v, q.shape[2] // v.shape[2], axis=2), "batch", "sequence", "heads", "head_dim")
    out = attention(
        q,
        k,
        v,
        positions=context.positions,
        segment_ids=context.segment_ids,
        key_positions=key_positions,
        key_segment_ids=key_segment_ids,
        window=window,
    )
    return weights.einsum("BSHK,HKD->BSD", out, params["output"]), cache
