"""Blockwise attention against the float64 reference, and memory and reads of its compiled program."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import reference
import toy

from jaxopt_llm.compiler import hlo
from jaxopt_llm.kernels import attention_xla as kernel
from jaxopt_llm.kernels.attention import attend, attention
from jaxopt_llm.kernels.attention_types import AttentionParameters, KeyRanges, make_document_ranges

pytestmark = pytest.mark.core

Arrays = dict[str, np.ndarray]


def operands(queries: int, keys: int, heads: int, kv_heads: int, head_dim: int = 4) -> tuple[np.ndarray, ...]:
    """Make q, k, v and the gradient of the output; batch 2."""
    random = np.random.default_rng(0)
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    return tuple(random.normal(size=(2, *size, head_dim)).astype(np.float32) for size in sizes)


def packed_rows(length: int) -> Arrays:
    batch = toy.packed(rows=2, length=length)
    assert (batch.segment_ids[:, -1] > 1).all()
    return {"segment_ids": batch.segment_ids}


def one_document(length: int) -> Arrays:
    return {"segment_ids": np.zeros((2, length), np.int32)}


def cached(length: int, first: int) -> Arrays:
    """Make queries in the slots of a cache from `first` on, which do not see its first three slots."""
    slots = np.broadcast_to(np.arange(first, length, dtype=np.int32), (2, length - first))
    return {"first": np.full_like(slots, 3), "last": slots}


def visible(window: int | None, where: Arrays) -> np.ndarray:
    """Compute the mask, bool [B, S, T], by definition."""
    if "segment_ids" in where:
        ids = where["segment_ids"]
        query, key = np.arange(ids.shape[1])[:, None], np.arange(ids.shape[1])
        return (ids[:, :, None] == ids[:, None]) & (key <= query) & (query - key < (window or np.inf))
    last, key = where["last"][..., None], np.arange(where["last"].max() + 1)
    return (key >= where["first"][..., None]) & (key <= last) & (last - key < (window or np.inf))


def output_and_gradients(
    window: int | None, compiler_options: dict[str, Any] | None = toy.QUICK_COMPILE, **score_settings: float
) -> Callable[..., Any]:
    def attended(q: jax.Array, k: jax.Array, v: jax.Array, where: Arrays) -> jax.Array:
        if "segment_ids" in where:
            return attention(
                q, k, v, window=window, segment_ids=where["segment_ids"], implementation="xla", **score_settings
            )
        parameters = AttentionParameters(**{"scale": q.shape[-1] ** -0.5} | score_settings)
        return attend(kernel, parameters, q, k, v, KeyRanges(**where).limit_to_window(window))

    def run(q: jax.Array, k: jax.Array, v: jax.Array, gradient: jax.Array, where: Arrays) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(lambda q, k, v: attended(q, k, v, where), q, k, v)
        return out, *backward(gradient)

    return jax.jit(run, compiler_options=compiler_options)


def expected(
    window: int | None,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    gradient: np.ndarray,
    where: Arrays,
    scale: float = 0.0,
    softcap: float = 0.0,
) -> tuple[np.ndarray, ...]:
    arrays = (x.astype(np.float64) for x in (q, k, v))
    out, backward = reference.attend(*arrays, visible(window, where), scale, softcap)
    return out, *backward(gradient.astype(np.float64))


@pytest.mark.parametrize(
    "block, window, heads, where",
    [
        pytest.param(512, None, 2, packed_rows(10), id="one block"),
        pytest.param(4, None, 4, packed_rows(10), id="blocks that do not divide the length, grouped heads"),
        pytest.param(4, 2, 4, packed_rows(10), id="window smaller than a block"),
        pytest.param(4, 6, 2, one_document(16), id="window larger than a block"),
        pytest.param(4, None, 4, cached(12, first=5), id="cache"),
        pytest.param(4, 3, 4, cached(12, first=5), id="cache and window"),
    ],
)
def test_output_and_gradients_match_the_reference(
    monkeypatch: pytest.MonkeyPatch, block: int, window: int | None, heads: int, where: Arrays
) -> None:
    monkeypatch.setattr(kernel, "QUERY_BLOCK", block)
    monkeypatch.setattr(kernel, "CAUSAL_ROWS", 1)
    _, queries, keys = visible(window, where).shape
    arrays = operands(queries, keys, heads, kv_heads=2)
    actual = output_and_gradients(window)(*arrays, where)
    for name, got, want in zip(("out", "q", "k", "v"), actual, expected(window, *arrays, where), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("window, where", [(None, packed_rows(10)), (6, one_document(16)), (3, cached(12, first=5))])
def test_scaled_and_capped_scores_match_the_reference(
    monkeypatch: pytest.MonkeyPatch, window: int | None, where: Arrays
) -> None:
    monkeypatch.setattr(kernel, "QUERY_BLOCK", 4)
    monkeypatch.setattr(kernel, "CAUSAL_ROWS", 1)
    _, queries, keys = visible(window, where).shape
    arrays, score_settings = operands(queries, keys, heads=4, kv_heads=2), {"scale": 0.7, "softcap": 1.2}
    actual = output_and_gradients(window, **score_settings)(*arrays, where)
    capped, uncapped = (expected(window, *arrays, where, **each) for each in (score_settings, {"scale": 0.7}))
    assert toy.distance(capped, uncapped) > 0.1
    for name, got, want in zip(("out", "q", "k", "v"), actual, capped, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6, err_msg=name)


def test_a_query_that_sees_nothing_gives_finite_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "QUERY_BLOCK", 4)
    where = cached(12, first=5)
    q, k, v, gradient = operands(7, 12, heads=4, kv_heads=2)
    gradient[1] = 0  # the gradient of a query that is padding
    nothing = where | {"first": where["first"] + np.array([[0], [20]], np.int32)}
    actual = output_and_gradients(None)(q, k, v, gradient, nothing)
    assert all(np.isfinite(array).all() for array in actual)
    assert not any(array[1].any() for array in actual)
    for got, want in zip(actual, expected(None, q, k, v, gradient, where), strict=True):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_key_ranges_of_documents(causal: bool) -> None:
    ids = np.array([[4, 4, 4, 7, 7, 1], [3, 3, 3, 3, 3, 3]], np.int32)
    seen = make_document_ranges(jnp.asarray(ids), causal).make_mask(jnp.arange(6))
    same = ids[:, :, None] == ids[:, None]
    np.testing.assert_array_equal(seen, np.tril(same) if causal else same)


def test_bidirectional_attention_within_a_document() -> None:
    where = packed_rows(10)
    q, k, v, _ = operands(10, 10, heads=4, kv_heads=2)
    ids = where["segment_ids"]
    want, _ = reference.attend(*(x.astype(np.float64) for x in (q, k, v)), ids[:, :, None] == ids[:, None])
    np.testing.assert_allclose(attention(q, k, v, causal=False, segment_ids=ids), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "window, causal, ids",
    [
        pytest.param(None, True, [0] * 12, id="a chunk"),
        pytest.param(3, True, [0] * 12, id="window"),
        pytest.param(4, True, [2] * 5 + [7] * 4 + [1] * 3, id="window, documents"),
        pytest.param(None, False, [2] * 5 + [7] * 4 + [1] * 3, id="documents both ways"),
    ],
)
def test_queries_at_positions_among_the_keys(
    monkeypatch: pytest.MonkeyPatch, window: int | None, causal: bool, ids: list[int]
) -> None:
    """Check different positions for each row, in any order. Positions -1 and 12 have no key, and see nothing."""
    monkeypatch.setattr(kernel, "QUERY_BLOCK", 2)
    monkeypatch.setattr(kernel, "CAUSAL_ROWS", 1)
    positions = np.array([[7, 8, 9, 10, 11], [3, -1, 0, 6, 12]], np.int32)
    without_key = (positions < 0) | (positions > 11)
    q, k, v, gradient = operands(5, 12, heads=4, kv_heads=2)
    key, document = np.arange(12), np.array(ids)
    behind = positions[..., None] - key
    seen = document[np.clip(positions, 0, 11)][..., None] == document
    if causal:
        seen &= (behind >= 0) & (behind < (window or 12))
    # The reference does not support a query that sees nothing: it sees all keys there, and the result is ignored.
    out, backward = reference.attend(*(x.astype(np.float64) for x in (q, k, v)), seen | without_key[..., None])
    hidden = without_key[..., None, None]
    wanted = np.where(hidden, 0, out), *backward(np.where(hidden, 0, gradient).astype(np.float64))

    def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(
            q, k, v, causal=causal, window=window, segment_ids=np.tile(document, (2, 1)), positions=positions
        )

    found, pull = jax.vjp(attended, q, k, v)
    for name, got, want in zip(("out", "q", "k", "v"), (found, *pull(gradient)), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6, err_msg=name)


def test_without_causal_mask_and_documents_any_number_of_queries_sees_all_keys() -> None:
    q, k, v, _ = operands(3, 7, heads=4, kv_heads=2)
    want, _ = reference.attend(*(x.astype(np.float64) for x in (q, k, v)), np.ones((2, 3, 7), bool))
    np.testing.assert_allclose(attention(q, k, v, causal=False), want, rtol=1e-5, atol=2e-6)


def test_values_of_another_size() -> None:
    q, k, v, _ = operands(6, 6, heads=4, kv_heads=2)
    wide = np.concatenate([v, 2 * v], axis=-1)
    out = attention(q, k, wide)
    np.testing.assert_allclose(out, np.concatenate([attention(q, k, each) for each in (v, 2 * v)], -1), rtol=1e-6)


Q, K = np.ones((2, 4, 6, 8), np.float32), np.ones((2, 4, 3, 8), np.float32)
IDS = np.zeros((2, 4), np.int32)


@pytest.mark.parametrize(
    "call, message",
    [
        ({"causal": False, "window": 3}, "window=3 with causal=False"),
        ({"window": 0}, "window=0: give at least 1"),
        ({"implementation": "cuda"}, "auto, xla, pallas, triton, cudnn"),
        ({"q": Q[0]}, "q has shape .4, 6, 8.: give .batch, sequence, heads, head_dim"),
        ({"q": Q[:, :, :4]}, "has 4 heads: give a multiple of the 3 heads of k and v"),
        ({"q": Q[:1]}, "k has shape .2, 4, 3, 8.: give it the batch size 1 and"),
        ({"q": Q[..., :4]}, "k has shape .2, 4, 3, 8.: .* the head size 4 of q"),
        ({"k": K.astype(jnp.bfloat16)}, "k is bfloat16 and q is float32: give q, k and v in one dtype"),
        ({"v": K.astype(np.float16)}, "v is float16 and q is float32"),
        ({"v": K[:, :3]}, "v has shape .2, 3, 3, 8.: give it the batch size, the keys and the heads of k .2, 4, 3, 8."),
        ({"q": Q[:, :1]}, "1 queries and 4 keys: give positions, int .2, 1.*or causal=False and segment_ids=None"),
        ({"q": Q[:, :1], "causal": False, "segment_ids": IDS}, "1 queries and 4 keys: give positions"),
        ({"segment_ids": IDS[:, :3]}, "segment_ids is int32.2, 3.: give integers .2, 4."),
        ({"segment_ids": IDS.astype(np.float32)}, "segment_ids is float32.2, 4.: give integers .2, 4."),
        ({"q": Q[:, :1], "positions": IDS}, "positions is int32.2, 4.: give integers .2, 1."),
        ({"scale": 0.0}, "scale=0.0: give a finite number above 0"),
        ({"scale": math.nan}, "scale=nan"),
        ({"softcap": -1.0}, "softcap=-1.0: give a finite number above 0"),
    ],
)
def test_invalid_calls_are_rejected(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**{"q": Q, "k": K, "v": K} | call)


def test_settings_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        attention(Q, K, K, True)  # type: ignore[misc]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(
    "dtype, precision, tolerance",
    [("float32", "highest", 1e-5), ("float32", "default", 5e-3), ("bfloat16", None, 1e-2)],
)
def test_output_and_gradients_on_a_gpu_match_the_reference(
    gpu: jax.Device, window: int | None, dtype: str, precision: str | None, tolerance: float
) -> None:
    """Compare each array as a whole, relative to its norm, for two blocks of grouped heads.

    TF32 is JAX's default for float32.
    """
    where = packed_rows(700)
    arrays = tuple(x.astype(jnp.dtype(dtype)) for x in operands(700, 700, heads=8, kv_heads=2, head_dim=64))
    with jax.default_matmul_precision(precision):
        actual = output_and_gradients(window, compiler_options=None)(*arrays, where)
    for name, got, want in zip(("out", "q", "k", "v"), actual, expected(window, *arrays, where), strict=True):
        assert got.devices() == {gpu}
        assert toy.distance(got, want) < tolerance, name


# ---- Compiled program of 6 blocks of 8 queries.

LENGTH, BLOCK, WINDOW = 48, 8, 5


def compiled_text(window: int | None) -> str:
    arrays = operands(LENGTH, LENGTH, heads=4, kv_heads=2)
    text = output_and_gradients(window).lower(*arrays, one_document(LENGTH)).compile().as_text()
    assert text is not None
    return text


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "QUERY_BLOCK", BLOCK)
        patch.setattr(kernel, "CAUSAL_ROWS", 1)
        return {"global": compiled_text(None), "sliding": compiled_text(WINDOW)}


def test_no_array_has_a_score_for_every_query_and_key(texts: dict[str, str]) -> None:
    largest = max(math.prod(array.shape) for array in programs.list_array_shapes(texts["global"]))
    assert largest < 2 * LENGTH * LENGTH  # a batch of 2, one head


def test_keys_that_a_block_cannot_see_are_not_read(texts: dict[str, str]) -> None:
    # Two matmuls forward and five backward; batch 2, 4 heads of size 4.
    flops_of_all_scores = 7 * 2 * (2 * 4 * LENGTH * LENGTH * 4)
    assert hlo.count_dot_flops(texts["global"]) == flops_of_all_scores * 5 / 8
    assert hlo.count_dot_flops(texts["sliding"]) == flops_of_all_scores * (BLOCK + WINDOW - 1) / LENGTH
