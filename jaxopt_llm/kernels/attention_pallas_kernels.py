"""The kernels of attention_pallas.py: what one program does, on refs as _Specs there has them.

Letters: S a block of queries, T one of keys, K head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxopt_llm.kernels.spans import Form

LOG2_E = math.log2(math.e)  # GPUs have an instruction for powers of two
MASKED = float(jnp.finfo(jnp.float32).min)  # finite: score - peak of a query that sees nothing must not be NaN

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Tile:
    """What one program of a kernel works on at once, in rows, and how Triton compiles it."""

    queries: int
    keys: int
    warps: int
    stages: int  # loads of the loop in flight, each with shared memory of its own


def attention_forward(
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


def attention_d_queries(
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


def attention_d_keys(
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
