"""Grouped matmul as Triton kernels written in Pallas, for NVIDIA GPUs from Ampere on.

The rows of each group are cut into tiles from the group's first row on, and the last tile is masked to the remaining
rows. XLA computes a list of all tiles from the sizes; it tells each program where to work (Gale et al. 2022,
arXiv:2211.15841). Each group costs only its own FLOPs, plus the masked rows of one tile. Any sizes are supported. Rows
whose bytes are not a multiple of 16 cannot be loaded while a matmul runs, and are slow.

Letters: T rows, E groups, D and F sizes of a row before and after, N tiles.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxopt_llm.kernels.support import find_pallas_problems

problems = find_pallas_problems  # this kernel has no other limits
# Tiles of rows in a band. Consecutive programs work in one band, column by column: what they read stays in the cache.
BAND = 8


@dataclass(frozen=True)
class Blocks:
    """Tile of the result that one program of a kernel computes, and options of Triton's compiler.

    Rows, columns and depth are powers of two, at least 16.
    """

    rows: int
    columns: int
    depth: int  # terms of the sum that one step adds
    warps: int
    stages: int  # loads of the loop that are in flight, each with its own shared memory


# By bytes of an element, for all three matmuls. The same blocks serve A100, RTX 4090, H100 and B200: the widest tiles,
# as deep as the shared memory of each allows (101,376 bytes per block on the RTX 4090, where Triton keeps one stage
# less), that spill no register on any of them, also at float32's highest precision. On an H100 the matmuls of a step
# run during the loads of the next two steps. They were compiled for all of these GPUs, and timed on none.
BLOCKS = {2: Blocks(128, 256, 64, 8, 3), 4: Blocks(128, 128, 32, 8, 4)}


def forward(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    dtype: Any,
    *,
    transposed: bool = False,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See grouped_matmul.Implementation.

    blocks: BLOCKS by default. interpret: run without Triton, slowly, on any device.
    """
    blocks = blocks or BLOCKS[x.dtype.itemsize]
    length, columns = x.shape[0], w.shape[1 if transposed else 2]
    if length == 0:  # Pallas does not support empty arrays
        return jnp.zeros((length, columns), dtype)
    tiles = _tiles(sizes, length, blocks.rows)
    call = pl.pallas_call(
        functools.partial(_grouped_matmul, blocks, transposed),
        grid=(tiles.shape[0] * pl.cdiv(columns, blocks.columns),),
        out_shape=jax.ShapeDtypeStruct((length, columns), dtype),
        compiler_params=_compiler_params(blocks),
        interpret=interpret,
    )
    return call(tiles, x, w)


def weight_gradient(
    x: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: Any, *, blocks: Blocks | None = None, interpret: bool = False
) -> jax.Array:
    """See grouped_matmul.Implementation; blocks and interpret as in `forward`."""
    blocks = blocks or BLOCKS[x.dtype.itemsize]
    shape = sizes.shape[0], x.shape[1], dy.shape[1]
    if x.shape[0] == 0:
        return jnp.zeros(shape, dtype)
    call = pl.pallas_call(
        functools.partial(_grouped_matmul_weight_gradient, blocks),
        grid=(shape[0] * pl.cdiv(shape[1], blocks.rows) * pl.cdiv(shape[2], blocks.columns),),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        compiler_params=_compiler_params(blocks),
        interpret=interpret,
    )
    return call(jnp.stack(_bounds(sizes, x.shape[0]), axis=-1), x, dy)


def _compiler_params(blocks: Blocks) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages)


# ---- Work of a program.


def _bounds(sizes: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Return the first row of each group and the end of its rows, both at most `length`; int32 [E] each."""
    ends = jnp.minimum(jnp.cumsum(sizes), length)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def _tiles(sizes: jax.Array, length: int, block: int) -> jax.Array:
    """List group, first row and end of the group's rows of all tiles of up to `block` rows; int32 [N, 3].

    Rows after the last group belong to group E. N is the number of tiles of the worst sizes; the tiles that these sizes
    do not need are empty.
    """
    groups = min(sizes.shape[0] + 1, length)  # maximum number of groups that are not empty
    count = (length + groups * (block - 1)) // block
    begins, ends = _bounds(jnp.append(sizes, length), length)
    tiles_of_group = pl.cdiv(ends - begins, block)
    last_tiles = jnp.cumsum(tiles_of_group)
    index = jnp.arange(count, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last_tiles, index, side="right", method="compare_all"), sizes.shape[0])
    begin = begins[group] + (index - (last_tiles - tiles_of_group)[group]) * block
    return jnp.stack([group, begin, ends[group]], axis=-1).astype(jnp.int32)


def _locate_tile(program: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """Return the row and the column of a program's tile of rows × columns: column by column within a band of rows."""
    first = lax.div(program, BAND * columns) * BAND
    height = jnp.minimum(rows - first, BAND)
    within = lax.rem(program, BAND * columns)
    return first + lax.rem(within, height), lax.div(within, height)


# ---- Kernels.


def _grouped_matmul(blocks: Blocks, transposed: bool, tiles: Any, x: Any, w: Any, out: Any) -> None:
    """Compute a tile of the product.

    tiles: [N, 3]; x: [T, D]; w: [E, D, F], or [E, F, D] if transposed; out: [T, F].
    """
    (tile_count, _), (groups, _, _), (_, depth) = tiles.shape, w.shape, x.shape
    index, column = _locate_tile(pl.program_id(0), tile_count, pl.cdiv(out.shape[1], blocks.columns))
    group, begin, end = (tiles[index, i] for i in range(3))
    rows, columns = _Slice(begin, blocks.rows, end), _Slice.make(out.shape[1], column, blocks.columns)

    def step(i: Any, summed: jax.Array) -> jax.Array:
        part = _Slice.make(depth, i, blocks.depth)
        matrix = _load(w, group, columns, part) if transposed else _load(w, group, part, columns)
        return summed + triton.dot(_load(x, rows, part), matrix, trans_b=transposed)

    # After the last group there is nothing to sum. In 32 bits, like the other bound of Triton's loop.
    steps = jnp.where(group < groups, jnp.int32(pl.cdiv(depth, blocks.depth)), 0)
    summed = lax.fori_loop(0, steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
    _store(summed, out, rows, columns)


def _grouped_matmul_weight_gradient(blocks: Blocks, bounds: Any, x: Any, dy: Any, dw: Any) -> None:
    """Compute a tile of the gradient of one group's matrix.

    bounds: [E, 2]; x: [T, D]; dy: [T, F]; dw: [E, D, F].
    """
    tile_counts = pl.cdiv(dw.shape[1], blocks.rows), pl.cdiv(dw.shape[2], blocks.columns)
    group, program = (divide(pl.program_id(0), tile_counts[0] * tile_counts[1]) for divide in (lax.div, lax.rem))
    row, column = _locate_tile(program, *tile_counts)
    rows, columns = _Slice.make(dw.shape[1], row, blocks.rows), _Slice.make(dw.shape[2], column, blocks.columns)
    begin, end = bounds[group, 0], bounds[group, 1]

    def step(i: Any, summed: jax.Array) -> jax.Array:
        part = _Slice(begin + i * blocks.depth, blocks.depth, end)
        return summed + triton.dot(_load(x, part, rows), _load(dy, part, columns), trans_a=True)

    steps = lax.div(end - begin + (blocks.depth - 1), blocks.depth)
    summed = lax.fori_loop(0, steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
    _store(summed, dw, group, rows, columns)


@dataclass(frozen=True)
class _Slice:
    """`size` indices of a dimension from `begin` on. Only indices before `end` exist; all exist if `end` is None."""

    begin: Any
    size: int
    end: Any

    @classmethod
    def make(cls, length: int, index: Any, size: int) -> "_Slice":
        """Make the slice `index` of a dimension of `length` that is cut into slices of `size`."""
        return cls(index * size, size, length if length % size else None)

    @property
    def slice(self) -> Any:
        return pl.ds(self.begin, self.size)

    def mask(self) -> jax.Array:
        return self.begin + jnp.arange(self.size) < self.end


def _select(ref: Any, *indices: Any) -> tuple[Any, jax.Array | None]:
    """Select a matrix of a ref by an optional group and its rows and columns; also return the mask of its elements.

    The mask is None if all elements exist.
    """
    *group, rows, columns = indices
    masks = [part.mask()[index] for part, index in ((rows, np.s_[:, None]), (columns, None)) if part.end is not None]
    mask = functools.reduce(jnp.logical_and, masks) if masks else None
    return ref.at[(*group, rows.slice, columns.slice)], mask


def _load(ref: Any, *indices: Any) -> jax.Array:
    """Load a matrix of a ref, with 0 for elements that do not exist."""
    part, mask = _select(ref, *indices)
    return triton.load(part) if mask is None else triton.load(part, mask=mask, other=0)


def _store(value: jax.Array, ref: Any, *indices: Any) -> None:
    part, mask = _select(ref, *indices)
    triton.store(part, value.astype(ref.dtype), mask=mask)
