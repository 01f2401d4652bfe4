"""Multi-head latent attention (MLA; DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) and its compressed cache.

Keys and values are projections of one small vector per token, its latent. Rotary positions apply to a part of each
query and to one key that all heads share. Over a sequence, keys and values are computed and attention is the usual one.
With a cache they are not: the cache holds only the latent and the rotary key of each token, and heads read them
directly. The projection of keys is absorbed into the queries, and that of values into the output (section 2.1.2).

Letters: B batch, S sequence, T slots of the cache, D width, H heads, Q rank of queries, R rank of keys and values,
N size of the part of a key that has no positions, P size of the rotary part, K = N + P, V head size of values.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint

from jaxopt_llm.config import ModelConfig
from jaxopt_llm.model import cache as rings
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.layers import Function, project, project_all, recomputed
from jaxopt_llm.model.linear import weights
from jaxopt_llm.model.linear.weights import Weight
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.model.self_attention import (
    AttentionOptions,
    attend_to_cache,
    attend_to_sequence,
    constrain_heads,
    keep_projection,
)
from jaxopt_llm.parallel.activations import all_gather_sequence, reduce_scatter_sequence
from jaxopt_llm.parallel.placement import Placement, constrain, mark

NORM_EPSILON = 1e-6  # of the latents' norms: fixed as in DeepSeek's code, independent of the other norms


@struct.dataclass
class LatentCache:
    """Cache of a layer, [B, 1, T, R + P], one slot per token: its normed latent, then its rotary key.

    It has the form of the keys of one head, which all heads read. Devices along `tensor` hold it whole. In two arrays,
    the keys would be joined for every token, which moves twice the bytes of the whole cache.
    """

    key: jax.Array


def latent_attention_specs(config: ModelConfig, residual_scale: float) -> dict[str, ParamSpec]:
    width, heads, rank = config.width, config.heads, config.mla.kv_rank

    def matrix(*dims: tuple[int, str]) -> ParamSpec:  # the first dimension is contracted
        return ParamSpec(tuple(size for size, _ in dims), tuple(axis for _, axis in dims), (0,), normal())

    stream, latent, head, value = (width, "embed"), (rank, "latent"), (heads, "heads"), (config.value_dim, "head_dim")
    queries, query_latent = (head, (config.head_dim, "head_dim")), (config.mla.query_rank, "latent")
    query = {"query": matrix(stream, *queries)}
    if config.mla.query_rank:
        query = {"query_down": matrix(stream, query_latent), "query_up": matrix(query_latent, *queries)}
    return query | {
        "latent": matrix(stream, latent),
        "rotary_key": matrix(stream, (config.mla.rotary_head_dim, "head_dim")),
        "key": matrix(latent, head, (config.key_dim, "head_dim")),
        "value": matrix(latent, head, value),
        "output": replace(matrix(head, value, stream), contracting=(0, 1), init=normal(residual_scale)),
    }


def latent_attention(
    params: dict[str, Weight],
    x: jax.Array,
    context: Context,
    *,
    norms: Mapping[str, Function],
    options: AttentionOptions,
    cache: LatentCache | None,
) -> tuple[jax.Array, LatentCache | None]:
    """Attend to x, normed, through latents. Arguments and results as in `self_attention`.

    norms: `attention_norm` of x, and `query_latent_norm` and `latent_norm` of the latents.
    """
    placement = context.placement
    by_head = functools.partial(constrain_heads, placement)

    def rotate(x: jax.Array) -> jax.Array:
        return x if options.rotary is None else options.rotary(x, context.positions, context.lengths)

    @recomputed
    def project_keys_and_values(latent: jax.Array) -> tuple[jax.Array, jax.Array]:
        normed = norms["latent_norm"](latent)
        key, value = project_all(normed, params, {"key": "BSR,RHN->BSHN", "value": "BSR,RHV->BSHV"}, placement)
        return keep_projection(placement, key, "key", "heads"), keep_projection(placement, value, "value", "heads")

    @recomputed
    def project_out(out: jax.Array) -> jax.Array:
        return project("BSHV,HVD->BSD", out, params, "output", placement)

    query, latent, rotary_key = _project_in(params, x, placement, norms)
    plain_query, rotary_query = jnp.split(query, [query.shape[-1] - rotary_key.shape[-1]], axis=-1)
    rotary_query, rotary_key = rotate(rotary_query), rotate(rotary_key[:, :, None])  # [B, S, H, P], [B, S, 1, P]
    if cache is None:
        key, value = project_keys_and_values(latent)
        rotary_key = jnp.broadcast_to(rotary_key, (*key.shape[:3], rotary_key.shape[-1]))
        parts = (plain_query, rotary_query), (key, rotary_key)
        q, k = (by_head(jnp.concatenate(part, -1), "heads") for part in parts)
        out = attend_to_sequence(q, k, value, context, options)
    else:
        normed = norms["latent_norm"](latent)[:, :, None]
        both = jnp.concatenate([normed, rotary_key], -1)
        ring, seen = rings.write(cache.key, both, context, options.last_keys)
        cache = LatentCache(ring)
        to_latent, to_value = (weights.gather_merged(params[name], (0,)) for name in ("key", "value"))
        latent_query = by_head(jnp.einsum("BSHN,RHN->BSHR", plain_query, to_latent), "heads")
        q = jnp.concatenate([latent_query, rotary_query], -1)
        k = _pin_layout(jnp.swapaxes(seen, 1, 2), placement)
        # Rotary keys are mixed, too, and left out: XLA would copy the latents out of the cache.
        mixed = attend_to_cache(q, k, k, context, options)[..., : latent.shape[-1]]
        out = jnp.einsum("BSHR,RHV->BSHV", by_head(mixed, "heads"), to_value)
    out = reduce_scatter_sequence(project_out(by_head(out, "heads")), placement)
    return mark(out, "attention_output", "product", "batch", "residual_sequence", "embed"), cache


def _pin_layout(x: jax.Array, placement: Placement) -> jax.Array:
    """Pin the row-major layout of a cache, [B, T, 1, R + P].

    XLA of jax 0.10.2 would choose another layout for the matmuls, and transpose the caches of all layers and back for
    every token. In a manual region, because XLA would gather a divided array.
    """
    spec = placement.activation("batch", None, None, None).spec
    row_major = functools.partial(with_layout_constraint, layouts=Layout((0, 1, 2, 3)))
    return placement.shard_map(row_major, (spec,), spec)(x)


def _project_in(
    params: dict[str, Weight], x: jax.Array, placement: Placement, norms: Mapping[str, Function]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries [B, S, H, K], latents [B, S, R] and shared keys [B, S, P] of x, normed, all before rotation."""

    def keep_whole(x: jax.Array, name: str) -> jax.Array:
        return constrain(placement, x, name, "projection", "batch", "sequence", None)

    @recomputed
    def project_down(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = all_gather_sequence(norms["attention_norm"](x), placement)
        x = mark(x, "attention_input", "input", "batch", "sequence", "embed")
        query_product = {"query": "BSD,DHK->BSHK"} if "query" in params else {"query_down": "BSD,DQ->BSQ"}
        products = query_product | {"latent": "BSD,DR->BSR", "rotary_key": "BSD,DP->BSP"}
        query, latent, rotary_key = project_all(x, params, products, placement)
        if "query" in params:
            query = keep_projection(placement, query, "query", "heads")
        else:
            query = keep_whole(query, "query_latent")
        return query, keep_whole(latent, "latent"), keep_whole(rotary_key, "rotary_key")

    @recomputed
    def project_query_up(latent: jax.Array) -> jax.Array:
        normed = norms["query_latent_norm"](latent)
        query = project("BSQ,QHK->BSHK", normed, params, "query_up", placement)
        return keep_projection(placement, query, "query", "heads")

    query, latent, rotary_key = project_down(x)
    return (query if "query" in params else project_query_up(query)), latent, rotary_key
