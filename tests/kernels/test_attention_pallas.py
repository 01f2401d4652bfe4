"""Pallas attention against the float64 reference, in Pallas's interpreter on the CPU, and its programs for GPUs.

The interpreter runs the kernels' Python, masks and loops, not Triton. Only a GPU can show rounding on tensor cores,
registers and speed.
"""

import dataclasses
import functools
import math
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import reference
import toy
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from marks import slow

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.kernels import attention_pallas as kernel
from jaxopt_llm.kernels import attention_xla
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, KeyRanges, Tile, Tiles

pytestmark = pytest.mark.core

BATCH, HEAD_DIM = 2, 8
SMALL = Tiles(Tile(16, 8, 4, 2), Tile(8, 16, 4, 2), Tile(16, 8, 4, 2))
PLAIN = AttentionParameters(scale=0.6)
CAPPED = AttentionParameters(scale=0.6, softcap=1.5)
NAMES = ("out", "log_sum", "d_q", "d_k", "d_v")
LENGTH = 37  # not a multiple of any block


@functools.cache
def run(parameters: AttentionParameters, implementation: Any = kernel, **settings: Any) -> Any:
    """Return a function of (q, k, v, gradient, first, last) with the results in NAMES.

    settings: of the kernel; by default it runs in the interpreter.
    """
    if implementation is kernel:
        settings = {"blocks": SMALL, "interpret": True} | settings
    whole = functools.partial(forward_and_backward, parameters, implementation, settings)
    return jax.jit(whole, compiler_options=toy.QUICK_COMPILE)


def forward_and_backward(
    parameters: AttentionParameters,
    implementation: Any,
    settings: Any,
    q: Any,
    k: Any,
    v: Any,
    gradient: Any,
    first: Any,
    last: Any,
) -> tuple[jax.Array, ...]:
    key_ranges = KeyRanges(first, last)
    out, log_sum = implementation.forward(parameters, q, k, v, key_ranges, **settings)
    residuals = AttentionResiduals(q, k, v, key_ranges, log_sum, compute_delta(gradient, out))
    return out, log_sum, *implementation.backward(parameters, residuals, gradient, **settings)


def compute_delta(gradient: jax.Array, out: jax.Array) -> jax.Array:
    """Return the sum over K of gradient × output, [B, H, S]."""
    return jnp.einsum("bshk,bshk->bhs", gradient.astype(jnp.float32), out.astype(jnp.float32))


def arrays(
    queries: int = LENGTH, keys: int = LENGTH, heads: int = 4, groups: int = 2, dtype: Any = np.float32
) -> list[np.ndarray]:
    """Make q, k, v and the gradient of the output."""
    random = np.random.default_rng(queries)
    shapes = ((queries, heads), (keys, groups), (keys, groups), (queries, heads))
    return [random.normal(size=(BATCH, *shape, HEAD_DIM)).astype(dtype) for shape in shapes]


def expected(
    parameters: AttentionParameters,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    gradient: np.ndarray,
    first: Any,
    last: Any,
) -> tuple[np.ndarray, ...]:
    """Compute the results in NAMES in float64."""
    q, k, v, gradient = (x.astype(np.float64) for x in (q, k, v, gradient))
    rows = np.arange(k.shape[1])
    visible = (rows >= first[..., None]) & (rows <= last[..., None])  # [B, S, T]
    some = visible.any(axis=-1)[..., None, None]
    # The reference does not support a query that sees nothing: it sees all keys there, and its output is ignored.
    out, backward = reference.attend(q, k, v, visible | ~some[..., 0], parameters.scale, parameters.softcap or 0.0)
    repeated = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("bshk,bthk->bhst", q, repeated) * parameters.scale
    if parameters.softcap is not None:
        scores = parameters.softcap * np.tanh(scores / parameters.softcap)
    scores = np.where(visible[:, None], scores, -np.inf)
    peak = scores.max(axis=-1, initial=-1e30)
    with np.errstate(divide="ignore"):
        log_sum = np.log(np.exp(scores - peak[..., None]).sum(axis=-1)) + peak
    return (np.where(some, out, 0), np.where(some[..., 0, 0][:, None], log_sum, np.inf), *backward(gradient * some))


def causal(queries: int, window: int = 10**6, shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Make causal key ranges; the keys begin `shift` rows before the queries."""
    rows = np.broadcast_to(np.arange(queries) + shift, (BATCH, queries))
    return np.maximum(rows - window + 1, 0), rows


def packed(length: int) -> tuple[np.ndarray, np.ndarray]:
    positions = toy.packed(rows=BATCH, length=length).positions
    rows = np.arange(length)
    return rows - positions, np.broadcast_to(rows, positions.shape)


def scattered(queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Make key ranges in random order: some lie before or after all keys, and some are empty."""
    random = np.random.default_rng(keys)
    first = random.integers(-keys, keys + 4, (BATCH, queries))
    return first, first + random.integers(-3, keys, (BATCH, queries))


def some_blind(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blind = np.isin(np.arange(LENGTH), (18, 19, 20, 36))
    return np.where(blind, 0, first), np.where(blind, -1, last)


KEY_RANGES = {
    "causal": causal(LENGTH),
    "window": causal(LENGTH, window=11),
    "window of one": causal(LENGTH, window=1),
    "documents": packed(LENGTH),
    "window, some see nothing": some_blind(*causal(LENGTH, window=11)),
    "everything": (np.full((BATCH, LENGTH), -5), np.full((BATCH, LENGTH), 10**6)),
    "no order": scattered(LENGTH, LENGTH),
    "everything except some": (
        np.where(np.arange(LENGTH) // 8 % 3 == 1, 9, 0) + np.zeros((BATCH, 1), int),
        np.full((BATCH, LENGTH), LENGTH),
    ),
    "nothing": (np.full((BATCH, LENGTH), 3), np.full((BATCH, LENGTH), 2)),
    "before the keys": (np.full((BATCH, LENGTH), -9), np.full((BATCH, LENGTH), -1)),
    "after the keys": (np.full((BATCH, LENGTH), LENGTH), np.full((BATCH, LENGTH), 99)),
}


def assert_equal(found: Any, wanted: Any, tolerance: float = 5e-6) -> None:
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("parameters", [PLAIN, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("key_ranges", KEY_RANGES)
def test_output_and_gradients_match_the_reference(parameters: AttentionParameters, key_ranges: str) -> None:
    case = *arrays(), *KEY_RANGES[key_ranges]
    assert_equal(run(parameters)(*case), expected(parameters, *case))


@pytest.mark.parametrize(
    "queries, keys, heads, groups",
    [
        pytest.param(1, 1, 1, 1, id="one token"),
        pytest.param(1, 29, 4, 1, id="one query, one key-value head"),
        pytest.param(20, 51, 3, 3, id="more keys than queries, a key-value head each"),
        pytest.param(51, 20, 6, 2, id="more queries than keys, three queries a head"),
        pytest.param(32, 32, 4, 2, id="whole blocks"),
    ],
)
def test_shapes(queries: int, keys: int, heads: int, groups: int) -> None:
    of_shape = arrays(queries, keys, heads, groups)
    for key_ranges in (causal(queries, shift=keys - queries), scattered(queries, keys)):
        case = *of_shape, *key_ranges
        assert_equal(run(PLAIN)(*case), expected(PLAIN, *case))


def test_a_query_that_sees_nothing_has_and_gives_no_gradient() -> None:
    first, last = (x.copy() for x in KEY_RANGES["causal"])
    blind = np.zeros((BATCH, LENGTH), bool)
    blind[0, 20:], blind[1, ::3] = True, True
    last[blind] = -1
    out, log_sum, *gradients = run(PLAIN)(*arrays(), first, last)
    assert not out[blind].any() and not gradients[0][blind].any()
    assert np.isposinf(np.moveaxis(log_sum, 1, 2)[blind]).all()
    assert np.isfinite(np.moveaxis(log_sum, 1, 2)[~blind]).all()
    assert not gradients[1][0, 20:].any() and not gradients[2][0, 20:].any()
    assert all(np.isfinite(each).all() for each in gradients)


def test_large_scores() -> None:
    """Use scores of ±10,000, dot products of integers: they are exact in float32, so that only the softmax rounds."""
    random = np.random.default_rng(0)
    q, k, v, gradient = arrays()
    q, k = (random.integers(-60, 61, x.shape).astype(np.float32) for x in (q, k))
    scores = np.einsum("bshk,bthk->bhst", q, np.repeat(k, 2, axis=2))
    assert np.abs(scores).max() > 1e4
    case = q, k, v, gradient, *KEY_RANGES["causal"]
    parameters = AttentionParameters(scale=1.0)
    # A log-sum-exp of 1e4 has no bits below 1e-3 in float32, and this limits the precision of the backward's weights.
    for name, got, want in zip(NAMES, run(parameters)(*case), expected(parameters, *case), strict=True):
        assert np.isfinite(got).all()
        assert toy.distance(got, want) < (1e-6 if name in ("out", "log_sum") else 1e-3), name


@pytest.mark.parametrize("parameters", [PLAIN, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rounds_no_more_than_xla(parameters: AttentionParameters, dtype: Any) -> None:
    """Allow 1.2 times xla's distance from float64, from the same operands.

    There are many blocks, whose sums must stay in float32.
    """
    case = *arrays(200, 200, dtype=dtype), *causal(200)
    found, others, wanted = run(parameters)(*case), run(parameters, attention_xla)(*case), expected(parameters, *case)
    for name, got, other, want in zip(NAMES, found, others, wanted, strict=True):
        assert got.dtype == (jnp.float32 if name == "log_sum" else dtype)
        assert toy.distance(got, want) <= 1.2 * toy.distance(other, want), name


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 5))])
def test_random_calls_round_no_more_than_xla(seed: int) -> None:
    """Draw lengths, heads, key ranges, dtype and soft-cap, with scores of up to hundreds.

    The arrays are small, so one more rounding in the result's dtype than xla's is allowed.
    """
    random = np.random.default_rng(seed)
    queries, keys, groups = (int(random.choice(of)) for of in ([1, 7, 30, 41, 64], [2, 5, 33, 48, 70], [1, 2]))
    parameters, dtype = (
        (PLAIN, CAPPED)[random.integers(2)],
        (jnp.bfloat16, jnp.float16, jnp.float32)[random.integers(3)],
    )
    window, shift = int(random.integers(1, 60)), keys - queries
    key_ranges = [causal(queries, shift=shift), causal(queries, window, shift), scattered(queries, keys)][
        random.integers(3)
    ]
    operands = arrays(queries, keys, groups * int(random.integers(1, 4)), groups, dtype=dtype)
    for x, factor in zip(operands, 10.0 ** random.integers(-2, 2, 4), strict=True):
        x *= dtype(factor)
    case = *operands, *key_ranges
    found, others, wanted = run(parameters)(*case), run(parameters, attention_xla)(*case), expected(parameters, *case)
    for name, got, other, want in zip(NAMES, found, others, wanted, strict=True):
        finite = np.isfinite(want)
        assert (np.isfinite(got) == finite).all(), name
        want, got, other = (np.where(finite, x, 0).astype(np.float64) for x in (want, got, other))
        rounding = float(jnp.finfo(dtype).eps) * np.linalg.norm(want)
        assert np.linalg.norm(got - want) <= 1.2 * np.linalg.norm(other - want) + rounding, name


def test_default_blocks() -> None:
    """Check blocks that are larger than the rows, and smaller ones."""
    random = np.random.default_rng(0)
    for length in (20, 150):
        case = [random.normal(size=(1, length, heads, 64)).astype(np.float32) for heads in (2, 1, 1, 2)]
        case += [each[:1] for each in causal(length, window=90)]
        parameters = AttentionParameters(scale=0.125)
        assert_equal(run(parameters, blocks=None)(*case), expected(parameters, *case))


def test_parts_of_the_keys_sum_to_the_whole() -> None:
    """Attend to parts like a ring, in the rows of each part. The backward gets the log-sum-exp of all keys."""
    q, k, v, gradient = arrays()
    first, last = KEY_RANGES["no order"]
    want_out, want_log_sum, *want_gradients = expected(PLAIN, q, k, v, gradient, first, last)
    half = LENGTH // 2 + 1
    parts = [
        (k[:, begin:end], v[:, begin:end], KeyRanges(first - begin, last - begin))
        for begin, end in ((0, half), (half, LENGTH))
    ]
    settings = {"blocks": SMALL, "interpret": True}
    outs, log_sums = zip(*(kernel.forward(PLAIN, q, *part, **settings) for part in parts), strict=True)
    finite = [np.where(np.isposinf(each), -np.inf, each) for each in log_sums]
    log_sum = np.logaddexp(*finite)
    log_sum = np.where(np.isneginf(log_sum), np.inf, log_sum)
    shares = [np.exp(each - log_sum).swapaxes(1, 2)[..., None] for each in finite]
    out = sum(share * out for share, out in zip(shares, outs, strict=True))
    delta = compute_delta(gradient, out)
    (d_q, *d_begin), (d_q_too, *d_end) = (
        kernel.backward(PLAIN, AttentionResiduals(q, *part, log_sum, delta), gradient, **settings) for part in parts
    )
    joined = [np.concatenate(each, axis=1) for each in zip(d_begin, d_end, strict=True)]
    assert_equal((out, log_sum, d_q + d_q_too, *joined), (want_out, want_log_sum, *want_gradients))


def test_keys_that_no_query_of_a_block_sees_are_not_read() -> None:
    """Fill the second of two documents with NaN: even if masked, a read would put NaN into the first's results."""
    length = 32
    q, k, v, gradient = arrays(length, length)
    rows = np.broadcast_to(np.arange(length), (BATCH, length))
    key_ranges = np.where(rows < 16, 0, 16), rows
    for x in (q, k, v, gradient):
        x[:, 16:] = np.nan
    out, _, *gradients = run(PLAIN)(q, k, v, gradient, *key_ranges)
    whole = np.s_[:, :16]
    want = expected(PLAIN, *(x[whole] for x in (q, k, v, gradient, *key_ranges)))
    assert_equal((out[whole], want[1], *(each[whole] for each in gradients)), want)


@pytest.mark.parametrize("key_ranges", KEY_RANGES)
@pytest.mark.parametrize("tile", [Tile(16, 8, 4, 2), Tile(8, 16, 4, 2)], ids=["wide", "tall"])
def test_blocks_that_are_read_and_those_without_a_mask(key_ranges: str, tile: Tile) -> None:
    first, last = KEY_RANGES[key_ranges]
    rows = np.arange(LENGTH)
    visible = (rows >= first[..., None]) & (rows <= last[..., None])  # [B, S, T]
    queries, keys = (np.arange(0, LENGTH, size) for size in (tile.queries, tile.keys))  # starts of N and M blocks
    pairs = [[visible[:, i : i + tile.queries, j : j + tile.keys] for j in keys] for i in queries]
    some, every = (
        np.array([[getattr(pair, reduce)((1, 2)) for pair in row] for row in pairs]).transpose(2, 0, 1)  # [B, N, M]
        for reduce in ("any", "all")
    )
    # Rows after the last query see nothing; keys after the last one are masked when they are loaded.
    every &= queries[:, None] + tile.queries <= LENGTH
    whole_keys = every & (keys + tile.keys <= LENGTH)

    clipped = kernel.clip_and_pad(KeyRanges(jnp.asarray(first), jnp.asarray(last)), LENGTH, tile.queries)
    query_side = kernel._find_key_blocks(clipped, tile), some, whole_keys
    key_side = kernel.find_query_blocks(clipped, tile, LENGTH), some.swapaxes(1, 2), every.swapaxes(1, 2)
    for bounds, needed, whole in (query_side, key_side):
        begin, full_begin, full_stop, stop = np.moveaxis(np.asarray(bounds), -1, 0)[..., None]
        other = np.arange(needed.shape[-1])
        read, unmasked = (begin <= other) & (other < stop), (full_begin <= other) & (other < full_stop)
        assert ((begin <= full_begin) & (full_begin <= full_stop) & (full_stop <= stop)).all()
        assert (needed <= read).all() and (unmasked <= whole).all()
        if key_ranges not in (
            "no order",
            "everything except some",
        ):  # there, the blocks that every query sees have gaps
            assert (read == needed).all() and (unmasked == whole).all()


def test_nothing_is_written_after_the_last_row() -> None:
    """Check the masks of stores: the interpreter drops values that a GPU would write into the next row of the batch."""
    case = *arrays(), *KEY_RANGES["causal"]
    program = jax.make_jaxpr(functools.partial(forward_and_backward, PLAIN, kernel, {"blocks": SMALL}))(*case)
    bodies = [each.params["jaxpr"] for each in program.eqns if each.primitive.name == "pallas_call"]
    stores = [each for body in bodies for each in body.eqns if each.primitive.name == "masked_swap"]
    masks = [each.params["args_tree"].unflatten(each.invars)[-1] for each in stores]
    assert len(masks) == len(NAMES) and all(mask is not None for mask in masks)


# ---- One query over a ring.

RINGS = {  # B, H, G, T
    "in parts": (3, 8, 1, 300),
    "in one part": (300, 2, 1, 70),
    "more heads than a tile has at least": (3, 40, 2, 64),
}


def ring_case(batch: int, heads: int, groups: int, slots: int, size: int = 16, dtype: Any = np.float32) -> list[Any]:
    """Make q, k, v, first and last. The first query sees keys on both sides of the ring's end, the last one none."""
    random = np.random.default_rng(slots)
    shapes = ((1, heads), (slots, groups), (slots, groups))
    last = random.integers(0, 3 * slots, (batch, 1)).astype(np.int32)
    count = np.minimum(random.integers(1, slots + 1, last.shape), last + 1).astype(np.int32)
    last[0], count[0], count[-1] = slots + slots // 4, slots // 2, 0
    return [
        *(random.normal(size=(batch, *shape, size)).astype(dtype) for shape in shapes),
        last - count + 1,
        last,
    ]


def attend_in_order(parameters: AttentionParameters, *case: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the results for keys that are sorted by position, and given without those that are not visible."""
    q, k, v, first, last = case
    results = []
    for row, (begin, end) in enumerate(zip(first[:, 0], last[:, 0], strict=True)):
        slots = np.arange(begin, end + 1) % k.shape[1]
        if slots.size == 0:
            slots = np.zeros(1, int)
        everything = KeyRanges(jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), end - begin, jnp.int32))
        arrays = (jnp.asarray(x) for x in (q[row : row + 1], k[row : row + 1, slots], v[row : row + 1, slots]))
        results.append(attention_xla.forward(parameters, *arrays, everything))
    outs, sums = zip(*results, strict=True)
    return np.concatenate(outs), np.concatenate(sums)


@pytest.mark.parametrize("parameters", [PLAIN, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("ring", [name for name in RINGS if name != "in one part"])
def test_a_query_over_a_ring_sees_its_last_keys(ring: str, parameters: AttentionParameters) -> None:
    case = ring_case(*RINGS[ring])
    wanted = attend_in_order(parameters, *case)
    for implementation, settings in ((kernel, {"interpret": True}), (attention_xla, {})):
        q, k, v, *key_ranges = map(jnp.asarray, case)
        over_ring = dataclasses.replace(parameters, ring=True)
        found = implementation.forward(over_ring, q, k, v, KeyRanges(*key_ranges), **settings)
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_many_queries_over_rings_are_one_part_each() -> None:
    q, k, v, *key_ranges = map(jnp.asarray, ring_case(*RINGS["in one part"]))
    over_ring, key_ranges = dataclasses.replace(PLAIN, ring=True), KeyRanges(*key_ranges)
    found = kernel.forward(over_ring, q, k, v, key_ranges, interpret=True)
    for got, want in zip(found, attention_xla.forward(over_ring, q, k, v, key_ranges), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-3), ("bfloat16", 1e-2)])
def test_a_query_over_a_ring_on_a_gpu(gpu: jax.Device, ring: str, dtype: str, tolerance: float) -> None:
    case = ring_case(*RINGS[ring], size=128, dtype=jnp.dtype(dtype))
    q, k, v, *key_ranges = map(jnp.asarray, case)
    run = functools.partial(kernel.forward, dataclasses.replace(CAPPED, ring=True), interpret=gpu.platform == "cpu")
    for got, want in zip(jax.jit(run)(q, k, v, KeyRanges(*key_ranges)), attend_in_order(CAPPED, *case), strict=True):
        assert (np.isfinite(got) == np.isfinite(want)).all()
        finite = np.isfinite(want)
        assert toy.distance(np.where(finite, got, 0), np.where(finite, want, 0)) < tolerance


def test_unsupported_calls() -> None:
    assert not kernel.problems(128, jnp.bfloat16, (8, 0))
    (head_dim, dtype, capability) = kernel.problems(96, jnp.float64, (7, 5))
    assert "head_dim=96" in head_dim and "float64" in dtype and "(7, 5)" in capability


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "dtype, precision, tolerance",
    [("float32", "highest", 1e-5), ("float32", "default", 5e-3), ("float16", None, 2e-3), ("bfloat16", None, 1e-2)],
)
def test_output_and_gradients_on_a_gpu_match_the_reference(
    gpu: jax.Device, dtype: str, precision: str | None, tolerance: float, head_dim: int
) -> None:
    """Compare each array as a whole, relative to its norm, with grouped heads and rows that no block divides.

    One query, and fewer keys than queries, are checked at one head size only: the others differ in tiles.
    """
    random = np.random.default_rng(0)
    settings = {"interpret": gpu.platform == "cpu"}
    parameters = AttentionParameters(scale=0.1, softcap=None if head_dim == 128 else 1.5)
    # Compiled once for each shape, for all key ranges.
    compiled = jax.jit(functools.partial(forward_and_backward, parameters, kernel, settings))
    for queries, keys in ((700, 700), *([(1, 300), (300, 129)] if head_dim == 128 else [])):
        sizes = ((queries, 4), (keys, 2), (keys, 2), (queries, 4))
        case = [random.normal(size=(BATCH, *size, head_dim)).astype(jnp.dtype(dtype)) for size in sizes]
        for key_ranges in (causal(queries, window=450, shift=keys - queries), scattered(queries, keys)):
            with jax.default_matmul_precision(precision):
                found = compiled(*case, *key_ranges)
            for name, got, want in zip(NAMES, found, expected(parameters, *case, *key_ranges), strict=True):
                finite = np.isfinite(want)
                assert got.devices() == {gpu}
                assert (np.isfinite(got) == finite).all()
                assert toy.distance(np.where(finite, got, 0), np.where(finite, want, 0)) < tolerance, name


# ---- Programs for GPUs, compiled but not run.


@pytest.mark.parametrize(
    ("head_dim", "heads", "dtype"), [(128, 64, "bfloat16"), *slow((256, 32, "bfloat16"), (128, 32, "float32"))]
)
@pytest.mark.parametrize("chip", ["4090", "h100", *slow("a100", "b200")])
def test_the_kernel_over_rings_fits_into_shared_memory(chip: str, head_dim: int, heads: int, dtype: str) -> None:
    """Each case has the most heads of a group that are supported."""
    mesh = Mesh(np.array(gpu_topology(chip, gpus_per_host=1)), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    q, k, row = (
        jax.ShapeDtypeStruct(shape, kind, sharding=sharding)
        for shape, kind in (((8, 1, 2 * heads, head_dim), dtype), ((8, 4000, 2, head_dim), dtype), ((8, 1), jnp.int32))
    )
    assert kernel.supports_ring(q, k, (8, 0))
    assert not kernel.supports_ring(jax.ShapeDtypeStruct((8, 1, 4 * heads, head_dim), dtype), k, (8, 0))
    assert not kernel.supports_ring(q, jax.ShapeDtypeStruct((8, 2**20, 2, head_dim), dtype), (8, 0))

    def run(q: Any, k: Any, v: Any, first: Any, last: Any) -> Any:
        return kernel.forward(dataclasses.replace(PLAIN, ring=True), q, k, v, KeyRanges(first, last))

    mapped = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    lowered = jax.jit(mapped).trace(q, k, k, row, row).lower(lowering_platforms=("cuda",))
    assert str(topology.compile_without_gpu(lowered).as_text()).count("__gpu$xla.gpu.triton") == 1


def program(
    chip: str, head_dim: int, dtype: Any, *, toolkit: bool = False, parameters: AttentionParameters = PLAIN
) -> jax.stages.Compiled:
    """Compile forward and backward. toolkit: also to machine code, by NVIDIA's assembler."""
    mesh = Mesh(np.array(gpu_topology(chip, gpus_per_host=1)), ("data",), axis_types=(AxisType.Auto,))

    def array(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    q, k, row = array(1, 2048, 8, head_dim), array(1, 2048, 2, head_dim), array(1, 2048, dtype=jnp.int32)
    mapped = jax.shard_map(
        functools.partial(forward_and_backward, parameters, kernel, {}),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    lowered = jax.jit(mapped).trace(q, k, k, q, row, row).lower(lowering_platforms=("cuda",))
    return topology.run_xla(lowered, {}) if toolkit else topology.compile_without_gpu(lowered)


@pytest.mark.parametrize("head_dim", [128, *slow(64, 256)])
@pytest.mark.parametrize("chip", ["a100", "4090", "h100", "b200"])
def test_blocks_fit_into_shared_memory(chip: str, head_dim: int) -> None:
    """Otherwise XLA would not compile. To XLA, an H200 is an H100 with more memory."""
    text = str(program(chip, head_dim, jnp.bfloat16).as_text())
    assert text.count("__gpu$xla.gpu.triton") == 3


@pytest.mark.parametrize("head_dim", [128, *slow(64, 256)])
@pytest.mark.parametrize("chip, precision", [("4090", "highest"), ("h100", "default")])
def test_blocks_of_float32_fit_into_shared_memory(chip: str, precision: str, head_dim: int) -> None:
    with jax.default_matmul_precision(precision):
        program(chip, head_dim, jnp.float32)


def test_the_program_holds_no_scores_and_repeats_no_keys() -> None:
    compiled = program("h100", 128, jnp.bfloat16)
    q, statistics = 2048 * 8 * 128, 2048 * 8
    assert max(math.prod(array.shape) for array in programs.list_array_shapes(str(compiled.as_text()))) == q
    # delta, key ranges and bounds, in 32 bits; k repeated for every query head would be as large as q.
    assert hlo.read_memory(compiled).temporaries < 2 * statistics * 4


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="NVIDIA's ptxas is not installed")
@pytest.mark.parametrize("chip", ["a100", "h100", "b200"])
def test_machine_code(chip: str) -> None:
    program(chip, 128, jnp.bfloat16, toolkit=True, parameters=CAPPED)
