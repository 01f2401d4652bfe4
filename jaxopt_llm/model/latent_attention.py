"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1), and its compressed cache.

Keys and values are projections of one small vector of each token, its latent, and positions turn a part of the
queries and one key that all heads share. Over a sequence keys and values are formed, and attention is as any other.
With a cache they are not: the latent and the turned key are all that is kept of a token, and heads read them as they
are, with the projection of keys taken into the queries and that of values into the result (the paper's section 2.1.2).

Letters: B batch, S sequence, T cache length, L layers, D width, H heads, Q rank of queries, R of keys and values, N
size of a head's own keys, P of what is turned, K = N + P, V size of values.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint

from jaxopt_llm.model import weights
from jaxopt_llm.model.attention import attend_to_cache, attend_to_sequence, divided_by_head, read, write
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.intermediates import tag
from jaxopt_llm.model.layers import Function, Rotary, project, recomputed
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.model.weights import Weight
from jaxopt_llm.parallel.sharding import Placement

EPSILON = 1e-6  # of the latents' norms, as DeepSeek's code has it, whatever that of the others


@struct.dataclass
class LatentCache:
    """Of the tokens seen so far by a stack of layers the normed latent, [L, B, 1, T, R], and the turned key, [L, B, 1,
    T, P], a slot each: those of one head, which all read. Whole on the devices along `tensor`."""

    latent: jax.Array
    rotary_key: jax.Array


def specs(config: ModelConfig, residual_scale: float) -> dict[str, ParamSpec]:
    width, heads, rank = config.width, config.heads, config.latent_rank
    queries = (heads, config.head_dim), ("heads", "head_dim")

    def matrix(of: tuple[int, str], to: tuple[tuple[int, ...], tuple[str, ...]]) -> ParamSpec:
        return ParamSpec((of[0], *to[0]), (of[1], *to[1]), (0,), normal())

    stream, latent = (width, "embed"), (rank, "latent")
    query = {"query": matrix(stream, queries)}
    if config.query_rank:
        query = {
            "query_down": matrix(stream, ((config.query_rank,), ("latent",))),
            "query_up": matrix((config.query_rank, "latent"), queries),
        }
    return query | {
        "latent": matrix(stream, ((rank,), ("latent",))),
        "rotary_key": matrix(stream, ((config.rotary_head_dim,), ("head_dim",))),
        "key": matrix(latent, ((heads, config.key_dim), ("heads", "head_dim"))),
        "value": matrix(latent, ((heads, config.value_dim), ("heads", "head_dim"))),
        "output": ParamSpec(
            (heads, config.value_dim, width), ("heads", "head_dim", "embed"), (0, 1), normal(residual_scale)
        ),
    }  # fmt: skip


def attention(
    params: dict[str, Weight],
    x: jax.Array,
    context: Context,
    *,
    norm: Function,
    query_latent_norm: Function,
    latent_norm: Function,
    rotary: Rotary | None,
    window: int | None,
    scale: float,
    softcap: float | None,
    implementation: str,
    cache: LatentCache | None,
) -> tuple[jax.Array, LatentCache | None]:
    """`self_attention` through latents: see there."""
    placement = context.placement
    by_head = functools.partial(divided_by_head, placement)

    def whole(x: jax.Array) -> jax.Array:
        return placement.constrain(x, "batch", "sequence", None)

    def turned(x: jax.Array) -> jax.Array:
        return x if rotary is None else rotary(x, context.positions)

    @recomputed
    def inward(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = tag(placement.enter(norm(x)), "attention_input")
        if "query" in params:
            query = tag(by_head(project("BSD,DHK->BSHK", x, params, "query"), "heads"), "query")
        else:
            query = tag(whole(project("BSD,DQ->BSQ", x, params, "query_down")), "query_latent")
        latent = tag(whole(project("BSD,DR->BSR", x, params, "latent")), "latent")
        return query, latent, tag(whole(project("BSD,DP->BSP", x, params, "rotary_key")), "rotary_key")

    @recomputed
    def query_up(latent: jax.Array) -> jax.Array:
        normed = query_latent_norm(latent)
        return tag(by_head(project("BSQ,QHK->BSHK", normed, params, "query_up"), "heads"), "query")

    @recomputed
    def up(latent: jax.Array) -> tuple[jax.Array, jax.Array]:
        normed = latent_norm(latent)
        key = tag(by_head(project("BSR,RHN->BSHN", normed, params, "key"), "heads"), "key")
        return key, tag(by_head(project("BSR,RHV->BSHV", normed, params, "value"), "heads"), "value")

    query, latent, rotary_key = inward(x)
    query = query if "query" in params else query_up(query)
    own, shared = jnp.split(query, [query.shape[-1] - rotary_key.shape[-1]], axis=-1)
    shared, rotary_key = turned(shared), turned(rotary_key[:, :, None])  # [B, S, H, P], [B, S, 1, P]
    if cache is None:
        key, value = up(latent)
        rotary_key = jnp.broadcast_to(rotary_key, (*key.shape[:3], rotary_key.shape[-1]))
        q, k = (by_head(jnp.concatenate(each, -1), "heads") for each in ((own, shared), (key, rotary_key)))
        out = attend_to_sequence(implementation, q, k, value, context, window, scale, softcap)
    else:
        normed = latent_norm(latent)[:, :, None]
        cache = LatentCache(write(cache.latent, normed, context), write(cache.rotary_key, rotary_key, context))
        to_latent, to_value = (weights.whole(params[name], (0,)) for name in ("key", "value"))
        own = by_head(jnp.einsum("BSHN,RHN->BSHR", own, to_latent), "heads")
        latents, keys = (_as_it_lies(read(each, context), placement) for each in (cache.latent, cache.rotary_key))
        q, k = jnp.concatenate([own, shared], -1), jnp.concatenate([latents, keys], -1)
        mixed = attend_to_cache(q, k, latents, context, window, scale, softcap)
        out = jnp.einsum("BSHR,RHV->BSHV", by_head(mixed, "heads"), to_value)
    out = placement.leave(project("BSHV,HVD->BSD", by_head(out, "heads"), params, "output"))
    return tag(out, "attention_output"), cache


def _as_it_lies(x: jax.Array, placement: Placement) -> jax.Array:
    """[B, T, 1, R] of a cache, in this order. Products would have it in another, for which XLA turns the caches of all
    layers round, and back, for every token. On each device: of an array that is divided XLA would gather all."""
    spec = placement.activation("batch", None, None, None).spec
    in_order = functools.partial(with_layout_constraint, layouts=Layout((0, 1, 2, 3)))
    return placement.on_each_device(in_order, (spec,), spec)(x)
