"""Grouped products as Triton kernels written in Pallas, for NVIDIA's GPUs from Ampere on.

The rows of each group are cut into tiles from the group's first row on, the last one masked to what is left, and a list
of all tiles that XLA makes of the sizes tells each program where it works (Gale et al. 2022, arXiv:2211.15841). Every
product has its group's FLOPs and no more, but for the masked rows of one tile a group. Any sizes will do; rows whose
bytes are no multiple of 16 cannot be loaded beside products, and are slow.

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

CAPABILITY = (8, 0)  # the least that is supported
BAND = 8  # tiles of rows that programs in a row share, column after column: what these read stays in the cache


@dataclass(frozen=True)
class Blocks:
    """What one program of a kernel makes of the result, and how Triton compiles it. Powers of two, at least 16."""

    rows: int
    columns: int
    depth: int  # of the sum, at once
    warps: int
    stages: int  # loads of the loop in flight, each with shared memory of its own


# By bytes of an element, for all three products. One choice for A100, RTX 4090, H100 and B200: the widest tiles, as
# deep as fits into the shared memory of each (101,376 bytes a block on the RTX 4090, where Triton keeps one stage
# less), that spill no register on any, in float32's highest precision neither. On an H100 a step's products run beside
# the loads of the two behind it. Compiled for all of them, timed on none.
BLOCKS = {2: Blocks(128, 256, 64, 8, 3), 4: Blocks(128, 128, 32, 8, 4)}


def problems(dtype: Any, capability: tuple[int, int] = CAPABILITY) -> list[str]:
    """What of a call is not supported, in words. capability: the GPU's compute capability."""
    found = []
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        found.append(f"dtype={jnp.dtype(dtype).name}: the pallas kernel takes bfloat16, float16 or float32, xla any")
    if capability < CAPABILITY:
        found.append(f"capability={capability}: the pallas kernel wants {CAPABILITY} (Ampere) or later, xla none")
    return found


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

    blocks: those of BLOCKS by default. interpret: without Triton, on any device and slowly.
    """
    blocks = blocks or BLOCKS[x.dtype.itemsize]
    length, columns = x.shape[0], w.shape[1 if transposed else 2]
    if length == 0:  # Pallas has no empty arrays
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
    x: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
    dtype: Any,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
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


# ---- What a program works on.


def _bounds(sizes: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """The first row of each group and the one behind its last, none behind `length`; int32 [E] each."""
    ends = jnp.minimum(jnp.cumsum(sizes), length)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def _tiles(sizes: jax.Array, length: int, block: int) -> jax.Array:
    """Group, first row and the one behind the last, of all tiles of up to `block` rows; int32 [N, 3].

    Rows behind the last group are those of group number E. N is what the worst of sizes take, and the tiles that these
    sizes do not have are of no rows.
    """
    groups = min(sizes.shape[0] + 1, length)  # that have a row
    count = (length + groups * (block - 1)) // block
    begins, ends = _bounds(jnp.append(sizes, length), length)
    tiles_of_group = pl.cdiv(ends - begins, block)
    last_tiles = jnp.cumsum(tiles_of_group)
    number = jnp.arange(count, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last_tiles, number, side="right", method="compare_all"), sizes.shape[0])
    begin = begins[group] + (number - (last_tiles - tiles_of_group)[group]) * block
    return jnp.stack([group, begin, ends[group]], axis=-1).astype(jnp.int32)


def _place(program: Any, rows: int, columns: int) -> tuple[Any, Any]:
    """The row and the column of a program's tile, of so many: column by column within a band of rows."""
    first = lax.div(program, BAND * columns) * BAND
    height = jnp.minimum(rows - first, BAND)
    within = lax.rem(program, BAND * columns)
    return first + lax.rem(within, height), lax.div(within, height)


# ---- Kernels.


def _grouped_matmul(blocks: Blocks, transposed: bool, tiles: Any, x: Any, w: Any, out: Any) -> None:
    """tiles: [N, 3]; x: [T, D]; w: [E, D, F], or [E, F, D] if transposed; out: [T, F]."""
    (number_of_tiles, _), (groups, _, _), (_, depth) = tiles.shape, w.shape, x.shape
    number, column = _place(pl.program_id(0), number_of_tiles, pl.cdiv(out.shape[1], blocks.columns))
    group, begin, end = (tiles[number, i] for i in range(3))
    rows, columns = _Part(begin, blocks.rows, end), _Part.of(out.shape[1], column, blocks.columns)

    def step(i: Any, summed: jax.Array) -> jax.Array:
        part = _Part.of(depth, i, blocks.depth)
        own = _load(w, group, columns, part) if transposed else _load(w, group, part, columns)
        return summed + triton.dot(_load(x, rows, part), own, trans_b=transposed)

    # Behind the last group there is nothing to sum up. In 32 bits, as Triton's loop has its other bound.
    steps = jnp.where(group < groups, jnp.int32(pl.cdiv(depth, blocks.depth)), 0)
    summed = lax.fori_loop(0, steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
    _store(summed, out, rows, columns)


def _grouped_matmul_weight_gradient(blocks: Blocks, bounds: Any, x: Any, dy: Any, dw: Any) -> None:
    """bounds: [E, 2]; x: [T, D]; dy: [T, F]; dw: [E, D, F]."""
    places = pl.cdiv(dw.shape[1], blocks.rows), pl.cdiv(dw.shape[2], blocks.columns)
    group, program = (of(pl.program_id(0), places[0] * places[1]) for of in (lax.div, lax.rem))
    row, column = _place(program, *places)
    rows, columns = _Part.of(dw.shape[1], row, blocks.rows), _Part.of(dw.shape[2], column, blocks.columns)
    begin, end = bounds[group, 0], bounds[group, 1]

    def step(i: Any, summed: jax.Array) -> jax.Array:
        part = _Part(begin + i * blocks.depth, blocks.depth, end)
        return summed + triton.dot(_load(x, part, rows), _load(dy, part, columns), trans_a=True)

    steps = lax.div(end - begin + (blocks.depth - 1), blocks.depth)
    summed = lax.fori_loop(0, steps, step, jnp.zeros((blocks.rows, blocks.columns), jnp.float32))
    _store(summed, dw, group, rows, columns)


@dataclass(frozen=True)
class _Part:
    """So many of a dimension from `begin` on, of which those before `end` are there; all of them if that is None."""

    begin: Any
    size: int
    end: Any

    @classmethod
    def of(cls, length: int, number: Any, size: int) -> "_Part":
        """That number of the parts of this size."""
        return cls(number * size, size, length if length % size else None)

    @property
    def slice(self) -> Any:
        return pl.ds(self.begin, self.size)

    def there(self) -> jax.Array:
        return self.begin + jnp.arange(self.size) < self.end


def _at(ref: Any, *where: Any) -> tuple[Any, jax.Array | None]:
    """A matrix of a ref, by its rows and columns behind a group if there are any, and the mask of what is there of it;
    None for all."""
    *group, rows, columns = where
    masks = [part.there()[index] for part, index in ((rows, np.s_[:, None]), (columns, None)) if part.end is not None]
    mask = functools.reduce(jnp.logical_and, masks) if masks else None
    return ref.at[(*group, rows.slice, columns.slice)], mask


def _load(ref: Any, *where: Any) -> jax.Array:
    """What is not there comes as 0."""
    part, mask = _at(ref, *where)
    return triton.load(part) if mask is None else triton.load(part, mask=mask, other=0)


def _store(value: jax.Array, ref: Any, *where: Any) -> None:
    part, mask = _at(ref, *where)
    triton.store(part, value.astype(ref.dtype), mask=mask)
