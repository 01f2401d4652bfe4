"""Flash attention, forward and backward, as Triton kernels written in Pallas, for NVIDIA GPUs from Ampere on.

The forward uses online softmax; the backward computes the scores again from the log of their softmax sum (Dao 2023,
arXiv:2307.08691). A block of keys that no query of a block sees is never read, whether due to the causal mask, a window
or documents. A block of keys that all queries of a block see is not masked.

One query over a ring of keys, as a token of generation has, is a kernel of its own: the scores never leave the chip.

Letters: B batch, S queries, T keys, H heads, G key-value heads, R = H / G, K head size, N blocks of rows, P parts of
the keys.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxopt_llm.kernels import support
from jaxopt_llm.kernels.attention_types import (
    ALL_KEYS,
    AttentionParameters,
    AttentionResiduals,
    KeyRanges,
    Tile,
    Tiles,
)

# By head size and bytes of an element; powers of two, at least 16. The same blocks serve A100, RTX 4090, H100 and B200:
# they fit into the smallest shared memory of these (101,376 bytes per block), also at float32's highest precision, and
# spill no more than a few registers. They were compiled for all of these GPUs, and timed on none.
BLOCKS = {
    (64, 2): Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    (128, 2): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
    (256, 2): Tiles(Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(16, 64, 8, 2)),
    (64, 4): Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    (128, 4): Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    (256, 4): Tiles(Tile(32, 16, 8, 2), Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
}
reads_out = False
skips_keys = True
RING_PROGRAMS = 256  # of the kernel over rings, at least: about two for each multiprocessor
RING_BLOCK_BYTES = 2**14  # of the queries, and of a block of keys: with more, an RTX 4090 has too little shared memory
LOG2_E = math.log2(math.e)  # GPUs have an instruction for exp2
MASKED = float(jnp.finfo(jnp.float32).min)  # finite: score - peak of a query that sees nothing must not be NaN
# Specs of the kernels' operands: bounds, first and last, q, k, v; in the backward also d_out, log_sum and delta.
OPERANDS = "bounds", "key_ranges", "key_ranges", "queries", "keys", "keys", "queries", "statistics", "statistics"

Carry = TypeVar("Carry")


def problems(head_dim: int, dtype: Any, capability: tuple[int, int]) -> list[str]:
    """List the properties of a call that are not supported. capability: compute capability of the GPU."""
    sizes = sorted({size for size, _ in BLOCKS})
    found = [] if head_dim in sizes else [f"head_dim={head_dim}: the pallas kernel supports {sizes}, xla supports any"]
    return found + support.find_pallas_problems(dtype, capability)


def forward(
    parameters: AttentionParameters,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_ranges: KeyRanges,
    *,
    blocks: Tiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log of the softmax sum; see attention.Implementation.

    Values have the head size K of queries and keys.

    blocks: BLOCKS by default. interpret: run without Triton, slowly, on any device.
    """
    if parameters.ring:
        return _forward_over_ring(parameters, q, k, v, key_ranges, interpret)
    tile = (blocks or _default_blocks(q)).forward
    statistics = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    results = ("queries", q), ("statistics", statistics)
    out, log_sum = _call(attention_forward, parameters, tile, interpret, key_ranges, (q, k, v), results)
    return out, log_sum


def _forward_over_ring(
    parameters: AttentionParameters, q: jax.Array, k: jax.Array, v: jax.Array, key_ranges: KeyRanges, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Return the results of one query [B, 1, H, K] over rings [B, T, G, K]; see KeyRanges.make_ring_mask.

    Few rows have few programs, so that the keys are divided into P parts. Each part has an output and a sum of its own,
    which are joined by their sums (flash-decoding, Dao et al. 2023).
    """
    (batch, _, heads, size), (_, slots, groups, _) = q.shape, k.shape
    rows, tile = batch * groups, _choose_ring_tile(heads // groups, size * q.dtype.itemsize)
    parts = min(-(-RING_PROGRAMS // rows), -(-slots // tile.keys))
    queries = q.reshape(rows, heads // groups, size)
    # In memory, a cache is in this order.
    keys, values = (jnp.swapaxes(x, 1, 2).reshape(rows, slots, size) for x in (k, v))
    row = pl.BlockSpec((None, 1), lambda part, row: (lax.div(row, groups), 0))
    whole = [pl.BlockSpec((None, *x.shape[1:]), lambda part, row: (row, 0, 0)) for x in (queries, keys, values)]
    by_part = pl.BlockSpec((None, None, *queries.shape[1:]), lambda part, row: (part, row, 0, 0))
    sums = pl.BlockSpec((None, None, queries.shape[1]), lambda part, row: (part, row, 0))
    with jax.named_scope(ALL_KEYS):
        out, log_sum = pl.pallas_call(
            functools.partial(attention_over_ring, parameters, tile),
            name=attention_over_ring.__name__,
            grid=(parts, rows),
            in_specs=[row, row, *whole],
            out_specs=[by_part, sums],
            out_shape=[
                jax.ShapeDtypeStruct((parts, *queries.shape), q.dtype if parts == 1 else jnp.float32),
                jax.ShapeDtypeStruct((parts, *queries.shape[:2]), jnp.float32),
            ],
            compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=interpret,
        )(*key_ranges, queries, keys, values)
    if parts == 1:
        joined, whole_sum = out, log_sum
    else:
        whole_sum = jax.nn.logsumexp(log_sum, axis=0)  # [B · G, R]
        shares = jnp.exp(log_sum - jnp.where(whole_sum == -jnp.inf, 0.0, whole_sum))
        joined = jnp.sum(out * shares[..., None], axis=0).astype(q.dtype)
    whole_sum = jnp.where(whole_sum == -jnp.inf, jnp.inf, whole_sum)  # of a query that sees nothing
    return joined.reshape(q.shape), whole_sum.reshape(batch, heads, 1)


def _choose_ring_tile(heads: int, row_bytes: int) -> Tile:
    """Return the tile for R = `heads` queries and keys of `row_bytes` each. As BLOCKS, it fits everywhere."""
    return Tile(max(16, 1 << (heads - 1).bit_length()), min(64, RING_BLOCK_BYTES // row_bytes), 4, 3)


def supports_ring(q: jax.Array, v: jax.Array, capability: tuple[int, int]) -> bool:
    """Return whether the kernel supports queries [B, 1, H, K] over rings with values [B, T, G, V]."""
    size, row_bytes = q.shape[3], q.shape[3] * q.dtype.itemsize
    if v.shape[3] != size or v.size >= 2**31 or problems(size, q.dtype, capability):  # Pallas's offsets have 32 bits
        return False
    return _choose_ring_tile(q.shape[2] // v.shape[2], row_bytes).queries * row_bytes <= RING_BLOCK_BYTES


def backward(
    parameters: AttentionParameters,
    residuals: AttentionResiduals,
    gradient: jax.Array,
    *,
    blocks: Tiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v; see attention.Implementation. blocks, interpret: as in `forward`.

    There are two kernels, one over queries and one over keys. A single kernel for all three gradients would have to sum
    one of them in memory, in an order that changes from run to run.
    """
    chosen = blocks or _default_blocks(residuals.q)
    q, k, v, key_ranges, log_sum, delta, _ = residuals

    def call(kernel: Any, tile: Tile, *results: tuple[str, jax.Array]) -> list[jax.Array]:
        arrays = q, k, v, gradient, log_sum, delta
        return _call(kernel, parameters, tile, interpret, key_ranges, arrays, results)

    (d_q,) = call(attention_d_queries, chosen.d_queries, ("queries", q))
    d_k, d_v = call(attention_d_keys, chosen.d_keys, ("keys", k), ("keys", v))
    return d_q, d_k, d_v


def _default_blocks(q: jax.Array) -> Tiles:
    return BLOCKS[q.shape[-1], q.dtype.itemsize]


def _call(
    kernel: Any,
    parameters: AttentionParameters,
    tile: Tile,
    interpret: bool,
    key_ranges: KeyRanges,
    arrays: Sequence[jax.Array],
    results: Sequence[tuple[str, Any]],
) -> list[jax.Array]:
    """Run a kernel over a grid (blocks, heads, batch). The blocks are of queries, or of keys for `attention_d_keys`.

    arrays: q, k, v and the further operands. results: for each result its spec and an array of its shape and dtype.
    """
    q, k = arrays[:2]
    (batch, queries, heads, size), (_, keys, groups, _) = q.shape, k.shape
    key_ranges = clip_and_pad(key_ranges, keys, tile.queries)
    if kernel is attention_d_keys:  # a program reads all query heads of a group
        bounds, programs, heads_per_program = find_query_blocks(key_ranges, tile, keys), groups, heads // groups
    else:
        bounds, programs, heads_per_program = _find_key_blocks(key_ranges, tile), heads, None
    programs_per_group = programs // groups
    # A program gets whole rows of its own heads. The kernels themselves select the rows that they read and write.
    specs = {
        "bounds": pl.BlockSpec((None, bounds.shape[1], 4), lambda i, h, b: (b, 0, 0)),
        "key_ranges": pl.BlockSpec((None, key_ranges.first.shape[1]), lambda i, h, b: (b, 0)),
        "queries": pl.BlockSpec((None, queries, heads_per_program, size), lambda i, h, b: (b, 0, h, 0)),
        "statistics": pl.BlockSpec((None, heads_per_program, queries), lambda i, h, b: (b, h, 0)),
        "keys": pl.BlockSpec((None, keys, None, size), lambda i, h, b: (b, 0, lax.div(h, programs_per_group), 0)),
    }
    operands = bounds, *key_ranges, *arrays
    call = pl.pallas_call(
        functools.partial(kernel, parameters, tile),
        name=parameters.kernel_name(kernel.__name__),
        grid=(bounds.shape[1], programs, batch),
        in_specs=[specs[name] for name in OPERANDS[: len(operands)]],
        out_specs=[specs[name] for name, _ in results],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in results],
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )
    return call(*operands)


# ---- Blocks that a program reads. In this section, N is the number of blocks of queries, and M of blocks of keys.


def clip_and_pad(key_ranges: KeyRanges, keys: int, block: int) -> KeyRanges:
    """Clip the ranges to the existing keys, and pad [B, S] to whole blocks of queries; the padding sees nothing.

    All empty ranges become first = keys, last = -1. These are neutral for the minimum of first and the maximum of last.
    """
    first, last = jnp.maximum(key_ranges.first, 0), jnp.minimum(key_ranges.last, keys - 1)
    padding = [(0, 0), (0, -first.shape[1] % block)]
    return KeyRanges(
        jnp.pad(jnp.where(first <= last, first, keys), padding, constant_values=keys),
        jnp.pad(jnp.where(first <= last, last, -1), padding, constant_values=-1),
    )


def _reduce_blocks(key_ranges: KeyRanges, block: int) -> tuple[jax.Array, ...]:
    """Return minimum and maximum of first, minimum and maximum of last, of each block of queries: [B, N] each."""
    first, last = (x.reshape(x.shape[0], -1, block) for x in (key_ranges.first, key_ranges.last))
    return first.min(-1), first.max(-1), last.min(-1), last.max(-1)


def _find_key_blocks(key_ranges: KeyRanges, tile: Tile) -> jax.Array:
    """Find the blocks of keys that each block of queries reads: [B, N, 4], see `_make_bounds`."""
    min_first, max_first, min_last, max_last = _reduce_blocks(key_ranges, tile.queries)
    return _make_bounds(
        min_first // tile.keys, pl.cdiv(max_first, tile.keys), (min_last + 1) // tile.keys, max_last // tile.keys + 1
    )


def find_query_blocks(key_ranges: KeyRanges, tile: Tile, keys: int) -> jax.Array:
    """Find the blocks of queries that each block of keys reads: [B, M, 4], see `_make_bounds`."""
    min_first, max_first, min_last, max_last = (x[:, None] for x in _reduce_blocks(key_ranges, tile.queries))
    start = jnp.arange(0, keys, tile.keys)[:, None]
    end = jnp.minimum(start + tile.keys, keys) - 1
    some = (min_first <= end) & (max_last >= start)  # [B, M, N]: some query of the block may see some key
    every = (max_first <= start) & (min_last >= end)  # every query of the block sees every key
    block = jnp.arange(some.shape[-1])

    def find_range(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.min(jnp.where(mask, block, block.size), axis=-1), jnp.max(jnp.where(mask, block + 1, 0), axis=-1)

    (begin, stop), (full_begin, full_stop) = find_range(some), find_range(every)
    without_gaps = jnp.sum(every, axis=-1) == full_stop - full_begin  # always true if first and last do not decrease
    return _make_bounds(begin, full_begin, jnp.where(without_gaps, full_stop, full_begin), stop)


def _make_bounds(begin: jax.Array, full_begin: jax.Array, full_stop: jax.Array, stop: jax.Array) -> jax.Array:
    """Stack the bounds of the blocks that a program reads, in order: int32 [..., 4].

    A program reads the blocks from begin to stop; those from full_begin to full_stop need no mask.
    """
    stop = jnp.maximum(stop, begin)
    full_begin = jnp.clip(full_begin, begin, stop)
    return jnp.stack([begin, full_begin, jnp.clip(full_stop, full_begin, stop), stop], axis=-1).astype(jnp.int32)


# ---- Kernels: the work of one program, on refs as given by its _BlockSpecs. S a block of queries, T a block of keys.


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


def attention_over_ring(parameters: AttentionParameters, tile: Tile, *refs: Any) -> None:
    """Compute what one part of a ring gives to the queries of a group of heads, [R, K], and the log of its sum."""
    first, last, q, k, v, out, log_sum = refs
    part, slots = pl.program_id(0), k.shape[0]
    row_mask = jnp.arange(tile.queries) < q.shape[0]
    block_q = _load(q, pl.ds(0, tile.queries), row_mask)
    newest, count = lax.rem(last[0], slots), last[0] - first[0] + 1
    oldest = newest - count + 1
    # Blocks of this part with a visible key. If the visible keys come round the end of the ring, those of the whole.
    blocks = pl.cdiv(slots, tile.keys)
    size = pl.cdiv(blocks, pl.num_programs(0))
    begin = jnp.maximum(part * size, jnp.where(oldest < 0, 0, lax.div(jnp.maximum(oldest, 0), tile.keys)))
    stop = jnp.minimum((part + 1) * size, jnp.where(oldest < 0, blocks, lax.div(newest, tile.keys) + 1))

    def step(block: Any, carry: Any) -> Any:
        total, peak, summed = carry
        key_rows = _Rows(block, tile.keys)
        mask = key_rows.mask_within(slots)
        products = triton.dot(block_q, _load(k, key_rows.slice, mask), trans_b=True)  # [R, T]
        age = newest - key_rows.indices()[None]
        visible = (jnp.where(age < 0, age + slots, age) < count) & (key_rows.indices()[None] < slots)
        scores = jnp.where(visible, _scores_per_unit(parameters, products), MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        unit = _score_unit(parameters) * LOG2_E
        weights = jnp.where(visible, jnp.exp2((scores - new_peak[:, None]) * unit), 0.0)
        decay = jnp.exp2((peak - new_peak) * unit)
        values = _load(v, key_rows.slice, mask)
        summed = summed * decay[:, None] + triton.dot(weights.astype(values.dtype), values)
        return total * decay + jnp.sum(weights, axis=1), new_peak, summed

    nothing = jnp.zeros((tile.queries,), jnp.float32)
    carry = nothing, nothing + MASKED, jnp.zeros(block_q.shape, jnp.float32)
    total, peak, summed = lax.fori_loop(begin, stop, step, carry)
    sees = total > 0
    _store(out, pl.ds(0, tile.queries), summed / jnp.where(sees, total, jnp.inf)[:, None], row_mask)
    own = peak * _score_unit(parameters) + jnp.log(jnp.where(sees, total, 1.0))
    _store(log_sum, pl.ds(0, tile.queries), jnp.where(sees, own, -jnp.inf), row_mask)


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
