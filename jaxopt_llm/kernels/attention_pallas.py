"""Flash attention, forward and backward, as Triton kernels written in Pallas, for NVIDIA GPUs from Ampere on.

The forward uses online softmax; the backward computes the scores again from the log of their softmax sum (Dao 2023,
arXiv:2307.08691). A block of keys that no query of a block sees is never read, whether due to the causal mask, a window
or documents. A block of keys that all queries of a block see is not masked.

Letters: B batch, S queries, T keys, H heads, G key-value heads, R = H / G, K head size, N blocks of rows.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxopt_llm.kernels import attention_pallas_kernels as kernels
from jaxopt_llm.kernels import pallas_support
from jaxopt_llm.kernels.attention_mask import KeyRanges
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, Tile, Tiles

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
# Specs of the kernels' operands: bounds, first and last, q, k, v; in the backward also d_out, log_sum and delta.
OPERANDS = "bounds", "key_ranges", "key_ranges", "queries", "keys", "keys", "queries", "statistics", "statistics"


def problems(head_dim: int, dtype: Any, capability: tuple[int, int]) -> list[str]:
    """List the properties of a call that are not supported. capability: compute capability of the GPU."""
    sizes = sorted({size for size, _ in BLOCKS})
    found = [] if head_dim in sizes else [f"head_dim={head_dim}: the pallas kernel supports {sizes}, xla supports any"]
    return found + pallas_support.problems(dtype, capability)


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
    tile = (blocks or _default_blocks(q)).forward
    statistics = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    results = ("queries", q), ("statistics", statistics)
    out, log_sum = _call(kernels.attention_forward, parameters, tile, interpret, key_ranges, (q, k, v), results)
    return out, log_sum


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

    (d_q,) = call(kernels.attention_d_queries, chosen.d_queries, ("queries", q))
    d_k, d_v = call(kernels.attention_d_keys, chosen.d_keys, ("keys", k), ("keys", v))
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
    key_ranges = _clip_and_pad(key_ranges, keys, tile.queries)
    if kernel is kernels.attention_d_keys:  # a program reads all query heads of a group
        bounds, programs, heads_per_program = _find_query_blocks(key_ranges, tile, keys), groups, heads // groups
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


def _clip_and_pad(key_ranges: KeyRanges, keys: int, block: int) -> KeyRanges:
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


def _find_query_blocks(key_ranges: KeyRanges, tile: Tile, keys: int) -> jax.Array:
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
