"""Triton kernels of attention: results, machine code, and the compiled program.

The results come from Triton's interpreter, and from a GPU if there is one. The machine code comes from Triton's
assembler. The program around the kernels is compiled for an H200.
"""

import functools
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import reference
import toy
import triton_interpreter
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm import kernels
from jaxopt_llm.compiler import topology
from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.kernels import attention_triton as kernel
from jaxopt_llm.kernels import attention_xla
from jaxopt_llm.kernels.attention import attend
from jaxopt_llm.kernels.attention_triton import TILES, problems
from jaxopt_llm.kernels.attention_types import (
    AttentionParameters,
    AttentionResiduals,
    KeyRanges,
    Tile,
    Tiles,
    make_document_ranges,
)

pytestmark = pytest.mark.core

LACKING = problems(128, "bfloat16", (9, 0))
needs_triton = pytest.mark.skipif(bool(LACKING), reason="; ".join(LACKING))

Where = tuple[np.ndarray, np.ndarray]  # first and last, int32 [B, S]


def operands(queries: int, keys: int, heads: int, groups: int, size: int = 16, dtype: Any = np.float16) -> Any:
    """Make q, k, v and the gradient of the output; batch 2."""
    random = np.random.default_rng(0)
    shapes = ((queries, heads), (keys, groups), (keys, groups), (queries, heads))
    return tuple(jnp.asarray(random.normal(size=(2, *shape, size)), dtype) for shape in shapes)


def run(
    parameters: AttentionParameters, tiles: Tiles | None, q: Any, k: Any, v: Any, gradient: Any, where: Where
) -> tuple[jax.Array, ...]:
    """Return the output, its log_sum and the gradients of q, k and v."""
    key_ranges = KeyRanges(*map(jnp.asarray, where))
    out, log_sum = kernel.forward(parameters, q, k, v, key_ranges, tiles)
    delta = jnp.einsum("BSHK,BSHK->BHS", gradient, out, preferred_element_type=jnp.float32)
    residuals = AttentionResiduals(q, k, v, key_ranges, log_sum, delta)
    return out, log_sum, *kernel.backward(parameters, residuals, gradient, tiles)


def run_xla(
    parameters: AttentionParameters, q: Any, k: Any, v: Any, gradient: Any, where: Where
) -> tuple[jax.Array, ...]:
    """Return the same as `run`, computed by xla."""
    key_ranges = KeyRanges(*map(jnp.asarray, where))
    out, log_sum = attention_xla.forward(parameters, q, k, v, key_ranges)
    delta = jnp.einsum("BSHK,BSHK->BHS", gradient, out, preferred_element_type=jnp.float32)
    residuals = AttentionResiduals(q, k, v, key_ranges, log_sum, delta)
    return out, log_sum, *attention_xla.backward(parameters, residuals, gradient)


def expected(
    parameters: AttentionParameters, q: Any, k: Any, v: Any, gradient: Any, where: Where
) -> tuple[np.ndarray, ...]:
    q, k, v, gradient = (np.asarray(x, np.float64) for x in (q, k, v, gradient))
    key = np.arange(k.shape[1])
    visible = (where[0][..., None] <= key) & (key <= where[1][..., None])
    nothing = ~visible.any(axis=-1)
    # The reference does not support a query that sees nothing: it sees all keys there, and the result is ignored.
    visible[nothing] = True
    out, backward = reference.attend(q, k, v, visible, parameters.scale, parameters.softcap or 0.0)
    gradient = np.where(nothing[..., None, None], 0, gradient)
    scores = np.einsum("BSHK,BTHK->BHST", q, np.repeat(k, q.shape[2] // k.shape[2], axis=2)) * parameters.scale
    if parameters.softcap is not None:
        scores = parameters.softcap * np.tanh(scores / parameters.softcap)
    log_sum = np.log(np.sum(np.exp(scores), axis=-1, where=visible[:, None]))
    out, log_sum = np.where(nothing[..., None, None], 0, out), np.where(nothing[:, None], np.inf, log_sum)
    return out, log_sum, *backward(gradient)


def assert_close(found: tuple[jax.Array, ...], wanted: tuple[np.ndarray, ...], tolerance: float) -> None:
    for name, got, want in zip(("out", "log_sum", "q", "k", "v"), found, wanted, strict=True):
        np.testing.assert_array_equal(np.isinf(got), np.isinf(want), err_msg=name)
        difference = np.linalg.norm(np.where(np.isinf(want), 0, got) - np.where(np.isinf(want), 0, want))
        assert difference <= tolerance * np.linalg.norm(want[np.isfinite(want)]) + 1e-5, name


# ---- Key ranges, for a batch of 2.


def causal(length: int, window: int | None = None) -> Where:
    row = np.broadcast_to(np.arange(length, dtype=np.int32), (2, length))
    return np.zeros_like(row) if window is None else row - (window - 1), row


def packed(length: int) -> Where:
    key_ranges = make_document_ranges(toy.packed(rows=2, length=length).segment_ids)
    return np.asarray(key_ranges.first), np.asarray(key_ranges.last)


def shifted(queries: int, by: int, reach: int) -> Where:
    """Make key ranges as in a part of a ring: they begin before the part, or end after it."""
    row = np.broadcast_to(np.arange(queries, dtype=np.int32), (2, queries)) + by
    return row - reach, row


def out_of_order(queries: int, keys: int) -> Where:
    random = np.random.default_rng(1)
    first = random.integers(-5, keys, (2, queries), np.int32)
    return first, first + random.integers(-3, keys, (2, queries), np.int32)


def with_padding(length: int) -> Where:
    """Make key ranges that are empty for every fifth query, by `first`, and for the last queries, by `last`."""
    first, last = causal(length)
    limits, row = np.iinfo(np.int32), np.arange(length)
    return np.where(row % 5 == 2, limits.max, first), np.where(row > length - 20, limits.min, last)


def tiles(queries: int, keys: int) -> Tiles:
    tile = Tile(queries, keys, warps=4, stages=2)
    return Tiles(tile, tile, tile)


# ---- Results in the interpreter.


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.interpret(monkeypatch, kernels, "attention_triton_kernels")


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "keys, blocks, softcap, where",
    [
        pytest.param(70, tiles(16, 16), None, causal(70), id="causal"),
        pytest.param(50, tiles(16, 16), 1.5, causal(50), id="causal, capped"),
        pytest.param(70, tiles(32, 16), None, causal(70, window=20), id="window larger than a block"),
        pytest.param(70, tiles(16, 32), 1.5, causal(70, window=3), id="window smaller than a block"),
        pytest.param(90, tiles(16, 16), None, packed(90), id="documents"),
        pytest.param(64, tiles(16, 32), None, (np.zeros((2, 40), np.int32), np.full((2, 40), 63, np.int32)), id="all"),
        pytest.param(90, tiles(32, 16), None, shifted(50, by=40, reach=99), id="cache"),
        pytest.param(50, tiles(16, 16), None, shifted(50, by=30, reach=45), id="later part"),
        pytest.param(50, tiles(16, 16), 1.5, shifted(50, by=-40, reach=45), id="earlier part, mostly unseen"),
        pytest.param(50, tiles(16, 16), None, shifted(50, by=99, reach=20), id="no visible key"),
        pytest.param(45, tiles(16, 16), None, out_of_order(70, 45), id="out of order"),
        pytest.param(70, tiles(16, 16), 1.5, with_padding(70), id="queries that see nothing"),
        pytest.param(1, tiles(16, 16), None, causal(1), id="one token"),
    ],
)
def test_output_and_gradients_match_the_reference(
    keys: int, blocks: Tiles, softcap: float | None, where: Where
) -> None:
    arrays = operands(where[0].shape[1], keys, heads=4, groups=2)
    parameters = AttentionParameters(scale=0.3, softcap=softcap)
    found = jax.jit(functools.partial(run, parameters, blocks))(*arrays, where)
    assert_close(found, expected(parameters, *arrays, where), tolerance=1e-3)


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))])
def test_random_calls_round_no_more_than_xla(seed: int) -> None:
    """Draw lengths, heads, key ranges, blocks and soft-cap, with scores of up to hundreds.

    The arrays are small, so one more rounding in the result's dtype than xla's is allowed.
    """
    random = np.random.default_rng(seed)
    queries, keys, groups = (int(random.choice(of)) for of in ([1, 7, 30, 64], [2, 5, 33, 70], [1, 2]))
    blocks = tiles(*(int(size) for size in random.choice([16, 32], 2)))
    parameters = AttentionParameters(scale=0.3, softcap=[None, 1.5][random.integers(2)])
    reach = int(random.integers(1, 60))
    where = [shifted(queries, keys - queries, reach), out_of_order(queries, keys)][random.integers(2)]
    arrays = operands(queries, keys, groups * int(random.integers(1, 4)), groups)
    q, k, v, gradient = (x * jnp.float16(f) for x, f in zip(arrays, 4.0 ** random.integers(-2, 3, 4), strict=True))
    case = q, k, v, gradient, where
    found, others = (
        jax.jit(functools.partial(run, parameters, blocks))(*case),
        jax.jit(functools.partial(run_xla, parameters))(*case),
    )
    for got, other, want in zip(found, others, expected(parameters, *case), strict=True):
        np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
        want, got, other = (np.where(np.isinf(want), 0, x).astype(np.float64) for x in (want, got, other))
        rounding = float(jnp.finfo(jnp.float16).eps) * np.linalg.norm(want)
        assert np.linalg.norm(got - want) <= 1.2 * np.linalg.norm(other - want) + rounding


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("size", TILES)
def test_default_tiles_of_each_head_size(size: int) -> None:
    arrays, where = operands(150, 150, heads=2, groups=1, size=size), packed(150)
    parameters = AttentionParameters(scale=size**-0.5)
    found = jax.jit(functools.partial(run, parameters, None))(*arrays, where)
    assert_close(found, expected(parameters, *arrays, where), tolerance=1e-3)


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_under_vmap_the_axis_joins_the_batch() -> None:
    q, k, v, gradient = operands(40, 40, heads=2, groups=1)
    many = tuple(jnp.stack([x, -2 * x, 0.5 * x]) for x in (q, k, v, gradient))
    single = functools.partial(run, AttentionParameters(scale=0.3), tiles(16, 16), where=packed(40))
    found = jax.jit(jax.vmap(single))(*many)
    for i in range(3):
        for got, want in zip(found, jax.jit(single)(*(x[i] for x in many)), strict=True):
            # The caller's delta is summed in another order. A float16 value that then rounds to its other neighbour
            # moves the result by up to 2^-11 / sqrt(number of values). On some processors a few of them do.
            assert toy.distance(got[i], want) < math.sqrt(16 / k.size) * 2**-11


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_keys_in_two_parts_give_the_gradients_of_all() -> None:
    q, k, v, gradient = operands(40, 40, heads=2, groups=1)
    parameters, (first, last), blocks = AttentionParameters(scale=0.3), causal(40, window=30), tiles(16, 16)
    out, log_sum, d_q, d_k, d_v = expected(parameters, q, k, v, gradient, (first, last))
    delta = jnp.asarray(np.einsum("BSHK,BSHK->BHS", np.asarray(gradient, np.float64), out), jnp.float32)
    parts = []
    for rows in (slice(0, 24), slice(24, 40)):
        key_ranges = KeyRanges(jnp.asarray(first - rows.start), jnp.asarray(last - rows.start))
        whole_log_sum = jnp.asarray(log_sum, jnp.float32)
        residuals = AttentionResiduals(q, k[:, rows], v[:, rows], key_ranges, whole_log_sum, delta)
        parts.append(kernel.backward(parameters, residuals, gradient, blocks))
    whole = [sum(np.asarray(part[0], np.float32) for part in parts)]
    whole += [np.concatenate([part[i] for part in parts], axis=1) for i in (1, 2)]
    for got, want in zip(whole, (d_q, d_k, d_v), strict=True):
        assert toy.distance(got, want) < 1e-3


# ---- Rows that blocks visit.


def visits(bounds: np.ndarray, step: int) -> list[list[tuple[set[int], set[int]]]]:
    """List, by batch row and block, the visited rows and those of them without a mask."""

    def visit(start: int, full_start: int, full_end: int, end: int) -> tuple[set[int], set[int]]:
        assert start <= full_start <= full_end and (full_start - start) % step == (full_end - full_start) % step == 0
        return set(range(start, end)), set(range(full_start, full_end))

    return [[visit(*map(int, block)) for block in row] for row in bounds]


@pytest.mark.parametrize("where", [causal(70), causal(70, window=20), packed(70), out_of_order(70, 70)])
@pytest.mark.parametrize("queries, keys", [(16, 16), (32, 16), (16, 32)])
def test_visible_rows_are_visited_and_unmasked_rows_are_visible_to_the_whole_block(
    where: Where, queries: int, keys: int
) -> None:
    tile, row = Tile(queries, keys, 4, 2), np.arange(70)
    clipped = kernel._clip(*map(jnp.asarray, where), 70)
    visible = (where[0][..., None] <= row) & (row <= where[1][..., None])
    of_queries = visits(np.asarray(kernel._find_key_rows(*clipped, tile)), keys)
    of_keys = visits(np.asarray(kernel._find_query_rows(*clipped, 70, tile)), queries)
    for seen, size, found in ((visible, queries, of_queries), (visible.swapaxes(1, 2), keys, of_keys)):
        for batch in range(2):
            for block, (visited, unmasked) in enumerate(found[batch]):
                rows = seen[batch, block * size : (block + 1) * size]
                assert set(np.flatnonzero(rows.any(axis=0))) <= visited
                assert {each for each in unmasked if each < 70} <= set(np.flatnonzero(rows.all(axis=0)))


def test_blocks_outside_a_window_are_not_visited_and_those_inside_have_no_mask() -> None:
    where = kernel._clip(*map(jnp.asarray, causal(512, window=128)), 512)
    tile = Tile(queries=32, keys=32, warps=4, stages=2)
    seen = np.asarray(kernel._find_key_rows(*where, tile))[0, [0, 1, 8]]
    assert seen.tolist() == [[0, 0, 0, 32], [0, 0, 32, 64], [129, 161, 257, 288]]
    seeing = np.asarray(kernel._find_query_rows(*where, 512, tile))[0, [0, 8, 15]]
    assert seeing.tolist() == [[0, 32, 128, 160], [256, 288, 384, 416], [480, 512, 512, 512]]


def test_the_last_keys_have_no_mask_where_they_do_not_fill_a_block() -> None:
    where = jnp.zeros((1, 64), jnp.int32), jnp.full((1, 64), 49, jnp.int32)
    seeing = kernel._find_query_rows(*where, 50, Tile(queries=32, keys=32, warps=4, stages=2))
    assert seeing.tolist() == [[[0, 0, 64, 64], [0, 0, 64, 64]]]


def test_concurrent_heads_divide_all_heads_and_fit_the_cache() -> None:
    assert kernel._count_concurrent_heads(32, 1024 * 128) == 32
    assert kernel._count_concurrent_heads(24, 8192 * 128) == 6
    assert kernel._count_concurrent_heads(7, 2**24) == 1


def test_problems_name_the_unsupported_property_and_xla() -> None:
    assert problems(64, "float16", (10, 0)) == LACKING
    found = [each for each in problems(96, "float32", (8, 9)) if each not in LACKING]
    assert [re.split(r"[ =]", each)[0] for each in found] == ["head_dim", "dtype", "capability"]
    assert all("xla" in each for each in found)
    assert problems(64, "float16", (12, 0)) != LACKING  # too little shared memory


@needs_triton
@pytest.mark.parametrize(
    ("package", "version", "required"), [("jax-triton", "0.3.1", "0.4"), ("triton", "3.6.0", "3.7")]
)
def test_an_older_package_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, required: str
) -> None:
    versions = {"jax-triton": "0.4.1", "triton": "3.10.0"} | {package: version}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    (found,) = problems(64, "float16", (9, 0))
    assert f"{package} {version}" in found and f"requires {required}; run pip install" in found


# ---- Compiled for an H200, and for a B200 to check that its units are used.

LENGTH, HEADS, GROUPS = 4096, 8, 2


@pytest.fixture(scope="module", params=TILES)
def compiled(request: pytest.FixtureRequest) -> tuple[int, jax.stages.Compiled, list[Any]]:
    return request.param, *compiled_for("h200", request.param)


def compiled_for(chip: str, size: int) -> tuple[jax.stages.Compiled, list[Any]]:
    """Compile output and gradients on two devices, a gradient group each; return the program and its kernels."""
    from jax_triton import triton_lib

    mesh = Mesh(np.array(topology.gpu_topology(chip, gpus_per_host=2)), ("data",), axis_types=(AxisType.Auto,))
    parameters, spec = AttentionParameters(scale=size**-0.5), PartitionSpec()

    def output_and_gradients(q: Any, k: Any, v: Any, gradient: Any, key_ranges: KeyRanges) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(lambda q, k, v: attend(kernel, parameters, q, k, v, key_ranges), q, k, v)
        return out, *backward(gradient)

    on_devices = jax.shard_map(output_and_gradients, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    by_group = jax.jit(jax.vmap(on_devices, spmd_axis_name="data"))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, 1, LENGTH, *shape), dtype, sharding=sharding)

    key_ranges = KeyRanges(array(dtype=jnp.int32), array(dtype=jnp.int32))
    q, k = array(HEADS, size), array(GROUPS, size)
    made = []
    compile_kernel = triton_lib.TritonFunction._compile_kernel

    def recorded(*arguments: Any) -> Any:
        made.append(compile_kernel(*arguments))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_lib.TritonFunction, "_compile_kernel", recorded)
        lowered = by_group.trace(q, k, k, q, key_ranges).lower(lowering_platforms=("cuda",))
    return topology.compile_without_gpu(lowered), [result for *_, result in made]


@needs_triton
def test_the_program_holds_no_scores_and_repeats_no_keys(
    compiled: tuple[int, jax.stages.Compiled, list[Any]],
) -> None:
    size, program, _ = compiled
    text = program.as_text()
    assert text is not None and text.count("custom_call_target") == 3
    assert not re.search("all-gather|all-reduce|all-to-all|permute|reduce-scatter", text)
    largest = max(math.prod(array.shape) for array in programs.list_array_shapes(text))
    assert largest == LENGTH * HEADS * size  # q, which is smaller than one head's scores
    memory = program.memory_analysis()
    statistics = 2 * LENGTH * HEADS * 4  # log_sum and delta
    assert memory is not None and statistics <= memory.temp_size_in_bytes < 2 * statistics


@needs_triton
def test_kernels_fit_hopper_and_use_its_units(
    compiled: tuple[int, jax.stages.Compiled, list[Any]], tmp_path: Path
) -> None:
    *_, made = compiled
    assert sorted(each.name for each in made) == ["backward_keys", "backward_queries", "forward"]
    for each in made:
        assert each.shared_mem_bytes <= CHIPS["h200"].shared_memory_bytes_per_block
        assert "wgmma.mma_async" in each.binary and "cp.async.bulk.tensor" in each.binary
        output = assembled(each, "sm_90a", tmp_path)
        assert "serialized" not in output  # a lack of registers would serialize the wgmma instructions
        (spilled,) = re.findall(r"(\d+) bytes spill stores", output)
        assert int(spilled) <= 32


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("size", TILES)
def test_kernels_fit_blackwell_and_use_its_units(size: int, tmp_path: Path) -> None:
    _, made = compiled_for("b200", size)
    assert sorted(each.name for each in made) == ["backward_keys", "backward_queries", "forward"]
    for each in made:
        assert each.shared_mem_bytes <= CHIPS["b200"].shared_memory_bytes_per_block
        assert "tcgen05.mma" in each.binary and "cp.async.bulk.tensor" in each.binary
        assembled(each, "sm_100a", tmp_path)


def assembled(kernel: Any, architecture: str, folder: Path) -> str:
    """Return the output of NVIDIA's assembler for a kernel."""
    import triton

    source = folder / f"{kernel.name}.ptx"
    source.write_text(kernel.binary)
    assembler = triton.knobs.nvidia.ptxas_blackwell.path  # of two, the newer one
    return subprocess.run(
        [assembler, "-v", f"--gpu-name={architecture}", source, "-o", folder / "code"],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip


# ---- On a GPU.


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize(
    "size, dtype, softcap, where",
    [
        pytest.param(64, "bfloat16", None, causal(700), id="head size 64"),
        pytest.param(128, "bfloat16", None, packed(700), id="head size 128, documents"),
        pytest.param(256, "bfloat16", 20.0, causal(700, window=300), id="head size 256, window, capped"),
        pytest.param(128, "float16", None, causal(700, window=300), id="float16, window"),
        pytest.param(128, "bfloat16", 20.0, with_padding(700), id="queries that see nothing, capped"),
        pytest.param(64, "float16", None, out_of_order(700, 700), id="out of order"),
    ],
)
def test_output_and_gradients_on_a_gpu_match_the_reference_and_are_deterministic(
    gpu: jax.Device, size: int, dtype: str, softcap: float | None, where: Where
) -> None:
    if gpu.platform == "cpu":
        pytest.skip("Triton compiles for GPUs only")
    lacking = problems(size, dtype, tuple(map(int, gpu.compute_capability.split("."))))
    if lacking:
        pytest.skip("; ".join(lacking))
    arrays = operands(700, 700, heads=8, groups=2, size=size, dtype=jnp.dtype(dtype))
    parameters = AttentionParameters(scale=size**-0.5, softcap=softcap)
    compiled = jax.jit(functools.partial(run, parameters, None))
    found, again = (compiled(*arrays, where) for _ in range(2))
    assert_close(found, expected(parameters, *arrays, where), tolerance=1e-2 if dtype == "bfloat16" else 2e-3)
    for first, second in zip(found, again, strict=True):
        np.testing.assert_array_equal(first, second)
