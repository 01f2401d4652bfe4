"""Flash attention, forward and backward, as Triton kernels written in Pallas, for NVIDIA's GPUs from Ampere on.

Online softmax in the forward pass; the backward forms the scores again from the log of their softmax's sum (Dao 2023,
arXiv:2307.08691). Blocks of keys that no query of a block sees are never read, be it for causality, a window or
documents, and those that all of its queries see are not masked.

Letters: B batch, S queries, T keys, H heads, G key-value heads, R = H / G, K head size, N blocks of rows.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxopt_llm.kernels.spans import Form, Spans

LOG2_E = math.log2(math.e)  # GPUs have an instruction for powers of two
MASKED = float(jnp.finfo(jnp.float32).min)  # finite: score - peak of a query that sees nothing must not be NaN
CAPABILITY = (8, 0)  # the least that is supported

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Tile:
    """What one program of a kernel works on at once, in rows, and how Triton compiles it."""

    queries: int
    keys: int
    warps: int
    stages: int  # loads of the loop in flight, each with shared memory of its own


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
        functools.partial(_attention_forward, form, tile),
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
        functools.partial(_attention_d_queries, form, tile),
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
        functools.partial(_attention_d_keys, form, tile),
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


# ---- Kernels, on refs as _Specs has them. In this section, S is a block of queries and T one of keys.


def _attention_forward(
    form: Form,
    tile: Tile,
    bounds: Any,
    first: Any,
    last: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    log_sum: Any,
) -> None:
    rows = _Rows(_from_the_last(), tile.queries)
    own = rows.inside(q.shape[0])
    own_q, own_first, own_last = _load(q, rows.slice, own), first[rows.slice], last[rows.slice]

    def step(_: Any, block: Any, masked: bool, carry: Any) -> Any:
        total, peak, summed = carry
        key_rows = _Rows(block, tile.keys)
        there = key_rows.inside(k.shape[0]) if masked else None
        scores = _bounded(form, triton.dot(own_q, _load(k, key_rows.slice, there), trans_b=True))  # [S, T]
        if masked:
            numbers = key_rows.numbers()[None]
            visible = (own_first[:, None] <= numbers) & (numbers <= own_last[:, None])
            scores = jnp.where(visible, scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.exp2((scores - new_peak[:, None]) * (_unit(form) * LOG2_E))
        fading = jnp.exp2((peak - new_peak) * (_unit(form) * LOG2_E))
        values = _load(v, key_rows.slice, there)
        summed = summed * fading[:, None] + triton.dot(weights.astype(values.dtype), values)
        return total * fading + jnp.sum(weights, axis=1), new_peak, summed

    # What a query sums up before it sees anything fades to 0 with the first key that it sees.
    nothing = jnp.zeros((tile.queries,), jnp.float32)
    carry = nothing, nothing + MASKED, jnp.zeros(own_q.shape, jnp.float32)
    total, peak, summed = _over_blocks(bounds, rows.block, None, step, carry)
    sees = own_first <= own_last
    _store(out, rows.slice, summed / jnp.where(sees, total, jnp.inf)[:, None], own)
    _store(log_sum, rows.slice, jnp.where(sees, peak * _unit(form) + jnp.log(total), jnp.inf), own)


def _attention_d_queries(
    form: Form,
    tile: Tile,
    bounds: Any,
    first: Any,
    last: Any,
    q: Any,
    k: Any,
    v: Any,
    gradient: Any,
    log_sum: Any,
    mean: Any,
    d_q: Any,
) -> None:
    rows = _Rows(_from_the_last(), tile.queries)
    own = rows.inside(q.shape[0])
    own_q, own_gradient = (_load(x, rows.slice, own) for x in (q, gradient))  # [S, K]
    own_log_sum, own_mean = (_load(x, rows.slice, own)[:, None] for x in (log_sum, mean))
    own_first, own_last = first[rows.slice][:, None], last[rows.slice][:, None]

    def step(_: Any, block: Any, masked: bool, summed: Any) -> Any:
        key_rows = _Rows(block, tile.keys)
        there = key_rows.inside(k.shape[0]) if masked else None
        keys, values = (_load(x, key_rows.slice, there) for x in (k, v))
        numbers = key_rows.numbers()[None]
        visible = (own_first <= numbers) & (numbers <= own_last) if masked else None
        products = triton.dot(own_q, keys, trans_b=True)  # [S, T]
        d_weights = triton.dot(own_gradient, values, trans_b=True)
        _, d_products = _weights_again(form, products, visible, d_weights, own_log_sum, own_mean)
        return summed + triton.dot(d_products.astype(keys.dtype), keys)

    _store(d_q, rows.slice, _over_blocks(bounds, rows.block, None, step, jnp.zeros(own_q.shape, jnp.float32)), own)


def _attention_d_keys(
    form: Form,
    tile: Tile,
    bounds: Any,
    first: Any,
    last: Any,
    q: Any,
    k: Any,
    v: Any,
    gradient: Any,
    log_sum: Any,
    mean: Any,
    d_k: Any,
    d_v: Any,
) -> None:
    key_rows = _Rows(pl.program_id(0), tile.keys)
    own = key_rows.inside(k.shape[0])
    own_k, own_v = (_load(x, key_rows.slice, own) for x in (k, v))  # [T, K]
    numbers = key_rows.numbers()[:, None]

    def step(head: Any, block: Any, masked: bool, carry: Any) -> Any:
        d_keys, d_values = carry
        rows = _Rows(block, tile.queries)
        there = rows.inside(q.shape[0]) if masked else None
        queries, d_out = (_load(x, (rows.slice, head), there) for x in (q, gradient))
        its_log_sum, its_mean = (_load(x, (head, rows.slice), there)[None] for x in (log_sum, mean))
        visible = (first[rows.slice][None] <= numbers) & (numbers <= last[rows.slice][None]) if masked else None
        products = triton.dot(own_k, queries, trans_b=True)  # [T, S]: no product below transposes what it multiplies
        d_weights = triton.dot(own_v, d_out, trans_b=True)
        weights, d_products = _weights_again(form, products, visible, d_weights, its_log_sum, its_mean)
        d_values += triton.dot(weights.astype(d_out.dtype), d_out)
        return d_keys + triton.dot(d_products.astype(queries.dtype), queries), d_values

    zeros = jnp.zeros(own_k.shape, jnp.float32)
    d_keys, d_values = _over_blocks(bounds, key_rows.block, q.shape[1], step, (zeros, zeros))
    _store(d_k, key_rows.slice, d_keys, own)
    _store(d_v, key_rows.slice, d_values, own)


def _bounded(form: Form, products: jax.Array) -> jax.Array:
    """The scores, in units of `_unit`, of products of queries and keys."""
    return products if form.softcap is None else jnp.tanh(products * (form.scale / form.softcap))


def _unit(form: Form) -> float:
    unit = form.scale if form.softcap is None else form.softcap
    assert unit > 0, "the largest score is looked for before this multiplies it"
    return unit


def _weights_again(
    form: Form,
    products: jax.Array,
    visible: jax.Array | None,
    d_weights: jax.Array,
    log_sum: jax.Array,
    mean: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The softmax's weights, and the gradient of the products of queries and keys; log_sum and mean broadcast."""
    scores = _bounded(form, products)
    seen = scores if visible is None else jnp.where(visible, scores, MASKED)
    weights = jnp.exp2((seen * _unit(form) - log_sum) * LOG2_E)
    d_products = weights * (d_weights * form.scale - mean * form.scale)
    return weights, d_products if form.softcap is None else d_products * (1 - scores * scores)


def _over_blocks(
    bounds: Any, own: Any, heads: int | None, step: Callable[[Any, Any, bool, Carry], Carry], carry: Carry
) -> Carry:
    """`step(head, block, masked, carry)` over the blocks that block number `own` reads, for each head if there are any.

    Those with a mask lie on both sides of those without one and are one loop all the same: two loops in all, whose
    loads Triton overlaps with their products.
    """
    begin, full_begin, full_stop, stop = (bounds[own, i] for i in range(4))
    full = full_stop - full_begin

    def over(count: Any, block_of: Callable[[Any], Any], masked: bool, carry: Carry) -> Carry:
        def body(i: Any, carry: Carry) -> Carry:
            head, i = (None, i) if heads is None else (lax.div(i, count), lax.rem(i, count))
            return step(head, block_of(i), masked, carry)

        return lax.fori_loop(0, count if heads is None else heads * count, body, carry)

    carry = over(full, lambda i: full_begin + i, False, carry)
    return over(stop - begin - full, lambda i: begin + i + jnp.where(begin + i < full_begin, 0, full), True, carry)


def _from_the_last() -> jax.Array:
    """The number of a program's block: those with the most keys under a causal mask start first."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


@dataclass(frozen=True)
class _Rows:
    """Those of block number `block`."""

    block: Any
    size: int

    @property
    def slice(self) -> Any:
        return pl.ds(self.block * self.size, self.size)

    def numbers(self) -> jax.Array:
        return self.block * self.size + jnp.arange(self.size)

    def inside(self, length: int) -> jax.Array | None:
        """Which of them an array of that many rows has, [size]; None where blocks divide it."""
        return None if length % self.size == 0 else self.numbers() < length


def _load(ref: Any, where: Any, inside: jax.Array | None) -> jax.Array:
    """What is not inside comes as 0. inside: of the rows, None for all."""
    part = ref.at[where]
    return triton.load(part) if inside is None else triton.load(part, mask=_over(inside, part), other=0)


def _store(ref: Any, where: Any, value: jax.Array, inside: jax.Array | None) -> None:
    part = ref.at[where]
    triton.store(part, value.astype(ref.dtype), mask=None if inside is None else _over(inside, part))


def _over(inside: jax.Array, ref: Any) -> jax.Array:
    return inside[:, None] if len(ref.shape) == 2 else inside
