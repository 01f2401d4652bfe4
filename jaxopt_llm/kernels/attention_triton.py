"""Implementation of attention in Triton, for Hopper and Blackwell.

The forward streams blocks of keys and values past a block of queries, with an online softmax (Dao 2023,
arXiv:2307.08691). The TMA unit's copies and the matmuls run while the softmax is computed (Shah et al. 2024,
arXiv:2407.08608). The backward computes the weights again from the log of the softmax sum, in two kernels: one sums the
gradient of a block of queries, the other the gradients of a block of keys and values over all query heads that read it.
This takes seven matmuls, where one kernel with atomic additions takes five, but the result is always the same to the
bit.

Letters: B batch, S queries, T keys, H heads, G key-value heads, K head size, M queries and N keys of a block.
"""

import functools
import importlib.metadata
import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.core.errors import describe_install
from jaxopt_llm.kernels.attention_pallas import clip_and_pad, find_query_blocks
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, KeyRanges, Tile, Tiles
from jaxopt_llm.kernels.support import fold_batches

# From Hopper up to, but not including, the chips with compute capability 12.0, which have 99 KiB of shared memory.
CAPABILITIES = (9, 0), (12, 0)
JAX = (0, 11)  # required by jax-triton 0.4
PACKAGES = "triton", "jax_triton"
# Minimum versions: this jax-triton is the first that passes tensor descriptors, and it needs this triton.
VERSIONS = {"jax-triton": (0, 4), "triton": (3, 7)}
DTYPES = "bfloat16", "float16"
LOG2_E = math.log2(math.e)
CACHE_BYTES = 24 * 2**20  # for data that programs read repeatedly while they run together: half of Hopper's L2
reads_out = False
skips_keys = True
INT32_MAX = jnp.iinfo(jnp.int32).max
ROW_ALIGNMENT = 4  # of int32 and float32: the TMA unit requires rows that begin at a multiple of 16 bytes
# By default, Triton writes PTX for its own assembler. XLA's may be older; it accepts this version, from CUDA 12.9.
PTX_VERSION = 88


# By head size. On Hopper, almost no register spills in a loop; with a soft-cap, a few words do. Other tiles that fit
# registers and 227 KiB of shared memory may be faster: none was measured.
TILES: Mapping[int, Tiles] = {
    64: Tiles(forward=Tile(128, 64, 4, 3), d_queries=Tile(128, 64, 4, 3), d_keys=Tile(64, 128, 8, 3)),
    128: Tiles(forward=Tile(128, 128, 8, 2), d_queries=Tile(128, 128, 8, 2), d_keys=Tile(64, 128, 8, 2)),
    256: Tiles(forward=Tile(128, 64, 8, 2), d_queries=Tile(128, 32, 8, 2), d_keys=Tile(32, 64, 8, 2)),
}


def problems(head_dim: int, dtype: Any, capability: tuple[int, int]) -> list[str]:
    """List the properties of a call or of this installation that are not supported.

    capability: compute capability of the GPU.
    """
    found = []
    if head_dim not in TILES:
        found.append(f"head_dim={head_dim}: the triton kernel supports {sorted(TILES)}, xla supports any")
    if jnp.dtype(dtype).name not in DTYPES:
        dtype = jnp.dtype(dtype).name
        found.append(f"dtype={dtype}: the triton kernel supports {' or '.join(DTYPES)}, xla supports any")
    if not CAPABILITIES[0] <= capability < CAPABILITIES[1]:
        found.append(f"capability={capability}: the triton kernel supports H100, H200, B200 and B300, xla supports any")
    return found + installation_problems()


def installation_problems() -> list[str]:
    """List the packages that are missing or too old for this implementation."""
    found = []
    if jax.__version_info__ < JAX:
        found.append(f"jax {jax.__version__}: triton requires jax 0.11, which requires Python 3.12; xla supports any")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        found.append(f"{names} not installed: run {describe_install('triton')} (on Linux); xla needs none")
        return found
    for package, required in VERSIONS.items():
        version = importlib.metadata.version(package)
        if tuple(map(int, version.split(".")[:2])) < required:
            needed = ".".join(map(str, required))
            found.append(f"{package} {version}: triton requires {needed}; run {describe_install('triton')}")
    return found


def forward(
    parameters: AttentionParameters,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_ranges: KeyRanges,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See attention.Implementation. tiles: TILES by default."""
    tile = (tiles or TILES[q.shape[-1]]).forward
    return fold_batches(functools.partial(_forward, parameters, tile))(q, k, v, key_ranges.first, key_ranges.last)


def backward(
    parameters: AttentionParameters, residuals: AttentionResiduals, gradient: jax.Array, tiles: Tiles | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See attention.Implementation. tiles: TILES by default."""
    q = residuals.q
    run = functools.partial(_backward, parameters, tiles or TILES[q.shape[-1]])
    return fold_batches(run)(*jax.tree.leaves(residuals), gradient.astype(q.dtype))


def _forward(parameters: AttentionParameters, tile: Tile, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log of the softmax sum. arrays: q, k, v, and first and last of the key ranges."""
    from jaxopt_llm.kernels import attention_triton_kernels as kernels

    q, k, v, first, last = arrays
    (batch, queries, heads, size), (keys, groups) = q.shape, k.shape[1:3]
    first, last = _clip(first, last, keys)
    operands = _describe_heads(tile.queries, q) + _describe_heads(tile.keys, k, v)
    out: tuple[jax.Array, jax.Array] = _call(
        parameters,
        kernels.forward,
        tile,
        operands + _describe_rows(tile.queries, first, last),
        _find_key_rows(first, last, tile),
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)),
        programs=batch * heads * -(-queries // tile.queries),
        HEADS=_count_concurrent_heads(batch * groups, keys * size) * (heads // groups),
        S=queries,
        **_constants(parameters, q, k),
    )
    return out


def _backward(parameters: AttentionParameters, tiles: Tiles, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the gradients of q, k and v. arrays: leaves of AttentionResiduals, and the gradient of the output."""
    from jaxopt_llm.kernels import attention_triton_kernels as kernels

    q, k, v, first, last, log_sum, delta, gradient = arrays
    (batch, queries, heads, size), (keys, groups) = q.shape, k.shape[1:3]
    first, last = _clip(first, last, keys)
    statistics = (x.reshape(batch * heads, queries) for x in (log_sum, delta))
    rows = (first, last, *statistics)

    def operands(tile: Tile) -> tuple[Any, ...]:
        q_heads, gradient_heads = _describe_heads(tile.queries, q, gradient)
        return (q_heads, *_describe_heads(tile.keys, k, v), gradient_heads, *_describe_rows(tile.queries, *rows))

    tile = tiles.d_queries
    (d_q,) = _call(
        parameters,
        kernels.backward_queries,
        tile,
        operands(tile),
        _find_key_rows(first, last, tile),
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype),),
        programs=batch * heads * -(-queries // tile.queries),
        HEADS=_count_concurrent_heads(batch * groups, keys * size) * (heads // groups),
        S=queries,
        SCALE=parameters.scale,
        **_constants(parameters, q, k),
    )
    tile = tiles.d_keys
    d_k, d_v = _call(
        parameters,
        kernels.backward_keys,
        tile,
        operands(tile),
        _find_query_rows(first, last, keys, tile),
        out_type=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        programs=batch * groups * -(-keys // tile.keys),
        HEADS=_count_concurrent_heads(batch * groups, queries * size),
        T=keys,
        SCALE=parameters.scale,
        **_constants(parameters, q, k),
    )
    return d_q, d_k, d_v


def _call(
    parameters: AttentionParameters,
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
        name=parameters.kernel_name(f"attention_{kernel.__name__}"),
        num_warps=tile.warps,
        num_stages=tile.stages,
        backend_options={"ptx_version": PTX_VERSION, "enable_fp_fusion": True},
        M=tile.queries,
        N=tile.keys,
        **constants,
    )


def _constants(parameters: AttentionParameters, q: jax.Array, k: jax.Array) -> dict[str, Any]:
    """Return the compile-time constants that all kernels take."""
    assert parameters.scale > 0, "the largest dot product must have the largest score"
    factor, inner = parameters.scale * LOG2_E, None
    if parameters.softcap is not None:
        factor, inner = parameters.softcap * LOG2_E, 2 * parameters.scale * LOG2_E / parameters.softcap
    return {"H": q.shape[2], "G": k.shape[2], "K": q.shape[3], "FACTOR": factor, "INNER": inner}


def _count_concurrent_heads(heads: int, elements: int) -> int:
    """Return the number of heads to work on at a time: a divisor of `heads` for which two arrays of them fit the cache.

    elements: number of elements of one head of one array, 16 bits each.
    """
    fitting = max(1, CACHE_BYTES // (4 * elements))
    return max(count for count in range(1, heads + 1) if heads % count == 0 and (count == 1 or count <= fitting))


def _describe_heads(block: int, *arrays: jax.Array) -> tuple[Any, ...]:
    """Make descriptors of arrays [B, rows, heads, K], for copies of `block` rows of one head."""
    import jax_triton

    return tuple(
        jax_triton.TensorDescriptor.from_array(x.reshape(*x.shape[:2], -1), (1, block, x.shape[-1])) for x in arrays
    )


def _describe_rows(block: int, *arrays: jax.Array) -> tuple[Any, ...]:
    """Make descriptors of arrays [B or B × H, S] in 32 bits, for copies of `block` numbers."""
    import jax_triton

    aligned = (jnp.pad(x, [(0, 0), (0, -x.shape[1] % ROW_ALIGNMENT)]) for x in arrays)
    return tuple(jax_triton.TensorDescriptor.from_array(x, (1, block)) for x in aligned)


def _clip(first: jax.Array, last: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """Clip the key ranges to the existing rows; ranges without any of these become empty."""
    return jnp.clip(first, 0, keys), jnp.clip(last, -1, keys - 1)


def _find_key_rows(first: jax.Array, last: jax.Array, tile: Tile) -> jax.Array:
    """Find the key rows that each block of queries visits: `bounds` of the kernels, int32 [B, blocks, 4]."""
    earliest, latest, sees = _split_into_blocks(first, last, tile.queries)
    end = jnp.max(latest, axis=-1, where=sees, initial=-1) + 1
    start = jnp.minimum(jnp.min(earliest, axis=-1, where=sees, initial=INT32_MAX), end)
    full_start = start - (start - jnp.max(earliest, axis=-1)) // tile.keys * tile.keys
    # A query that sees nothing has first > last, so that the difference is not positive.
    full = jnp.maximum((jnp.min(latest, axis=-1) + 1 - full_start) // tile.keys, 0)
    full_end = full_start + full * tile.keys
    return jnp.stack([start, full_start, full_end, end], axis=-1)


def _find_query_rows(first: jax.Array, last: jax.Array, keys: int, tile: Tile) -> jax.Array:
    """Find the query rows that each block of keys visits, in whole blocks: `bounds`, int32 [B, blocks, 4]."""
    ranges = clip_and_pad(KeyRanges(first, last), keys, tile.queries)
    return find_query_blocks(ranges, tile, keys) * tile.queries


def _split_into_blocks(first: jax.Array, last: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split first and last into blocks of queries, [B, blocks, M]; also return the mask of queries that see a key.

    The last block is padded with its last query.
    """
    pad = -first.shape[1] % block
    earliest, latest = (
        jnp.pad(x, [(0, 0), (0, pad)], mode="edge").reshape(x.shape[0], -1, block) for x in (first, last)
    )
    return earliest, latest, earliest <= latest
