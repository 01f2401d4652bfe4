"""Kernels of attention_pallas.py: the work of one program, on refs as given by its _BlockSpecs.

Letters: S a block of queries, T a block of keys, K head size.
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

from jaxopt_llm.kernels.attention_types import AttentionParameters, Tile

LOG2_E = math.log2(math.e)  # GPUs have an instruction for exp2
MASKED = float(jnp.finfo(jnp.float32).min)  # finite: score - peak of a query that sees nothing must not be NaN

Carry = TypeVar("Carry")


def attention_forward(parameters: AttentionParameters, tile: Tile, *refs: Any) -> None:
    """Compute the output and the log of the softmax sum of a block of queries."""
    bounds, first, last, q, k, v, out, log_sum = refs
    rows = _Rows(_reversed_program_id(), tile.queries)
    row_mask = rows.mask_within(q.shape[0])
    block_q, block_first, block_last = _load(q, rows.slice, row_mask), first[rows.slice], last[rows.slice]

    def step(_: Any, block: Any, masked: bool, carry: Any) -> Any:
        total, peak, summed = carry
        key_rows = _Rows(block, tile.keys)
        mask = key_rows.mask_within(k.shape[0]) if masked else None
        products = triton.dot(block_q, _load(k, key_rows.slice, mask), trans_b=True)  # [S, T]
        scores = _scores_per_unit(parameters, products)
        if masked:
            indices = key_rows.indices()[None]
            visible = (block_first[:, None] <= indices) & (indices <= block_last[:, None])
            scores = jnp.where(visible, scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.exp2((scores - new_peak[:, None]) * (_score_unit(parameters) * LOG2_E))
        decay = jnp.exp2((peak - new_peak) * (_score_unit(parameters) * LOG2_E))
        values = _load(v, key_rows.slice, mask)
        summed = summed * decay[:, None] + triton.dot(weights.astype(values.dtype), values)
        return total * decay + jnp.sum(weights, axis=1), new_peak, summed

    # Whatever a query sums before the first key that it sees decays to 0 with this key.
    nothing = jnp.zeros((tile.queries,), jnp.float32)
    carry = nothing, nothing + MASKED, jnp.zeros(block_q.shape, jnp.float32)
    total, peak, summed = _loop_over_blocks(bounds, rows.block, None, step, carry)
    sees = block_first <= block_last
    _store(out, rows.slice, summed / jnp.where(sees, total, jnp.inf)[:, None], row_mask)
    _store(log_sum, rows.slice, jnp.where(sees, peak * _score_unit(parameters) + jnp.log(total), jnp.inf), row_mask)


def attention_d_queries(parameters: AttentionParameters, tile: Tile, *refs: Any) -> None:
    """Compute the gradient of a block of queries."""
    bounds, first, last, q, k, v, gradient, log_sum, delta, d_q = refs
    rows = _Rows(_reversed_program_id(), tile.queries)
    row_mask = rows.mask_within(q.shape[0])
    block_q, block_gradient = (_load(x, rows.slice, row_mask) for x in (q, gradient))  # [S, K]
    block_log_sum, block_delta = (_load(x, rows.slice, row_mask)[:, None] for x in (log_sum, delta))
    block_first, block_last = first[rows.slice][:, None], last[rows.slice][:, None]

    def step(_: Any, block: Any, masked: bool, summed: Any) -> Any:
        key_rows = _Rows(block, tile.keys)
        mask = key_rows.mask_within(k.shape[0]) if masked else None
        keys, values = (_load(x, key_rows.slice, mask) for x in (k, v))
        indices = key_rows.indices()[None]
        visible = (block_first <= indices) & (indices <= block_last) if masked else None
        products = triton.dot(block_q, keys, trans_b=True)  # [S, T]
        d_weights = triton.dot(block_gradient, values, trans_b=True)
        _, d_products = _recompute_weights(parameters, products, visible, d_weights, block_log_sum, block_delta)
        return summed + triton.dot(d_products.astype(keys.dtype), keys)

    index, zeros = rows.slice, jnp.zeros(block_q.shape, jnp.float32)
    _store(d_q, index, _loop_over_blocks(bounds, rows.block, None, step, zeros), row_mask)


def attention_d_keys(parameters: AttentionParameters, tile: Tile, *refs: Any) -> None:
    """Compute the gradients of a block of keys and values, summed over the query heads that read them."""
    bounds, first, last, q, k, v, gradient, log_sum, delta, d_k, d_v = refs
    key_rows = _Rows(pl.program_id(0), tile.keys)
    key_mask = key_rows.mask_within(k.shape[0])
    block_k, block_v = (_load(x, key_rows.slice, key_mask) for x in (k, v))  # [T, K]
    indices = key_rows.indices()[:, None]

    def step(head: Any, block: Any, masked: bool, carry: Any) -> Any:
        d_keys, d_values = carry
        rows = _Rows(block, tile.queries)
        mask = rows.mask_within(q.shape[0]) if masked else None
        queries, d_out = (_load(x, (rows.slice, head), mask) for x in (q, gradient))
        head_log_sum, head_delta = (_load(x, (head, rows.slice), mask)[None] for x in (log_sum, delta))
        visible = (first[rows.slice][None] <= indices) & (indices <= last[rows.slice][None]) if masked else None
        products = triton.dot(block_k, queries, trans_b=True)  # [T, S]: no matmul below transposes its operands
        d_weights = triton.dot(block_v, d_out, trans_b=True)
        weights, d_products = _recompute_weights(parameters, products, visible, d_weights, head_log_sum, head_delta)
        d_values += triton.dot(weights.astype(d_out.dtype), d_out)
        return d_keys + triton.dot(d_products.astype(queries.dtype), queries), d_values

    zeros = jnp.zeros(block_k.shape, jnp.float32)
    d_keys, d_values = _loop_over_blocks(bounds, key_rows.block, q.shape[1], step, (zeros, zeros))
    _store(d_k, key_rows.slice, d_keys, key_mask)
    _store(d_v, key_rows.slice, d_values, key_mask)


def _scores_per_unit(parameters: AttentionParameters, products: jax.Array) -> jax.Array:
    """Return the scores, in units of `_score_unit`, from the dot products of queries and keys."""
    return products if parameters.softcap is None else jnp.tanh(products * (parameters.scale / parameters.softcap))


def _score_unit(parameters: AttentionParameters) -> float:
    """Return the factor that makes scores of the values of `_scores_per_unit`."""
    unit = parameters.scale if parameters.softcap is None else parameters.softcap
    assert unit > 0, "the maximum is taken before the values are multiplied by the unit"
    return unit


def _recompute_weights(
    parameters: AttentionParameters,
    products: jax.Array,
    visible: jax.Array | None,
    d_weights: jax.Array,
    log_sum: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the softmax weights, and the gradient of the dot products of queries and keys.

    log_sum and delta broadcast against the products.
    """
    scores = _scores_per_unit(parameters, products)
    masked = scores if visible is None else jnp.where(visible, scores, MASKED)
    weights = jnp.exp2((masked * _score_unit(parameters) - log_sum) * LOG2_E)
    d_products = weights * (d_weights * parameters.scale - delta * parameters.scale)
    return weights, d_products if parameters.softcap is None else d_products * (1 - scores * scores)


def _loop_over_blocks(
    bounds: Any, index: Any, heads: int | None, step: Callable[[Any, Any, bool, Carry], Carry], carry: Carry
) -> Carry:
    """Call `step(head, block, masked, carry)` for the blocks that block `index` reads.

    heads: number of heads for which the blocks are read; None calls `step` with the head None, once for each block.

    The blocks with a mask lie on both sides of the blocks without one, but they share one loop. So there are two loops,
    and Triton overlaps the loads of each with its matmuls.
    """
    begin, full_begin, full_stop, stop = (bounds[index, i] for i in range(4))
    full = full_stop - full_begin

    def loop(count: Any, get_block: Callable[[Any], Any], masked: bool, carry: Carry) -> Carry:
        def body(i: Any, carry: Carry) -> Carry:
            head, i = (None, i) if heads is None else (lax.div(i, count), lax.rem(i, count))
            return step(head, get_block(i), masked, carry)

        return lax.fori_loop(0, count if heads is None else heads * count, body, carry)

    carry = loop(full, lambda i: full_begin + i, False, carry)
    return loop(stop - begin - full, lambda i: begin + i + jnp.where(begin + i < full_begin, 0, full), True, carry)


def _reversed_program_id() -> jax.Array:
    """Return the index of the program's block: the blocks with the most keys under a causal mask start first."""
    return pl.num_programs(0) - 1 - pl.program_id(0)


@dataclass(frozen=True)
class _Rows:
    """Rows of the block with the index `block`."""

    block: Any
    size: int

    @property
    def slice(self) -> Any:
        return pl.ds(self.block * self.size, self.size)

    def indices(self) -> jax.Array:
        return self.block * self.size + jnp.arange(self.size)

    def mask_within(self, length: int) -> jax.Array | None:
        """Return the mask of the rows below `length`, [size], or None if the block size divides `length`."""
        return None if length % self.size == 0 else self.indices() < length


def _load(ref: Any, index: Any, row_mask: jax.Array | None) -> jax.Array:
    """Load rows; those outside the mask become 0. row_mask: None loads all rows."""
    part = ref.at[index]
    return triton.load(part) if row_mask is None else triton.load(part, mask=_expand(row_mask, part), other=0)


def _store(ref: Any, index: Any, value: jax.Array, row_mask: jax.Array | None) -> None:
    part = ref.at[index]
    triton.store(part, value.astype(ref.dtype), mask=None if row_mask is None else _expand(row_mask, part))


def _expand(row_mask: jax.Array, ref: Any) -> jax.Array:
    return row_mask[:, None] if len(ref.shape) == 2 else row_mask
