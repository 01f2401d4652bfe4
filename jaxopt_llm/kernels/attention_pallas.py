"""Flash attention, forward and backward, as Triton kernels written in Pallas, for NVIDIA GPUs from Ampere on.

The forward uses online softmax; the backward computes the scores again from the log of their softmax sum (Dao 2023,
arXiv:2307.08691). A block of keys that no query of a block sees is never read, whether due to the causal mask, a window
or documents. A block of keys that all queries of a block see is not masked.

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
from jaxopt_llm.kernels.attention_mask import KeyRanges
from jaxopt_llm.kernels.attention_pallas_kernels import Tile
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals

CAPABILITY = (8, 0)  # minimum compute capability


@dataclass(frozen=True)
class Blocks:
    """Tiles of the three kernels."""

    forward: Tile
    d_queries: Tile
    d_keys: Tile  # gradients of keys and values


# By head size and bytes of an element; powers of two, at least 16. The same blocks serve A100, RTX 4090, H100 and B200:
# they fit into the smallest shared memory of these (101,376 bytes per block), also at float32's highest precision, and
# spill no more than a few registers. They were compiled for all of these GPUs, and timed on none.
BLOCKS = {
    (64, 2): Blocks(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    (128, 2): Blocks(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
    (256, 2): Blocks(Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(16, 64, 8, 2)),
    (64, 4): Blocks(Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(32, 32, 4, 2)),
    (128, 4): Blocks(Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
    (256, 4): Blocks(Tile(32, 16, 8, 2), Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
}


def problems(head_dim: int, dtype: Any, capability: tuple[int, int]) -> list[str]:
    """List the properties of a call that are not supported. capability: compute capability of the GPU."""
    found = []
    sizes = sorted({size for size, _ in BLOCKS})
    if head_dim not in sizes:
        found.append(f"head_dim={head_dim}: the pallas kernel supports {sizes}, xla supports any")
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        dtype = jnp.dtype(dtype).name
        found.append(f"dtype={dtype}: the pallas kernel supports bfloat16, float16 or float32, xla supports any")
    if capability < CAPABILITY:
        found.append(
            f"capability={capability}: the pallas kernel requires {CAPABILITY} (Ampere) or later, xla supports any"
        )
    return found


def forward(
    parameters: AttentionParameters,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_ranges: KeyRanges,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log of the softmax sum; see attention.Implementation.

    Values have the head size K of queries and keys.

    blocks: BLOCKS by default. interpret: run without Triton, slowly, on any device.
    """
    batch, queries, heads, _ = q.shape
    tile = (blocks or _default_blocks(q)).forward
    key_ranges = _clip_and_pad(key_ranges, k.shape[1], tile.queries)
    bounds = _find_key_blocks(key_ranges, tile)
    specs = _BlockSpecs.make(bounds, key_ranges, q, k)
    call = pl.pallas_call(
        functools.partial(kernels.attention_forward, parameters, tile),
        name=parameters.kernel_name("attention_forward"),
        grid=(bounds.shape[1], heads, batch),
        in_specs=specs.operands,
        out_specs=[specs.queries, specs.statistics],
        out_shape=[_shape_struct(q), jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)],
        compiler_params=_compiler_params(tile),
        interpret=interpret,
    )
    out, log_sum = call(bounds, key_ranges.first, key_ranges.last, q, k, v)
    return out, log_sum


def backward(
    parameters: AttentionParameters,
    residuals: AttentionResiduals,
    gradient: jax.Array,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v; see attention.Implementation. blocks, interpret: as in `forward`.

    There are two kernels, one over queries and one over keys. A single kernel for all three gradients would have to sum
    one of them in memory, in an order that changes from run to run.
    """
    chosen = blocks or _default_blocks(residuals.q)
    d_q = _d_queries(parameters, chosen.d_queries, interpret, residuals, gradient)
    d_k, d_v = _d_keys(parameters, chosen.d_keys, interpret, residuals, gradient)
    return d_q, d_k, d_v


def _d_queries(
    parameters: AttentionParameters, tile: Tile, interpret: bool, residuals: AttentionResiduals, gradient: jax.Array
) -> jax.Array:
    """Return the gradient of q."""
    q, k, v, key_ranges, log_sum, delta = residuals
    batch, _, heads, _ = q.shape
    key_ranges = _clip_and_pad(key_ranges, k.shape[1], tile.queries)
    bounds = _find_key_blocks(key_ranges, tile)
    specs = _BlockSpecs.make(bounds, key_ranges, q, k)
    call = pl.pallas_call(
        functools.partial(kernels.attention_d_queries, parameters, tile),
        name=parameters.kernel_name("attention_d_queries"),
        grid=(bounds.shape[1], heads, batch),
        in_specs=[*specs.operands, specs.queries, specs.statistics, specs.statistics],
        out_specs=specs.queries,
        out_shape=_shape_struct(q),
        compiler_params=_compiler_params(tile),
        interpret=interpret,
    )
    return call(bounds, key_ranges.first, key_ranges.last, q, k, v, gradient, log_sum, delta)


def _d_keys(
    parameters: AttentionParameters, tile: Tile, interpret: bool, residuals: AttentionResiduals, gradient: jax.Array
) -> list[jax.Array]:
    """Return the gradients of k and v."""
    q, k, v, key_ranges, log_sum, delta = residuals
    batch, keys, groups, _ = k.shape
    key_ranges = _clip_and_pad(key_ranges, keys, tile.queries)
    bounds = _find_query_blocks(key_ranges, tile, keys)
    specs = _BlockSpecs.make(bounds, key_ranges, q, k, heads_per_program=q.shape[2] // groups)
    call = pl.pallas_call(
        functools.partial(kernels.attention_d_keys, parameters, tile),
        name=parameters.kernel_name("attention_d_keys"),
        grid=(bounds.shape[1], groups, batch),
        in_specs=[*specs.operands, specs.queries, specs.statistics, specs.statistics],
        out_specs=[specs.keys, specs.keys],
        out_shape=[_shape_struct(k), _shape_struct(v)],
        compiler_params=_compiler_params(tile),
        interpret=interpret,
    )
    return call(bounds, key_ranges.first, key_ranges.last, q, k, v, gradient, log_sum, delta)


def _default_blocks(q: jax.Array) -> Blocks:
    return BLOCKS[q.shape[-1], q.dtype.itemsize]


def _shape_struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _compiler_params(tile: Tile) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)


@dataclass(frozen=True)
class _BlockSpecs:
    """Model of the arrays that one program of a grid (blocks, heads, batch) gets: whole rows of its own heads.

    There is no block along the rows. The kernels themselves select the rows that they read and write.
    """

    bounds: pl.BlockSpec  # [N, 4] of [B, N, 4]
    key_ranges: pl.BlockSpec  # [S] of [B, S], padded
    queries: pl.BlockSpec  # [S, heads_per_program, K] of [B, S, H, K]
    statistics: pl.BlockSpec  # [heads_per_program, S] of [B, H, S]
    keys: pl.BlockSpec  # [T, K] of [B, T, G, K]

    @property
    def operands(self) -> list[pl.BlockSpec]:
        """Operands of every kernel: bounds, first and last of the key ranges, q, k and v."""
        return [self.bounds, self.key_ranges, self.key_ranges, self.queries, self.keys, self.keys]

    @classmethod
    def make(
        cls,
        bounds: jax.Array,
        key_ranges: KeyRanges,
        q: jax.Array,
        k: jax.Array,
        heads_per_program: int | None = None,
    ) -> "_BlockSpecs":
        """Make the specs. heads_per_program: query heads of a program; None is one, without a dimension for it."""
        (_, queries, heads, size), (_, keys, groups, _) = q.shape, k.shape
        blocks, programs_per_group = bounds.shape[1], heads // groups // (heads_per_program or 1)
        return cls(
            bounds=pl.BlockSpec((None, blocks, 4), lambda i, h, b: (b, 0, 0)),
            key_ranges=pl.BlockSpec((None, key_ranges.first.shape[1]), lambda i, h, b: (b, 0)),
            queries=pl.BlockSpec((None, queries, heads_per_program, size), lambda i, h, b: (b, 0, h, 0)),
            statistics=pl.BlockSpec((None, heads_per_program, queries), lambda i, h, b: (b, h, 0)),
            keys=pl.BlockSpec((None, keys, None, size), lambda i, h, b: (b, 0, lax.div(h, programs_per_group), 0)),
        )


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
        min_first // tile.keys,
        pl.cdiv(max_first, tile.keys),
        (min_last + 1) // tile.keys,
        max_last // tile.keys + 1,
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
