"""Flash attention, forward and backward, as Triton kernels written in Pallas, for NVIDIA's GPUs from Ampere on.

Online softmax in the forward pass; the backward forms the scores again from the log of their softmax's sum (Dao 2023,
arXiv:2307.08691). Blocks of keys that no query of a block sees are never read, be it for causality, a window or
documents, and those that all of its queries see are not masked.

Letters: B batch, S queries, T keys, H heads, G key-value heads, R = H / G, K head size, N blocks of rows.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxopt_llm.kernels import attention_pallas_kernels as kernels
from jaxopt_llm.kernels.attention_pallas_kernels import Tile
from jaxopt_llm.kernels.spans import Form, Spans

CAPABILITY = (8, 0)  # the least that is supported


@dataclass(frozen=True)
class Blocks:
    forward: Tile
    d_queries: Tile
    d_keys: Tile  # keys and values


# By head size and bytes of an element; powers of two, at least 16. One choice for A100, RTX 4090, H100 and B200: what
# fits into the least shared memory of these (101,376 bytes a block), also in float32's highest precision, and spills no
# more than a few registers. Compiled for all of them, timed on none.
BLOCKS = {
    (64, 2): Blocks(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    (128, 2): Blocks(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
    (256, 2): Blocks(Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(16, 64, 8, 2)),
    (64, 4): Blocks(Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    (128, 4): Blocks(Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    (256, 4): Blocks(Tile(32, 16, 8, 2), Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
}


def problems(head_dim: int, dtype: Any, capability: tuple[int, int]) -> list[str]:
    """What of a call is not supported, in words. capability: the GPU's compute capability."""
    found = []
    sizes = sorted({size for size, _ in BLOCKS})
    if head_dim not in sizes:
        found.append(f"head_dim={head_dim}: the pallas kernel takes one of {sizes}, xla any")
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        found.append(f"dtype={jnp.dtype(dtype).name}: the pallas kernel takes bfloat16, float16 or float32, xla any")
    if capability < CAPABILITY:
        found.append(f"capability={capability}: the pallas kernel wants {CAPABILITY} (Ampere) or later, xla none")
    return found


def forward(
    form: Form,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: Spans,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """q: [B, S, H, K]; k, v: [B, T, G, K]; one dtype. Returns the output [B, S, H, K] in it, and the log of the
    softmax's sum, float32 [B, H, S]; of a query that sees nothing these are 0 and inf.

    blocks: those of BLOCKS by default. interpret: without Triton, on any device and slowly.
    """
    batch, queries, heads, _ = q.shape
    tile = (blocks or _blocks(q)).forward
    spans = _within(spans, k.shape[1], tile.queries)
    bounds = _keys_to_read(spans, tile)
    at = _Specs.of(bounds, spans, q, k)
    call = pl.pallas_call(
        functools.partial(kernels.attention_forward, form, tile),
        name=form.named("attention_forward"),
        grid=(bounds.shape[1], heads, batch),
        in_specs=at.operands,
        out_specs=[at.queries, at.statistics],
        out_shape=[_like(q), jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)],
        compiler_params=_compiler_params(tile),
        interpret=interpret,
    )
    out, log_sum = call(bounds, spans.first, spans.last, q, k, v)
    return out, log_sum


def backward(
    form: Form,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: Spans,
    log_sum: jax.Array,
    mean: jax.Array,
    gradient: jax.Array,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v, in their dtype, from that of the output, [B, S, H, K]. The rest as in `forward`.

    log_sum: as `forward` returns it, or of a longer row of keys, of which these are a part. mean: the sum over K of
    gradient × output, of the whole row; float32 [B, H, S] both.

    Two kernels, over queries and over keys: one for all three gradients would have to sum one of them in memory, in an
    order that changes from run to run.
    """
    chosen, arrays = blocks or _blocks(q), (q, k, v, gradient, log_sum, mean)
    d_q = _d_queries(form, chosen.d_queries, interpret, spans, *arrays)
    d_k, d_v = _d_keys(form, chosen.d_keys, interpret, spans, *arrays)
    return d_q, d_k, d_v


def _d_queries(form: Form, tile: Tile, interpret: bool, spans: Spans, *arrays: jax.Array) -> jax.Array:
    q, k = arrays[:2]
    batch, _, heads, _ = q.shape
    spans = _within(spans, k.shape[1], tile.queries)
    bounds = _keys_to_read(spans, tile)
    at = _Specs.of(bounds, spans, q, k)
    call = pl.pallas_call(
        functools.partial(kernels.attention_d_queries, form, tile),
        name=form.named("attention_d_queries"),
        grid=(bounds.shape[1], heads, batch),
        in_specs=[*at.operands, at.queries, at.statistics, at.statistics],
        out_specs=at.queries,
        out_shape=_like(q),
        compiler_params=_compiler_params(tile),
        interpret=interpret,
    )
    return call(bounds, spans.first, spans.last, *arrays)


def _d_keys(form: Form, tile: Tile, interpret: bool, spans: Spans, *arrays: jax.Array) -> list[jax.Array]:
    """Gradients of k and of v."""
    q, k, v = arrays[:3]
    batch, keys, groups, _ = k.shape
    spans = _within(spans, keys, tile.queries)
    bounds = _queries_to_read(spans, tile, keys)
    at = _Specs.of(bounds, spans, q, k, own=q.shape[2] // groups)
    call = pl.pallas_call(
        functools.partial(kernels.attention_d_keys, form, tile),
        name=form.named("attention_d_keys"),
        grid=(bounds.shape[1], groups, batch),
        in_specs=[*at.operands, at.queries, at.statistics, at.statistics],
        out_specs=[at.keys, at.keys],
        out_shape=[_like(k), _like(v)],
        compiler_params=_compiler_params(tile),
        interpret=interpret,
    )
    return call(bounds, spans.first, spans.last, *arrays)


def _blocks(q: jax.Array) -> Blocks:
    return BLOCKS[q.shape[-1], q.dtype.itemsize]


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _compiler_params(tile: Tile) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)


@dataclass(frozen=True)
class _Specs:
    """What the refs of one program of a grid (blocks, heads, batch) have of the arrays: whole rows, of its own heads.

    Without a block along the rows, what a kernel reads and writes of them is where it says so.
    """

    bounds: pl.BlockSpec  # [N, 4] of [B, N, 4]
    spans: pl.BlockSpec  # [S] of [B, S], padded
    queries: pl.BlockSpec  # [S, own, K] of [B, S, H, K]
    statistics: pl.BlockSpec  # [own, S] of [B, H, S]
    keys: pl.BlockSpec  # [T, K] of [B, T, G, K]

    @property
    def operands(self) -> list[pl.BlockSpec]:
        """Bounds, first and last of the spans, q, k and v: what every kernel has."""
        return [self.bounds, self.spans, self.spans, self.queries, self.keys, self.keys]

    @classmethod
    def of(cls, bounds: jax.Array, spans: Spans, q: jax.Array, k: jax.Array, own: int | None = None) -> "_Specs":
        """own: query heads of a program; None for one, without a dimension of its own."""
        (_, queries, heads, size), (_, keys, groups, _) = q.shape, k.shape
        blocks, programs_per_group = bounds.shape[1], heads // groups // (own or 1)
        return cls(
            bounds=pl.BlockSpec((None, blocks, 4), lambda i, h, b: (b, 0, 0)),
            spans=pl.BlockSpec((None, spans.first.shape[1]), lambda i, h, b: (b, 0)),
            queries=pl.BlockSpec((None, queries, own, size), lambda i, h, b: (b, 0, h, 0)),
            statistics=pl.BlockSpec((None, own, queries), lambda i, h, b: (b, h, 0)),
            keys=pl.BlockSpec((None, keys, None, size), lambda i, h, b: (b, 0, lax.div(h, programs_per_group), 0)),
        )


# ---- What a program reads. In this section, N blocks of queries and M of keys.


def _within(spans: Spans, keys: int, block: int) -> Spans:
    """The spans cut to the keys that there are, [B, S] padded to whole blocks of queries: the padding sees nothing.

    All that see nothing come out as first = keys, last = -1: neutral among the least of first and the greatest of last.
    """
    first, last = jnp.maximum(spans.first, 0), jnp.minimum(spans.last, keys - 1)
    padding = [(0, 0), (0, -first.shape[1] % block)]
    return Spans(
        jnp.pad(jnp.where(first <= last, first, keys), padding, constant_values=keys),
        jnp.pad(jnp.where(first <= last, last, -1), padding, constant_values=-1),
    )


def _extremes(spans: Spans, block: int) -> tuple[jax.Array, ...]:
    """Least and greatest first, least and greatest last, of each block of queries: [B, N] each."""
    first, last = (x.reshape(x.shape[0], -1, block) for x in (spans.first, spans.last))
    return first.min(-1), first.max(-1), last.min(-1), last.max(-1)


def _keys_to_read(spans: Spans, tile: Tile) -> jax.Array:
    """Of each block of queries, the blocks of keys: [B, N, 4], see `_bounds`."""
    least_first, greatest_first, least_last, greatest_last = _extremes(spans, tile.queries)
    return _bounds(
        least_first // tile.keys,
        pl.cdiv(greatest_first, tile.keys),
        (least_last + 1) // tile.keys,
        greatest_last // tile.keys + 1,
    )


def _queries_to_read(spans: Spans, tile: Tile, keys: int) -> jax.Array:
    """Of each block of keys, the blocks of queries: [B, M, 4], see `_bounds`."""
    least_first, greatest_first, least_last, greatest_last = (x[:, None] for x in _extremes(spans, tile.queries))
    start = jnp.arange(0, keys, tile.keys)[:, None]
    end = jnp.minimum(start + tile.keys, keys) - 1
    some = (least_first <= end) & (greatest_last >= start)  # [B, M, N]
    every = (greatest_first <= start) & (least_last >= end)
    block = jnp.arange(some.shape[-1])

    def run(which: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.min(jnp.where(which, block, block.size), axis=-1), jnp.max(jnp.where(which, block + 1, 0), axis=-1)

    (begin, stop), (full_begin, full_stop) = run(some), run(every)
    without_gaps = jnp.sum(every, axis=-1) == full_stop - full_begin  # always, if first and last do not decrease
    return _bounds(begin, full_begin, jnp.where(without_gaps, full_stop, full_begin), stop)


def _bounds(begin: jax.Array, full_begin: jax.Array, full_stop: jax.Array, stop: jax.Array) -> jax.Array:
    """int32 [..., 4], in order: a program reads the blocks from begin to stop, without a mask from full_begin to
    full_stop."""
    stop = jnp.maximum(stop, begin)
    full_begin = jnp.clip(full_begin, begin, stop)
    return jnp.stack([begin, full_begin, jnp.clip(full_stop, full_begin, stop), stop], axis=-1).astype(jnp.int32)
