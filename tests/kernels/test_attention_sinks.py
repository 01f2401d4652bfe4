"""Attention sinks with every implementation, against the float64 reference, which has them as a column of scores."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cudnn_emulator
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy
import triton_interpreter
from test_attention_triton import LACKING

from jaxopt_llm import kernels
from jaxopt_llm.kernels import attention_cudnn, attention_pallas, attention_triton, attention_xla
from jaxopt_llm.kernels.attention import attend
from jaxopt_llm.kernels.attention_types import AttentionParameters, KeyRanges, Tile, Tiles, make_document_ranges
from jaxopt_llm.kernels.attention_wrappers import AllToAll, CopiedHeads, Padded
from jaxopt_llm.kernels.ring import Ring, to_zigzag
from jaxopt_llm.parallel.activations import PerDevice

pytestmark = pytest.mark.core

LENGTH, HEADS, KV_HEADS, SIZE = 24, 4, 2, 8
SINKS = np.array([-1.0, 0.5, 2.0, 4.0], np.float32)  # from a small part of the softmax to most of it
SEGMENTS = toy.packed(rows=2, length=LENGTH).segment_ids
PLAIN = AttentionParameters(0.6, keys_after=0, segments=LENGTH)


def operands(dtype: str = "float32", size: int = SIZE, kv_heads: int = KV_HEADS) -> list[np.ndarray]:
    """Make q, k, v and the gradient of the output, [2, LENGTH, heads, size]."""
    random = np.random.default_rng(0)
    return [random.normal(size=(2, LENGTH, n, size)).astype(dtype) for n in (HEADS, kv_heads, kv_heads, HEADS)]


def expected(parameters: AttentionParameters, arrays: list[np.ndarray], window: int | None) -> list[np.ndarray]:
    """Return the output and the gradients of q, k, v and the sinks."""
    *wide, gradient = (x.astype(np.float64) for x in arrays)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    visible = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (distance >= 0) & (distance < (window or LENGTH))
    cap = parameters.softcap or 0.0
    out, backward = reference.attend(*wide, visible, parameters.scale, cap, SINKS.astype(np.float64))
    return [out, *backward(gradient)]


def run(
    implementation: Any, parameters: AttentionParameters, arrays: list[np.ndarray], key_ranges: KeyRanges
) -> list[jax.Array]:
    *inputs, gradient = arrays

    def both(key_ranges: KeyRanges, gradient: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
        def attended(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
            return attend(implementation, parameters, q, k, v, key_ranges, sinks)

        out, pull = jax.vjp(attended, *inputs)
        return [out, *pull(gradient)]

    return jax.jit(both)(key_ranges, gradient, *inputs, SINKS)


def assert_close(found: list[jax.Array], wanted: list[np.ndarray], tolerance: float = 2e-6) -> None:
    for name, got, want in zip(("out", "q", "k", "v", "sinks"), found, wanted, strict=True):
        assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want), name


def interpreted(kernel: Any, **settings: Any) -> Any:
    forward, backward = (functools.partial(each, **settings) for each in (kernel.forward, kernel.backward))
    return SimpleNamespace(reads_out=kernel.reads_out, skips_keys=kernel.skips_keys, forward=forward, backward=backward)


def make_pallas(monkeypatch: pytest.MonkeyPatch) -> Any:
    tile = Tile(8, 8, 4, 2)
    return interpreted(attention_pallas, blocks=Tiles(tile, tile, tile), interpret=True)


def make_cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    cudnn_emulator.emulate(monkeypatch)
    return attention_cudnn


def make_triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    if LACKING:
        pytest.skip("; ".join(LACKING))
    triton_interpreter.interpret(monkeypatch, kernels, "attention_triton_kernels")
    tile = Tile(16, 16, 4, 2)
    return interpreted(attention_triton, tiles=Tiles(tile, tile, tile))


Make = Callable[[pytest.MonkeyPatch], Any]
KERNELS: dict[str, tuple[Make, int]] = {  # and the head size
    "xla": (lambda monkeypatch: attention_xla, SIZE),
    "pallas": (make_pallas, SIZE),
    "cudnn": (make_cudnn, SIZE),
    "triton": (make_triton, 16),
    "padded heads": (lambda monkeypatch: Padded(attention_xla, 16), SIZE),
    "copied heads": (lambda monkeypatch: CopiedHeads(attention_xla, 2), SIZE),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (5, None), (None, 1.5)], ids=["documents", "window", "soft cap"]
)
def test_output_and_gradients_match_the_reference(
    name: str, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "cudnn" and softcap:
        pytest.skip("cudnn supports no soft cap")
    make, size = KERNELS[name]
    before = None if window is None else window - 1
    parameters = AttentionParameters(0.6, softcap, keys_before=before, keys_after=0, window=window, segments=LENGTH)
    arrays = operands("float16" if name in ("cudnn", "triton") else "float32", size)
    found = run(make(monkeypatch), parameters, arrays, make_document_ranges(SEGMENTS).limit_to_window(window))
    wanted = expected(parameters, arrays, window)
    assert_close(found, wanted, 2e-3 if arrays[0].dtype == np.float16 else 2e-6)
    assert toy.distance(wanted[0], attend(attention_xla, parameters, *arrays[:3], make_document_ranges(SEGMENTS))) > 0.1


@pytest.mark.parametrize("exchange", [Ring, AllToAll])
@pytest.mark.parametrize("kernel", ["xla", "pallas"])
def test_sinks_join_once_where_devices_divide_the_sequence_and_the_heads(
    exchange: Any, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the parts of the keys are merged, so that each row of the softmax has its sink once."""
    implementation = PerDevice(exchange(KERNELS[kernel][0](monkeypatch), "context"), toy.placement(context=2, tensor=2))
    arrays, rows = operands(kv_heads=4), jnp.arange(LENGTH)
    order = to_zigzag(rows[None], 2)[0] if exchange is Ring else rows
    key_ranges = KeyRanges(*(x[:, order] for x in make_document_ranges(SEGMENTS)))
    found = run(implementation, PLAIN, [x[:, order] for x in arrays], key_ranges)
    *by_token, sinks = expected(PLAIN, arrays, None)
    assert_close(found, [*(x[:, order] for x in by_token), sinks])


@pytest.mark.parametrize("name", KERNELS)
def test_a_query_that_sees_nothing_has_no_part_in_a_sink(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "cudnn":
        pytest.skip("its key ranges are those of documents, in which every query sees itself")
    make, size = KERNELS[name]
    arrays, ranges = operands("float16" if name == "triton" else "float32", size), make_document_ranges(SEGMENTS)
    some = np.arange(LENGTH) < LENGTH - 3
    arrays[3][:, ~some] = 0  # as no loss reads these rows
    blind = KeyRanges(np.where(some, ranges.first, LENGTH), np.asarray(ranges.last))
    implementation = make(monkeypatch)
    found, wanted = (run(implementation, PLAIN, arrays, each) for each in (blind, ranges))
    assert all(np.isfinite(each).all() for each in found) and not np.any(found[0][:, ~some])
    np.testing.assert_allclose(found[4], wanted[4], rtol=2e-3 if name == "triton" else 1e-5)
