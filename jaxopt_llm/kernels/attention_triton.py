"""Attention in Triton for Hopper and Blackwell, an attention.Implementation.

The forward streams blocks of keys and values past a block of queries and keeps a running softmax (Dao 2023,
arXiv:2307.08691); copies by the TMA unit and products run while the softmax does (Shah et al. 2024, arXiv:2407.08608).
The backward forms the weights again from the log of the softmax's sum, in two kernels: one adds up the gradient of a
block of queries, the other those of a block of keys and values over all query heads that read it. That takes seven
products where one kernel with atomic additions takes five, and gives the same bits every time.

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, M queries and N keys of a block.
"""

import functools
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.kernels.spans import Form, Spans

CAPABILITIES = (9, 0), (12, 0)  # from Hopper on; the chips from the second on have 99 KiB of shared memory
JAX = (0, 11)  # which jax-triton 0.4 wants
PACKAGES = "triton", "jax_triton"
JAX_TRITON = (0, 4)  # passes tensor descriptors from there on
DTYPES = "bfloat16", "float16"
LOG2_E = math.log2(math.e)
CACHE_BYTES = 24 * 2**20  # of what programs that run together read again and again: half of Hopper's L2
MOST = jnp.iinfo(jnp.int32).max
ROW_ALIGNMENT = 4  # of int32 and float32: the TMA unit wants rows that begin at a multiple of 16 bytes
# Triton writes PTX for the assembler that it brings along; XLA's own, which may be older, takes that of CUDA 12.9.
PTX_VERSION = 88


@dataclass(frozen=True)
class Tile:
    """How one kernel cuts its work: queries and keys of a block, warps of a program, copies under way at a time."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    forward: Tile
    backward_queries: Tile
    backward_keys: Tile


# By head size. On Hopper next to nothing spills in a loop, with a cap a few words do; what else fits registers and 227
# KiB of shared memory may be faster: none was measured.
TILES: Mapping[int, Tiles] = {
    64: Tiles(forward=Tile(128, 64, 4, 3), backward_queries=Tile(128, 64, 4, 3), backward_keys=Tile(64, 128, 8, 3)),
    128: Tiles(forward=Tile(128, 128, 8, 2), backward_queries=Tile(128, 128, 8, 2), backward_keys=Tile(64, 128, 8, 2)),
    256: Tiles(forward=Tile(128, 64, 8, 2), backward_queries=Tile(128, 32, 8, 2), backward_keys=Tile(32, 64, 8, 2)),
}


def problems(head_dim: int, dtype: Any, capability: tuple[int, int]) -> list[str]:
    """What of a call is not supported, in words. capability: the GPU's compute capability."""
    found = []
    if head_dim not in TILES:
        found.append(f"head_dim={head_dim}: the triton kernel takes one of {sorted(TILES)}, xla any")
    if jnp.dtype(dtype).name not in DTYPES:
        found.append(f"dtype={jnp.dtype(dtype).name}: the triton kernel takes {' or '.join(DTYPES)}, xla any")
    if not CAPABILITIES[0] <= capability < CAPABILITIES[1]:
        found.append(f"capability={capability}: the triton kernel is for H100, H200, B200 and B300, xla for any")
    if jax.__version_info__ < JAX:
        found.append(f"jax {jax.__version__}: the triton kernel wants 0.11, which wants Python 3.12; xla takes any")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        found.append(f"not installed: {', '.join(missing)}: pip install 'jaxopt_llm[triton]' (Linux); xla needs none")
    elif _release(version := importlib.metadata.version("jax-triton")) < JAX_TRITON:
        wanted = ".".join(map(str, JAX_TRITON))
        found.append(f"jax-triton {version}: the triton kernel wants {wanted}: pip install 'jaxopt_llm[triton]'")
    return found


def _release(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in version.split(".")[:2])


def forward(
    form: Form, q: jax.Array, k: jax.Array, v: jax.Array, spans: Spans, tiles: Tiles | None = None
) -> tuple[jax.Array, jax.Array]:
    """See attention.Implementation. tiles: those of TILES by default."""
    tile = (tiles or TILES[q.shape[-1]]).forward
    return _over_batches(functools.partial(_forward, form, tile))(q, k, v, spans.first, spans.last)


def backward(
    form: Form,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    spans: Spans,
    log_sum: jax.Array,
    mean: jax.Array,
    gradient: jax.Array,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See attention.Implementation. tiles: those of TILES by default."""
    run = _over_batches(functools.partial(_backward, form, tiles or TILES[q.shape[-1]]))
    return run(q, k, v, spans.first, spans.last, log_sum, mean, gradient.astype(q.dtype))


def _forward(
    form: Form, tile: Tile, q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array]:
    from jaxopt_llm.kernels import attention_triton_kernels as kernels

    (batch, queries, heads, size), (keys, groups) = q.shape, k.shape[1:3]
    first, last = _clipped(first, last, keys)
    out: tuple[jax.Array, jax.Array] = _call(
        form,
        kernels.forward,
        tile,
        (*_by_head(tile.queries, q), *_by_head(tile.keys, k, v), *_by_row(tile.queries, first, last)),
        _seen_by_queries(first, last, tile),
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)),
        programs=batch * heads * -(-queries // tile.queries),
        HEADS=_heads_together(batch * groups, keys * size) * (heads // groups),
        S=queries,
        **_constants(form, q, k),
    )
    return out


def _backward(
    form: Form,
    tiles: Tiles,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array,
    last: jax.Array,
    log_sum: jax.Array,
    mean: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    from jaxopt_llm.kernels import attention_triton_kernels as kernels

    (batch, queries, heads, size), (keys, groups) = q.shape, k.shape[1:3]
    first, last = _clipped(first, last, keys)
    statistics = (x.reshape(batch * heads, queries) for x in (log_sum, mean))
    rows = (first, last, *statistics)

    def operands(tile: Tile) -> tuple[Any, ...]:
        of_q, of_gradient = _by_head(tile.queries, q, gradient)
        return (of_q, *_by_head(tile.keys, k, v), of_gradient, *_by_row(tile.queries, *rows))

    tile = tiles.backward_queries
    (d_q,) = _call(
        form,
        kernels.backward_queries,
        tile,
        operands(tile),
        _seen_by_queries(first, last, tile),
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype),),
        programs=batch * heads * -(-queries // tile.queries),
        HEADS=_heads_together(batch * groups, keys * size) * (heads // groups),
        S=queries,
        SCALE=form.scale,
        **_constants(form, q, k),
    )
    tile = tiles.backward_keys
    d_k, d_v = _call(
        form,
        kernels.backward_keys,
        tile,
        operands(tile),
        _seeing_keys(first, last, keys, tile),
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        programs=batch * groups * -(-keys // tile.keys),
        HEADS=_heads_together(batch * groups, queries * size),
        T=keys,
        SCALE=form.scale,
        **_constants(form, q, k),
    )
    return d_q, d_k, d_v


def _call(
    form: Form,
    kernel: Any,
    tile: Tile,
    operands: tuple[Any, ...],
    bounds: jax.Array,
    out_type: Any,
    programs: int,
    **constants: Any,
) -> Any:
    import jax_triton

    return jax_triton.triton_call(
        *operands,
        bounds,
        kernel=kernel,
        out_type=out_type,
        grid=(programs,),
        name=form.named(f"attention_{kernel.__name__}"),
        num_warps=tile.warps,
        num_stages=tile.stages,
        backend_options={"ptx_version": PTX_VERSION, "enable_fp_fusion": True},
        M=tile.queries,
        N=tile.keys,
        **constants,
    )


def _constants(form: Form, q: jax.Array, k: jax.Array) -> dict[str, Any]:
    assert form.scale > 0, "the largest score is taken to be that of the largest product"
    factor, inner = form.scale * LOG2_E, None
    if form.softcap is not None:
        factor, inner = form.softcap * LOG2_E, 2 * form.scale * LOG2_E / form.softcap
    return {"H": q.shape[2], "G": k.shape[2], "K": q.shape[3], "FACTOR": factor, "INNER": inner}


def _heads_together(heads: int, elements: int) -> int:
    """How many of so many heads, dividing them, to work on at a time for two arrays of theirs to fit the cache;
    elements: of one head and array, 16 bits each."""
    fitting = max(1, CACHE_BYTES // (4 * elements))
    return max(count for count in range(1, heads + 1) if heads % count == 0 and (count == 1 or count <= fitting))


def _by_head(block: int, *arrays: jax.Array) -> tuple[Any, ...]:
    """Descriptors of [B, rows, heads, K], for copies of so many rows of one head."""
    import jax_triton

    return tuple(
        jax_triton.TensorDescriptor.from_array(x.reshape(*x.shape[:2], -1), (1, block, x.shape[-1])) for x in arrays
    )


def _by_row(block: int, *arrays: jax.Array) -> tuple[Any, ...]:
    """Descriptors of [B or B × H, S] in 32 bits, for copies of so many numbers."""
    import jax_triton

    aligned = (jnp.pad(x, [(0, 0), (0, -x.shape[1] % ROW_ALIGNMENT)]) for x in arrays)
    return tuple(jax_triton.TensorDescriptor.from_array(x, (1, block)) for x in aligned)


def _clipped(first: jax.Array, last: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """The same spans within the rows that there are, and those of no keys beside them."""
    return jnp.clip(first, 0, keys), jnp.clip(last, -1, keys - 1)


def _seen_by_queries(first: jax.Array, last: jax.Array, tile: Tile) -> jax.Array:
    """`bounds` of blocks of queries, int32 [B, blocks, 4], as the kernels take them: in rows of the keys."""
    earliest, latest, sees = _extremes(first, last, tile.queries)
    end = jnp.max(latest, axis=-1, where=sees, initial=-1) + 1
    start = jnp.minimum(jnp.min(earliest, axis=-1, where=sees, initial=MOST), end)
    full_start = start - (start - jnp.max(earliest, axis=-1)) // tile.keys * tile.keys
    # Of a query that sees nothing first is after last, and the difference not positive.
    full = jnp.maximum((jnp.min(latest, axis=-1) + 1 - full_start) // tile.keys, 0)
    full_end = full_start + full * tile.keys
    return jnp.stack([start, full_start, full_end, end], axis=-1)


def _seeing_keys(first: jax.Array, last: jax.Array, keys: int, tile: Tile) -> jax.Array:
    """`bounds` of blocks of keys, int32 [B, blocks, 4]: in rows of the queries, by whole blocks of them."""
    earliest, latest, sees = _extremes(first, last, tile.queries)
    first_key = jnp.arange(0, keys, tile.keys, dtype=jnp.int32)[:, None]
    last_key = jnp.minimum(first_key + tile.keys, keys) - 1
    # [B, blocks of keys, blocks of queries]
    touches = jnp.min(earliest, axis=-1, where=sees, initial=MOST)[:, None] <= last_key
    touches &= jnp.max(latest, axis=-1, where=sees, initial=-1)[:, None] >= first_key
    covers = jnp.max(earliest, axis=-1)[:, None] <= first_key
    covers &= jnp.min(latest, axis=-1)[:, None] >= last_key

    blocks = earliest.shape[1]
    block = jnp.arange(blocks, dtype=jnp.int32)

    def first_where(mask: jax.Array) -> jax.Array:
        return jnp.min(jnp.where(mask, block, blocks), axis=-1)

    end = jnp.max(jnp.where(touches, block + 1, 0), axis=-1)
    start = jnp.minimum(first_where(touches), end)
    # The first run of blocks that see all keys, or none at the end. Where spans do not decrease there is but one.
    full_start = jnp.minimum(first_where(covers), end)
    full_end = jnp.minimum(first_where(~covers & (block > full_start[..., None])), end)
    return jnp.stack([start, full_start, full_end, end], axis=-1) * tile.queries


def _extremes(first: jax.Array, last: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """First and last by blocks of queries, [B, blocks, M], the last block filled up with its last query; and which of
    them see anything."""
    pad = -first.shape[1] % block
    earliest, latest = (
        jnp.pad(x, [(0, 0), (0, pad)], mode="edge").reshape(x.shape[0], -1, block) for x in (first, last)
    )
    return earliest, latest, earliest <= latest


def _over_batches(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arrays that begin with B; under vmap, the axis that is mapped over becomes part of B."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(size: int, is_batched: list[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        whole = (
            x if batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, batched in zip(arrays, is_batched, strict=True)
        )
        outs = _over_batches(function)(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in outs), tuple(True for _ in outs)

    return mapped
