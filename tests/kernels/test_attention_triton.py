"""The Triton kernels of attention: what they compute, by Triton's interpreter; their machine code, by its assembler;
the program around them, compiled for an H200; and on a GPU, where there is one."""

import functools
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy
import triton_interpreter
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm import kernels
from jaxopt_llm.kernels import attention_triton as kernel
from jaxopt_llm.kernels import attention_xla
from jaxopt_llm.kernels.attention import attend
from jaxopt_llm.kernels.attention_triton import TILES, Tile, Tiles, problems
from jaxopt_llm.kernels.spans import Form, Spans, of_documents
from jaxopt_llm.parallel import hlo, topology

pytestmark = pytest.mark.core

LACKING = problems(128, "bfloat16", (9, 0))
needs_triton = pytest.mark.skipif(bool(LACKING), reason="; ".join(LACKING))

Where = tuple[np.ndarray, np.ndarray]  # first and last, int32 [B, S]


def operands(queries: int, keys: int, heads: int, groups: int, size: int = 16, dtype: Any = np.float16) -> Any:
    """q, k, v and the gradient of the output; batch 2."""
    random = np.random.default_rng(0)
    shapes = ((queries, heads), (keys, groups), (keys, groups), (queries, heads))
    return tuple(jnp.asarray(random.normal(size=(2, *shape, size)), dtype) for shape in shapes)


def run(form: Form, tiles: Tiles | None, q: Any, k: Any, v: Any, gradient: Any, where: Where) -> tuple[jax.Array, ...]:
    """The output, its log_sum and the gradients of q, k and v."""
    spans = Spans(*map(jnp.asarray, where))
    out, log_sum = kernel.forward(form, q, k, v, spans, tiles)
    mean = jnp.einsum("BSHK,BSHK->BHS", gradient, out, preferred_element_type=jnp.float32)
    return out, log_sum, *kernel.backward(form, q, k, v, spans, log_sum, mean, gradient, tiles)


def by_xla(form: Form, q: Any, k: Any, v: Any, gradient: Any, where: Where) -> tuple[jax.Array, ...]:
    """As `run`."""
    spans = Spans(*map(jnp.asarray, where))
    out, log_sum = attention_xla.forward(form, q, k, v, spans)
    mean = jnp.einsum("BSHK,BSHK->BHS", gradient, out, preferred_element_type=jnp.float32)
    return out, log_sum, *attention_xla.backward(form, q, k, v, spans, log_sum, mean, gradient)


def expected(form: Form, q: Any, k: Any, v: Any, gradient: Any, where: Where) -> tuple[np.ndarray, ...]:
    q, k, v, gradient = (np.asarray(x, np.float64) for x in (q, k, v, gradient))
    key = np.arange(k.shape[1])
    visible = (where[0][..., None] <= key) & (key <= where[1][..., None])
    nothing = ~visible.any(axis=-1)
    # The reference has no query that sees nothing: give it a key, and then what it found no weight.
    visible[nothing] = True
    out, backward = reference.attend(q, k, v, visible, form.scale, form.softcap or 0.0)
    gradient = np.where(nothing[..., None, None], 0, gradient)
    scores = np.einsum("BSHK,BTHK->BHST", q, np.repeat(k, q.shape[2] // k.shape[2], axis=2)) * form.scale
    if form.softcap is not None:
        scores = form.softcap * np.tanh(scores / form.softcap)
    log_sum = np.log(np.sum(np.exp(scores), axis=-1, where=visible[:, None]))
    out, log_sum = np.where(nothing[..., None, None], 0, out), np.where(nothing[:, None], np.inf, log_sum)
    return out, log_sum, *backward(gradient)


def assert_are(found: tuple[jax.Array, ...], wanted: tuple[np.ndarray, ...], tolerance: float) -> None:
    for name, got, want in zip(("out", "log_sum", "q", "k", "v"), found, wanted, strict=True):
        np.testing.assert_array_equal(np.isinf(got), np.isinf(want), err_msg=name)
        difference = np.linalg.norm(np.where(np.isinf(want), 0, got) - np.where(np.isinf(want), 0, want))
        assert difference <= tolerance * np.linalg.norm(want[np.isfinite(want)]) + 1e-5, name


# ---- Spans, of batch 2.


def causal(length: int, window: int | None = None) -> Where:
    row = np.broadcast_to(np.arange(length, dtype=np.int32), (2, length))
    return np.zeros_like(row) if window is None else row - (window - 1), row


def packed(length: int) -> Where:
    spans = of_documents(toy.packed(rows=2, length=length).segment_ids)
    return np.asarray(spans.first), np.asarray(spans.last)


def shifted(queries: int, by: int, reach: int) -> Where:
    """As of a part of a ring: spans that begin before the part, or end after it."""
    row = np.broadcast_to(np.arange(queries, dtype=np.int32), (2, queries)) + by
    return row - reach, row


def out_of_order(queries: int, keys: int) -> Where:
    random = np.random.default_rng(1)
    first = random.integers(-5, keys, (2, queries), np.int32)
    return first, first + random.integers(-3, keys, (2, queries), np.int32)


def with_padding(length: int) -> Where:
    """Every fifth query sees nothing, nor do the last ones, each said in another way."""
    first, last = causal(length)
    limits, row = np.iinfo(np.int32), np.arange(length)
    return np.where(row % 5 == 2, limits.max, first), np.where(row > length - 20, limits.min, last)


def tiles(queries: int, keys: int) -> Tiles:
    tile = Tile(queries, keys, warps=4, stages=2)
    return Tiles(tile, tile, tile)


# ---- By the interpreter.


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
        pytest.param(50, tiles(16, 16), None, shifted(50, by=99, reach=20), id="none at all"),
        pytest.param(45, tiles(16, 16), None, out_of_order(70, 45), id="out of order"),
        pytest.param(70, tiles(16, 16), 1.5, with_padding(70), id="queries that see nothing"),
        pytest.param(1, tiles(16, 16), None, causal(1), id="one token"),
    ],
)
def test_output_and_gradients_are_the_references(keys: int, blocks: Tiles, softcap: float | None, where: Where) -> None:
    arrays = operands(where[0].shape[1], keys, heads=4, groups=2)
    form = Form(scale=0.3, softcap=softcap)
    found = jax.jit(functools.partial(run, form, blocks))(*arrays, where)
    assert_are(found, expected(form, *arrays, where), tolerance=1e-3)


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 15))])
def test_of_any_shape_and_size_it_rounds_no_more_than_xlas(seed: int) -> None:
    """Any lengths, heads, spans, blocks and soft-cap, and scores of up to hundreds. Of so few numbers one more rounding
    than xla's in the result's dtype makes no difference."""
    random = np.random.default_rng(seed)
    queries, keys, groups = (int(random.choice(of)) for of in ([1, 7, 30, 64], [2, 5, 33, 70], [1, 2]))
    blocks = tiles(*(int(size) for size in random.choice([16, 32], 2)))
    form = Form(scale=0.3, softcap=[None, 1.5][random.integers(2)])
    reach = int(random.integers(1, 60))
    where = [shifted(queries, keys - queries, reach), out_of_order(queries, keys)][random.integers(2)]
    arrays = operands(queries, keys, groups * int(random.integers(1, 4)), groups)
    q, k, v, gradient = (x * jnp.float16(f) for x, f in zip(arrays, 4.0 ** random.integers(-2, 3, 4), strict=True))
    case = q, k, v, gradient, where
    found, others = (
        jax.jit(functools.partial(run, form, blocks))(*case),
        jax.jit(functools.partial(by_xla, form))(*case),
    )
    for got, other, want in zip(found, others, expected(form, *case), strict=True):
        np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
        want, got, other = (np.where(np.isinf(want), 0, x).astype(np.float64) for x in (want, got, other))
        rounding = float(jnp.finfo(jnp.float16).eps) * np.linalg.norm(want)
        assert np.linalg.norm(got - want) <= 1.2 * np.linalg.norm(other - want) + rounding


@needs_triton
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("size", TILES)
def test_by_the_tiles_of_the_head_size(size: int) -> None:
    arrays, where = operands(150, 150, heads=2, groups=1, size=size), packed(150)
    form = Form(scale=size**-0.5)
    found = jax.jit(functools.partial(run, form, None))(*arrays, where)
    assert_are(found, expected(form, *arrays, where), tolerance=1e-3)


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_under_vmap_the_axis_joins_the_batch() -> None:
    q, k, v, gradient = operands(40, 40, heads=2, groups=1)
    many = tuple(jnp.stack([x, -2 * x, 0.5 * x]) for x in (q, k, v, gradient))
    alone = functools.partial(run, Form(scale=0.3), tiles(16, 16), where=packed(40))
    found = jax.jit(jax.vmap(alone))(*many)
    for i in range(3):
        for got, want in zip(found, jax.jit(alone)(*(x[i] for x in many)), strict=True):
            assert toy.distance(got[i], want) < 1e-5  # the caller's mean is summed in another order


@needs_triton
@pytest.mark.usefixtures("interpreted")
def test_keys_in_two_parts_give_the_gradients_of_all() -> None:
    q, k, v, gradient = operands(40, 40, heads=2, groups=1)
    form, (first, last), blocks = Form(scale=0.3), causal(40, window=30), tiles(16, 16)
    out, log_sum, d_q, d_k, d_v = expected(form, q, k, v, gradient, (first, last))
    mean = jnp.asarray(np.einsum("BSHK,BSHK->BHS", np.asarray(gradient, np.float64), out), jnp.float32)
    parts = []
    for rows in (slice(0, 24), slice(24, 40)):
        spans = Spans(jnp.asarray(first - rows.start), jnp.asarray(last - rows.start))
        all_of_it = (jnp.asarray(log_sum, jnp.float32), mean, gradient, blocks)
        parts.append(kernel.backward(form, q, k[:, rows], v[:, rows], spans, *all_of_it))
    whole = [sum(np.asarray(part[0], np.float32) for part in parts)]
    whole += [np.concatenate([part[i] for part in parts], axis=1) for i in (1, 2)]
    for got, want in zip(whole, (d_q, d_k, d_v), strict=True):
        assert toy.distance(got, want) < 1e-3


# ---- What blocks visit.


def visits(bounds: np.ndarray, step: int) -> list[list[tuple[set[int], set[int]]]]:
    """By batch row and block: the rows that it visits, and those of them without a mask."""

    def of_block(start: int, full_start: int, full_end: int, end: int) -> tuple[set[int], set[int]]:
        assert start <= full_start <= full_end and (full_start - start) % step == (full_end - full_start) % step == 0
        return set(range(start, end)), set(range(full_start, full_end))

    return [[of_block(*map(int, block)) for block in row] for row in bounds]


@pytest.mark.parametrize("where", [causal(70), causal(70, window=20), packed(70), out_of_order(70, 70)])
@pytest.mark.parametrize("queries, keys", [(16, 16), (32, 16), (16, 32)])
def test_all_that_is_seen_is_visited_and_what_goes_unmasked_is_seen_by_all(
    where: Where, queries: int, keys: int
) -> None:
    tile, row = Tile(queries, keys, 4, 2), np.arange(70)
    clipped = kernel._clipped(*map(jnp.asarray, where), 70)
    visible = (where[0][..., None] <= row) & (row <= where[1][..., None])
    of_queries = visits(np.asarray(kernel._seen_by_queries(*clipped, tile)), keys)
    of_keys = visits(np.asarray(kernel._seeing_keys(*clipped, 70, tile)), queries)
    for seen, size, found in ((visible, queries, of_queries), (visible.swapaxes(1, 2), keys, of_keys)):
        for batch in range(2):
            for block, (visited, unmasked) in enumerate(found[batch]):
                rows = seen[batch, block * size : (block + 1) * size]
                assert set(np.flatnonzero(rows.any(axis=0))) <= visited
                assert {each for each in unmasked if each < 70} <= set(np.flatnonzero(rows.all(axis=0)))


def test_blocks_outside_a_window_are_not_visited_and_those_inside_have_no_mask() -> None:
    where = kernel._clipped(*map(jnp.asarray, causal(512, window=128)), 512)
    tile = Tile(queries=32, keys=32, warps=4, stages=2)
    seen = np.asarray(kernel._seen_by_queries(*where, tile))[0, [0, 1, 8]]
    assert seen.tolist() == [[0, 0, 0, 32], [0, 0, 32, 64], [129, 161, 257, 288]]
    seeing = np.asarray(kernel._seeing_keys(*where, 512, tile))[0, [0, 8, 15]]
    assert seeing.tolist() == [[0, 32, 128, 160], [256, 288, 384, 416], [480, 512, 512, 512]]


def test_the_last_keys_have_no_mask_where_they_do_not_fill_a_block() -> None:
    where = jnp.zeros((1, 64), jnp.int32), jnp.full((1, 64), 49, jnp.int32)
    seeing = kernel._seeing_keys(*where, 50, Tile(queries=32, keys=32, warps=4, stages=2))
    assert seeing.tolist() == [[[0, 0, 64, 64], [0, 0, 64, 64]]]


def test_heads_that_go_together_divide_all_and_fit_the_cache() -> None:
    assert kernel._heads_together(32, 1024 * 128) == 32
    assert kernel._heads_together(24, 8192 * 128) == 6
    assert kernel._heads_together(7, 2**24) == 1


def test_problems_name_what_is_not_supported_and_who_does() -> None:
    assert problems(64, "float16", (10, 0)) == LACKING
    found = [each for each in problems(96, "float32", (8, 9)) if each not in LACKING]
    assert [re.split(r"[ =]", each)[0] for each in found] == ["head_dim", "dtype", "capability"]
    assert all("xla" in each for each in found)
    assert problems(64, "float16", (12, 0)) != LACKING  # too little shared memory


@needs_triton
def test_an_older_jax_triton_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"jax-triton": "0.3.1"}[name])
    (found,) = problems(64, "float16", (9, 0))
    assert "jax-triton 0.3.1" in found and "wants 0.4: pip install" in found


# ---- Compiled for an H200 and, to show that its units are used, for a B200.

LENGTH, HEADS, GROUPS = 4096, 8, 2


@pytest.fixture(scope="module", params=TILES)
def compiled(request: pytest.FixtureRequest) -> tuple[int, jax.stages.Compiled, list[Any]]:
    return request.param, *compiled_for("h200", request.param)


def compiled_for(chip: str, size: int) -> tuple[jax.stages.Compiled, list[Any]]:
    """The program of output and gradients on two devices, a gradient group each, and its kernels."""
    from jax_triton import triton_lib

    mesh = Mesh(np.array(topology.gpu_topology(chip, gpus_per_host=2)), ("data",), axis_types=(AxisType.Auto,))
    form, spec = Form(scale=size**-0.5), PartitionSpec()

    def output_and_gradients(q: Any, k: Any, v: Any, gradient: Any, spans: Spans) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(lambda q, k, v: attend(kernel, form, q, k, v, spans), q, k, v)
        return out, *backward(gradient)

    on_devices = jax.shard_map(output_and_gradients, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    by_group = jax.jit(jax.vmap(on_devices, spmd_axis_name="data"))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, 1, LENGTH, *shape), dtype, sharding=sharding)

    spans = Spans(array(dtype=jnp.int32), array(dtype=jnp.int32))
    q, k = array(HEADS, size), array(GROUPS, size)
    made = []
    compile_kernel = triton_lib.TritonFunction._compile_kernel

    def recorded(*arguments: Any) -> Any:
        made.append(compile_kernel(*arguments))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_lib.TritonFunction, "_compile_kernel", recorded)
        lowered = by_group.trace(q, k, k, q, spans).lower(lowering_platforms=("cuda",))
    return topology.compile(lowered), [result for *_, result in made]


@needs_triton
def test_nothing_as_large_as_the_scores_and_no_repeated_keys(
    compiled: tuple[int, jax.stages.Compiled, list[Any]],
) -> None:
    size, program, _ = compiled
    text = program.as_text()
    assert text is not None and text.count("custom_call_target") == 3
    assert not re.search("all-gather|all-reduce|all-to-all|permute|reduce-scatter", text)
    largest = max(math.prod(array.shape) for array in hlo.array_shapes(text))
    assert largest == LENGTH * HEADS * size  # q, which is smaller than one head's scores
    memory = program.memory_analysis()
    of_numbers = 2 * LENGTH * HEADS * 4  # log_sum and mean
    assert memory is not None and of_numbers <= memory.temp_size_in_bytes < 2 * of_numbers


@needs_triton
def test_kernels_fit_hopper_and_use_its_units(
    compiled: tuple[int, jax.stages.Compiled, list[Any]], tmp_path: Path
) -> None:
    *_, made = compiled
    assert sorted(each.name for each in made) == ["backward_keys", "backward_queries", "forward"]
    for each in made:
        assert each.shared_mem_bytes <= topology.CHIPS["h200"].shared_memory_bytes_per_block
        assert "wgmma.mma_async" in each.binary and "cp.async.bulk.tensor" in each.binary
        said = assembled(each, "sm_90a", tmp_path)
        assert "serialized" not in said  # of wgmma, which a lack of registers makes wait for each other
        (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
        assert int(spilled) <= 32


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("size", TILES)
def test_kernels_fit_blackwell_and_use_its_units(size: int, tmp_path: Path) -> None:
    _, made = compiled_for("b200", size)
    assert sorted(each.name for each in made) == ["backward_keys", "backward_queries", "forward"]
    for each in made:
        assert each.shared_mem_bytes <= topology.CHIPS["b200"].shared_memory_bytes_per_block
        assert "tcgen05.mma" in each.binary and "cp.async.bulk.tensor" in each.binary
        assembled(each, "sm_100a", tmp_path)


def assembled(kernel: Any, architecture: str, folder: Path) -> str:
    """What NVIDIA's assembler says of it."""
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
def test_a_gpus_output_and_gradients_are_the_references_and_always_the_same(
    gpu: jax.Device, size: int, dtype: str, softcap: float | None, where: Where
) -> None:
    if gpu.platform == "cpu":
        pytest.skip("Triton compiles for GPUs alone")
    lacking = problems(size, dtype, tuple(map(int, gpu.compute_capability.split("."))))
    if lacking:
        pytest.skip("; ".join(lacking))
    arrays = operands(700, 700, heads=8, groups=2, size=size, dtype=jnp.dtype(dtype))
    form = Form(scale=size**-0.5, softcap=softcap)
    compiled = jax.jit(functools.partial(run, form, None))
    found, again = (compiled(*arrays, where) for _ in range(2))
    assert_are(found, expected(form, *arrays, where), tolerance=1e-2 if dtype == "bfloat16" else 2e-3)
    for first, second in zip(found, again, strict=True):
        np.testing.assert_array_equal(first, second)
