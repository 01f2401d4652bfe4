"""Attention by cuDNN: offsets, masks and documents by an emulation of the primitives, the settings of the lowered
calls, and on a GPU the results.

Only a GPU can show whether cuDNN follows these settings, and how fast it is.
"""

import functools
import inspect
import json
import re
from typing import Any

import cudnn_emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy
from jax.sharding import SingleDeviceSharding

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.buffers import find_peak
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.kernels import attention as kernels
from jaxopt_llm.kernels import attention_cudnn, cudnn_primitives
from jaxopt_llm.kernels.attention import attention
from jaxopt_llm.kernels.attention_auto import AttentionCall
from jaxopt_llm.kernels.attention_types import AttentionParameters, AttentionResiduals, KeyRanges, make_document_ranges
from jaxopt_llm.model.self_attention import count_chunks

pytestmark = pytest.mark.core

LENGTH = 256
HOPPER = (9, 0)


def forward_and_backward(call: dict[str, Any], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Compute the output and the gradients. arrays: q, k, v and the gradient of the output."""
    out, pull = jax.vjp(functools.partial(attention, implementation="cudnn", **call), *arrays[:3])
    return out, *pull(arrays[3])


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "get_compute_capability", lambda device: HOPPER)


# ---- What the calls compute.

# Rows of several documents, of one, with padding at the end, and of as many documents as there may be.
DOCUMENTS = np.array(
    [[1] * 3 + [2] * 1 + [3] * 8, [1] * 12, [4] * 5 + [5] * 2 + [0] * 5, [1] * 2 + [2] * 4 + [3] * 3 + [0] * 3],
    np.int32,
)
MOST = 4


def operands(rows: int, dtype: str = "float16", heads: int = 4, kv_heads: int = 2, size: int = 8) -> list[np.ndarray]:
    """Make q, k, v and the gradient of the output, [rows, 12, heads, size]."""
    random = np.random.default_rng(0)
    return [random.normal(size=(rows, 12, n, size)).astype(dtype) for n in (heads, kv_heads, kv_heads, heads)]


def visible(call: dict[str, Any], rows: int) -> np.ndarray:
    """Compute the mask by definition, bool [B, S, T]."""
    ids = call.get("segment_ids", np.zeros((rows, 12), np.int32))
    distance = np.arange(12)[:, None] - np.arange(12)
    seen = (distance >= 0) & (distance < (call.get("window") or 12)) if call.get("causal", True) else distance < 12
    return (ids[:, :, None] == ids[:, None]) & seen


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param({}, id="causal"),
        pytest.param({"window": 3}, id="window"),
        pytest.param({"window": 1}, id="own key only"),
        pytest.param({"causal": False}, id="both ways"),
        pytest.param({"segment_ids": DOCUMENTS, "max_segments": MOST}, id="documents"),
        pytest.param({"segment_ids": DOCUMENTS, "max_segments": 7}, id="fewer documents than there may be"),
        pytest.param({"segment_ids": DOCUMENTS, "max_segments": MOST, "window": 3}, id="documents and window"),
        pytest.param({"segment_ids": DOCUMENTS, "max_segments": MOST, "window": 2}, id="smallest window"),
        pytest.param({"segment_ids": DOCUMENTS, "max_segments": MOST, "causal": False}, id="documents both ways"),
    ],
)
def test_output_and_gradients_match_the_reference(monkeypatch: pytest.MonkeyPatch, call: dict[str, Any]) -> None:
    directions = cudnn_emulator.emulate(monkeypatch)
    arrays = operands(4)
    found = jax.jit(functools.partial(forward_and_backward, call))(*arrays)
    assert directions == ["forward", "backward"]
    *wide, gradient = (x.astype(np.float64) for x in arrays)
    out, pull = reference.attend(*wide, visible(call, 4))
    for name, got, want in zip(("out", "q", "k", "v"), found, (out, *pull(gradient)), strict=True):
        assert got.dtype == np.float16
        np.testing.assert_allclose(got, want, rtol=4e-3, atol=4e-3, err_msg=name)


@pytest.mark.usefixtures("hopper")
def test_rows_of_one_document_are_hidden_from_its_padding_by_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One segment is called without lengths, though the ids differ: only the padding itself sees more."""
    cudnn_emulator.emulate(monkeypatch)
    ids = np.array([[1] * 9 + [0] * 3], np.int32)
    *arrays, gradient = operands(1)
    gradient[:, 9:] = 0  # as the loss does not count padding
    found = forward_and_backward({"segment_ids": ids, "max_segments": 1}, *arrays, gradient)
    out, pull = reference.attend(*(x.astype(np.float64) for x in arrays), visible({"segment_ids": ids}, 1))
    np.testing.assert_allclose(found[0][:, :9], out[:, :9], rtol=4e-3, atol=4e-3)
    for got, want in zip(found[1:], pull(gradient.astype(np.float64)), strict=True):
        np.testing.assert_allclose(got, want, rtol=4e-3, atol=4e-3)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("most", [None, MOST], ids=["plain", "documents"])
def test_a_mapped_axis_becomes_rows(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    cudnn_emulator.emulate(monkeypatch)
    arrays = operands(4)

    def run(ids: Any, *arrays: Any) -> tuple[jax.Array, ...]:
        call = {"segment_ids": ids, "max_segments": most} if most else {}
        return forward_and_backward(call, *arrays)

    whole = run(DOCUMENTS, *arrays)
    split = [x.reshape(2, 2, *x.shape[1:]) for x in (DOCUMENTS, *arrays)]
    for got, want in zip(jax.vmap(run)(*split), whole, strict=True):
        np.testing.assert_array_equal(got.reshape(want.shape), want)


@pytest.mark.usefixtures("hopper")
def test_too_many_segments_do_not_train_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn_emulator.emulate(monkeypatch)
    monkeypatch.setattr(
        cudnn_emulator, "_backward", lambda operands, options: [operands[10].mean() + operands[i] for i in range(3)]
    )
    ids = np.tile(np.arange(12, dtype=np.int32), (4, 1))
    _, *gradients = forward_and_backward({"segment_ids": ids, "max_segments": MOST}, *operands(4))
    assert all(np.isnan(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_chunks_are_segments(chunk: int) -> None:
    """Padding is cut, too, whatever its positions are."""
    length = DOCUMENTS.shape[1]
    ranges = make_document_ranges(jnp.asarray(DOCUMENTS)).limit_to_chunk(chunk)
    expected = []
    for row, ids in enumerate(DOCUMENTS):
        for begin in range(length):
            same = int(np.argmax(ids == ids[begin]))
            if (begin - same) % chunk == 0:
                expected.append(row * length + begin)
    most = count_chunks(MOST, chunk, length)
    starts, _ = attention_cudnn.find_segments(ranges.first, most)
    assert [start for start in starts.tolist() if start < DOCUMENTS.size] == expected
    assert len(expected) <= most * len(DOCUMENTS)


def test_segments_of_a_batch() -> None:
    ranges = make_document_ranges(jnp.asarray(DOCUMENTS)).limit_to_window(2)
    starts, lengths = attention_cudnn.find_segments(ranges.first, MOST)
    unused = 16 - 11
    assert starts.tolist() == [0, 3, 4, 12, 24, 29, 31, 36, 38, 42, 45] + [48] * unused
    assert lengths.tolist() == [3, 1, 8, 12, 5, 2, 5, 2, 4, 3, 3] + [0] * unused


# ---- The calls.


@pytest.mark.parametrize("names", [("forward", ("query", "is_training")), ("backward", ("query", "grad_output"))])
def test_the_private_names_exist_with_these_arguments(names: tuple[str, tuple[str, ...]]) -> None:
    """In every supported jax: this module is the only one to change if a new one renames them."""
    direction, arguments = names
    primitive = getattr(cudnn_primitives, direction.upper())
    private = cudnn_primitives.private
    assert primitive.multiple_results
    abstract = getattr(private, f"_dot_product_attention_{direction[:1]}wd_abstract")
    parameters = inspect.signature(abstract).parameters
    assert set(arguments) <= set(parameters)
    mask = cudnn_primitives.Mask(True, None, None)
    assert set(cudnn_primitives._options(1.0, mask)) <= set(parameters)
    assert {"NO_MASK", "CAUSAL", "PADDING", "PADDING_CAUSAL"} <= {each.name for each in private.MaskType}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "call, mask, window, most",
    [
        ({}, "CAUSAL", 0, 1),
        ({"window": 64}, "CAUSAL", 64, 1),
        ({"causal": False}, "NO_MASK", 0, 1),
        ({"max_segments": 1}, "CAUSAL", 0, 1),
        ({"max_segments": 17}, "PADDING_CAUSAL", 0, 17),
        ({"max_segments": 17, "window": 64}, "PADDING_CAUSAL", 64, 17),
    ],
    ids=["causal", "window", "both ways", "one document", "documents", "documents and window"],
)
def test_settings_of_the_calls(call: dict[str, Any], mask: str, window: int, most: int) -> None:
    q, k = (jax.ShapeDtypeStruct((2, LENGTH, heads, 64), jnp.bfloat16) for heads in (8, 2))
    ids = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)

    def run(ids: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        documents = {"segment_ids": ids} if "max_segments" in call else {}
        return forward_and_backward({"scale": 0.3, **call, **documents}, *arrays)

    text = jax.jit(run).trace(ids, q, k, k, q).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"@__cudnn\$(\w+)\((.*?)\) \{.*?backend_config = \"(.*?)\".*?: \((.*?)\) ->", text)
    assert [name for name, *_ in calls] == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    for _, _, encoded, types in calls:
        settings = json.loads(encoded.replace(r"\22", '"'))["cudnn_fmha_backend_config"]
        assert (settings["mask_type"], settings["sliding_window_length"], settings["fmha_scale"]) == (mask, window, 0.3)
        assert settings["max_seg_per_batch"] == most
        # Keys and values are not repeated for the query heads.
        assert types.split(", ")[:3] == [f"tensor<2x{LENGTH}x{heads}x64xbf16>" for heads in (8, 2, 2)]
        if most > 1:
            assert types.split(", ")[-4:] == [f"tensor<2x{n}xi32>" for n in (most, most, most + 1, most + 1)]
    assert f"{LENGTH}x{LENGTH}" not in text


@pytest.mark.parametrize(("most", "mask", "lengths"), [(1, "NO_MASK", 0), (17, "PADDING", 2)], ids=["one", "documents"])
def test_settings_of_the_calls_for_another_part_of_a_ring(most: int, mask: str, lengths: int) -> None:
    """Neither has offsets. The statistics of the backward are an operand, in the shape of those of the forward."""
    q, k = (jax.ShapeDtypeStruct((4, LENGTH, heads, 64), jnp.bfloat16) for heads in (8, 2))
    row = jax.ShapeDtypeStruct((4, LENGTH), jnp.int32)
    statistics = jax.ShapeDtypeStruct((4, 8, LENGTH), jnp.float32)
    parameters = AttentionParameters(0.3, segments=most, rectangles=True)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, log_sum: jax.Array, ranges: KeyRanges) -> tuple[Any, ...]:
        out, own = attention_cudnn.forward(parameters, q, k, v, ranges)
        residuals = AttentionResiduals(q, k, v, ranges, log_sum, out=out)
        return own, attention_cudnn.backward(parameters, residuals, out)

    traced = jax.jit(run).trace(q, k, k, statistics, KeyRanges(row, row))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"@__cudnn\$(\w+)\(.*?\) \{.*?backend_config = \"(.*?)\".*?: \((.*?)\) ->", text)
    assert [name for name, *_ in calls] == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    whole = [f"tensor<4x{LENGTH}x{heads}x64xbf16>" for heads in (8, 2, 2)]
    of_backward = [f"tensor<4x8x{LENGTH}xf32>", whole[0], whole[0]]
    for (_, encoded, types), others in zip(calls, ([], of_backward), strict=True):
        settings = json.loads(encoded.replace(r"\22", '"'))["cudnn_fmha_backend_config"]
        found = settings["mask_type"], settings["sliding_window_length"], settings["max_seg_per_batch"]
        assert found == (mask, 0, 1)
        assert types.split(", ") == [*whole, *others, *["tensor<4xi32>"] * lengths]


def test_offsets_that_do_not_fit_32_bits_are_rejected() -> None:
    q = jax.ShapeDtypeStruct((128, 8192, 32, 64), jnp.bfloat16)
    segments = cudnn_primitives.Segments(*[jax.ShapeDtypeStruct((128 * 4,), jnp.int32)] * 2)
    run = functools.partial(cudnn_primitives.forward, 1.0)
    with pytest.raises(InputError, match="32, 64.*int32; set a larger --training.accumulation"):
        jax.eval_shape(lambda segments, *of: run(cudnn_primitives.Mask(True, None, segments), *of), segments, q, q, q)


def test_the_workspace_is_the_one_that_cudnn_asks_for_on_a_gpu() -> None:
    """Compare with the buffers of programs that were compiled on an H200 for cuDNN 9.19."""
    assert attention_cudnn.count_workspace(17, 8192, 32, 128) == pytest.approx(4_581_233_408, rel=1e-5)
    assert attention_cudnn.count_workspace(8 * 17, 512, 8, 64) == pytest.approx(287_476_480, rel=2e-4)


@pytest.mark.parametrize("most", [1, 5])
def test_memory_includes_a_workspace_that_a_program_compiled_without_a_gpu_lacks(most: int) -> None:
    device = SingleDeviceSharding(topology.gpu_topology("h200", gpus_per_host=1)[0])
    shapes = [(2, 256, heads, 64) for heads in (4, 2, 2, 4)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=device) for shape in shapes]
    parameters = AttentionParameters(64**-0.5, keys_after=0, segments=most)

    def step(q: jax.Array, k: jax.Array, v: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
        ranges = make_document_ranges(jnp.zeros(q.shape[:2], jnp.int32))
        out, pull = jax.vjp(lambda q, k, v: kernels.attend(attention_cudnn, parameters, q, k, v, ranges), q, k, v)
        return out, *pull(gradient)

    peak = find_peak(topology.lower_without_gpu(jax.jit(step), *arrays))
    workspace = attention_cudnn.count_workspace(2 * most, 256, 4, 64)
    (found,) = [each.bytes for each in peak.temporaries if each.dtype == "u8" and each.bytes]
    assert found == workspace
    missing = peak.memory.temporaries - hlo.read_memory(peak.compiled).temporaries
    assert missing == pytest.approx(workspace, rel=0.01)  # the other temporaries of that moment are small


def test_a_workspace_counts_only_where_the_peak_is() -> None:
    """Before the attention is a moment that holds more than its workspace."""
    device = SingleDeviceSharding(topology.gpu_topology("h200", gpus_per_host=1)[0])
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16, sharding=device)
    parameters = AttentionParameters(64**-0.5, keys_after=0, segments=1)

    def step(x: jax.Array) -> jax.Array:
        copies = jnp.arange(64, dtype=x.dtype).reshape(64, 1, 1, 1, 1)
        large = jnp.sort(x * copies)
        ranges = make_document_ranges(jnp.zeros(x.shape[:2], jnp.int32))
        y = large.sum(0)
        out, pull = jax.vjp(lambda q: kernels.attend(attention_cudnn, parameters, q, y, y, ranges), x)
        return pull(out)[0]

    peak = find_peak(topology.lower_without_gpu(jax.jit(step), x))
    without = hlo.read_memory(peak.compiled).temporaries
    assert hlo.list_missing_workspaces(peak.compiled.as_text())
    assert without <= peak.memory.temporaries < without + attention_cudnn.count_workspace(1, 256, 2, 64)


def test_unsupported_calls() -> None:
    assert not attention_cudnn.problems(256, jnp.bfloat16, HOPPER)
    assert not attention_cudnn.problems(72, jnp.float16, (8, 0))
    (head_dim,) = attention_cudnn.problems(256, jnp.bfloat16, (8, 9))
    assert "head_dim=256" in head_dim and "up to 128" in head_dim
    (head_dim, dtype, capability) = attention_cudnn.problems(100, jnp.float32, (7, 5))
    assert "head_dim=100" in head_dim and "float32" in dtype and "(7, 5)" in capability


@pytest.mark.parametrize(
    "call, capability, problem",
    [
        ({"segments": 1}, (8, 0), ""),
        ({"segments": 1, "window": 1}, HOPPER, ""),
        ({"segments": 16}, HOPPER, ""),
        ({"segments": 16}, (8, 9), "Hopper"),
        ({"segments": None}, HOPPER, "any number of documents"),
        ({"segments": 16, "window": 1}, HOPPER, "window=1"),
        ({"segments": 1, "softcap": 50.0}, HOPPER, "softcap=50"),
        ({"segments": 1, "positions": True}, HOPPER, "positions"),
        ({"segments": 16, "parts": 8}, HOPPER, ""),
        ({"segments": 1, "parts": 8, "window": 64}, HOPPER, "ring"),
    ],
)
def test_unsupported_masks(call: dict[str, Any], capability: tuple[int, int], problem: str) -> None:
    found = attention_cudnn.call_problems(AttentionCall(64, "bfloat16", LENGTH, **call), capability)
    assert len(found) == bool(problem) and problem in "".join(found)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "call",
    [{}, {"window": 300}, {"causal": False}, {"max_segments": 8}, {"max_segments": 8, "window": 100}],
    ids=["causal", "window", "both ways", "documents", "documents and window"],
)
@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-3), ("bfloat16", 1e-2)])
def test_output_and_gradients_on_a_gpu_match_the_reference(
    gpu: jax.Device, dtype: str, tolerance: float, call: dict[str, Any], head_dim: int
) -> None:
    """Compare each array as a whole, relative to its norm, with grouped heads and a length that no block divides."""
    capability = kernels.get_compute_capability(gpu)
    described = AttentionCall(head_dim, dtype, 700, call.get("max_segments", 1), call.get("window"))
    if kernels.find_unsupported(described, capability)["cudnn"]:
        pytest.skip("cuDNN does not support this here")
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(2, 700, heads, head_dim)).astype(jnp.dtype(dtype)) for heads in (4, 2, 2, 4)]
    ids = np.stack([np.repeat(np.arange(5), [1, 99, 300, 170, 130]), np.repeat(np.arange(2), [450, 250])])
    documents = {"segment_ids": ids.astype(np.int32)} if "max_segments" in call else {}
    found = jax.jit(functools.partial(forward_and_backward, call | documents))(*arrays)
    row = np.arange(700)
    distance = row[:, None] - row
    seen = (distance >= 0) & (distance < call.get("window", np.inf)) if call.get("causal", True) else distance < 700
    same = ids[:, :, None] == ids[:, None] if documents else np.ones((2, 700, 700), bool)
    *wide, gradient = (x.astype(np.float64) for x in arrays)
    out, backward = reference.attend(*wide, same & seen, head_dim**-0.5)
    for name, got, want in zip(("out", "q", "k", "v"), found, (out, *backward(gradient)), strict=True):
        assert got.devices() == {gpu}
        assert toy.distance(got, want) < tolerance, name
