"""Check of an attention kernel before it is used, with kernels that are wrong in one thing each."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.kernels import attention, attention_check, attention_pallas, attention_xla
from jaxopt_llm.kernels.attention_auto import AttentionCall
from jaxopt_llm.kernels.attention_check import check_attention, check_ring
from jaxopt_llm.kernels.attention_types import KeyRanges

pytestmark = pytest.mark.core

CALL = AttentionCall(16, "bfloat16", 8192, segments=17, window=64)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "checks.json"
    monkeypatch.setattr(attention_check, "_verdicts_file", lambda: file)
    return file


class Kernel:
    """XLA's operations, with some of the calls changed."""

    reads_out = False
    skips_keys = False

    def __init__(
        self, forward: Callable[..., Any] = attention_xla.forward, backward: Any = attention_xla.backward
    ) -> None:
        self.calls = 0
        self._forward, self.backward = forward, backward

    def forward(self, *of: Any) -> Any:
        self.calls += 1
        return self._forward(*of)


def without_documents(parameters: Any, q: jax.Array, k: jax.Array, v: jax.Array, ranges: KeyRanges) -> Any:
    """Forget the documents, but not the window."""
    first = jnp.maximum(0, ranges.last - parameters.keys_before)
    return attention_xla.forward(parameters, q, k, v, KeyRanges(first, ranges.last))


def other_group(parameters: Any, q: jax.Array, k: jax.Array, v: jax.Array, ranges: KeyRanges) -> Any:
    return attention_xla.forward(parameters, q, k[:, :, ::-1], v, ranges)


def unsummed(parameters: Any, residuals: Any, gradient: jax.Array) -> Any:
    """Forget one term of the gradients of queries and keys."""
    return attention_xla.backward(parameters, residuals._replace(delta=0 * residuals.delta), gradient)


def not_a_number(*of: Any) -> Any:
    d_q, d_k, d_v = attention_xla.backward(*of)
    return d_q, d_k, d_v.at[0, 0].set(jnp.nan)


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        (Kernel(), []),
        (Kernel(without_documents), ["the output"]),
        (Kernel(other_group), ["the output"]),
        (Kernel(backward=unsummed), ["d_q", "d_k"]),
        (Kernel(backward=not_a_number), ["d_v"]),
    ],
    ids=["right", "documents", "groups", "delta", "NaN"],
)
def test_a_wrong_kernel_is_found(
    kernel: Kernel, wrong: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "pallas", kernel)
    failure = check_attention("pallas", CALL, 2)
    assert bool(failure) == bool(wrong) and all(each in failure for each in wrong), failure
    assert "\n" not in failure
    assert check_attention("pallas", CALL, 2) == failure and kernel.calls == 1, "the verdict is kept"
    check_attention("pallas", AttentionCall(16, "float16", 8192, segments=17, window=64), 2)
    assert kernel.calls == 2 and len(json.loads(cache.read_text())) == 2


def without_lengths(parameters: Any, q: jax.Array, k: jax.Array, v: jax.Array, ranges: KeyRanges) -> Any:
    """Read the keys of another document in rectangles."""
    first = jnp.where(parameters.rectangles & (ranges.first < k.shape[1]), 0, ranges.first)
    return attention_xla.forward(parameters, q, k, v, KeyRanges(first, ranges.last))


def own_statistics(parameters: Any, residuals: Any, gradient: jax.Array) -> Any:
    """Use the statistics of the keys of the call in place of those that are given."""
    _, log_sum = attention_xla.forward(parameters, *residuals[:4])
    return attention_xla.backward(parameters, residuals._replace(log_sum=log_sum), gradient)


@pytest.mark.parametrize("segments", [1, 17])
@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        (Kernel(), []),
        (Kernel(without_lengths), ["the output of another device's part"]),
        (Kernel(backward=own_statistics), [f"d_{x} of another device's part" for x in "qkv"]),
    ],
    ids=["right", "lengths", "statistics"],
)
@pytest.mark.usefixtures("cache")
def test_a_kernel_that_is_wrong_only_in_a_ring_is_found(
    kernel: Kernel, wrong: list[str], segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "cudnn", kernel)
    whole, part = (AttentionCall(16, "bfloat16", 8192, segments=segments, parts=parts) for parts in (1, 8))
    assert check_attention("cudnn", whole, 2) == ""
    failure = check_attention("cudnn", part, 2)
    if segments == 1 and kernel._forward is without_lengths:
        wrong = []  # without documents there are no lengths
    assert bool(failure) == bool(wrong) and all(each in failure for each in wrong), failure


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [1, 17])
def test_cudnn_is_right_in_a_ring(gpu: jax.Device, segments: int) -> None:
    call = AttentionCall(128, "bfloat16", 16_384, segments=segments, parts=8)
    if attention.find_unsupported(call, attention.get_compute_capability(gpu))["cudnn"]:
        pytest.skip("cuDNN does not support this here")
    assert attention_check._compare("cudnn", call, 4) == ""


def from_the_first_slot(parameters: Any, q: jax.Array, k: jax.Array, v: jax.Array, ranges: KeyRanges) -> Any:
    """Take a ring for an array that begins with the first key."""
    parameters = dataclasses.replace(parameters, ring=False)
    return attention_xla.forward(parameters, q, k, v, KeyRanges(ranges.first, ranges.last))


def wrong_with_many_rows(parameters: Any, q: jax.Array, *of: Any) -> Any:
    out, log_sum = attention_xla.forward(parameters, q, *of)
    return out * (1.0 if q.shape[0] < 100 else 1.1), log_sum


def without_softcap(parameters: Any, *of: Any) -> Any:
    return attention_xla.forward(dataclasses.replace(parameters, softcap=None), *of)


@pytest.mark.parametrize(
    ("forward", "wrong"),
    [
        (attention_xla.forward, []),
        (other_group, ["of 4 rows", "of 128 rows"]),
        (from_the_first_slot, ["of 4 rows", "of 128 rows"]),
        (wrong_with_many_rows, ["of 128 rows"]),
        (without_softcap, ["of 4 rows", "of 128 rows"]),
    ],
    ids=["right", "groups", "ring", "many rows", "softcap"],
)
def test_a_wrong_kernel_over_a_ring_is_found(
    forward: Any, wrong: list[str], cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, v = (jax.ShapeDtypeStruct((3, rows, heads, 16), "bfloat16") for rows, heads in ((1, 8), (64, 2)))
    kernel = Kernel(forward)
    for _ in range(2):  # it is checked, and warned of, once
        assert check_ring(kernel, 1.5, q, v) is not bool(wrong)
    assert caplog.text.count("is wrong on this GPU") == bool(wrong)
    assert kernel.calls == 2, "with few rows and with many"
    assert all(each in caplog.text for each in wrong), caplog.text
    assert check_ring(Kernel(without_softcap), 1.5, q, v) is not bool(wrong), "the verdict is kept"
    assert len(json.loads(cache.read_text())) == 1
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    if wrong:
        with pytest.raises(InputError, match="run it in one process"):
            check_ring(Kernel(), 1.5, q, v)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_the_kernel_over_a_ring_is_right(gpu: jax.Device, softcap: float | None) -> None:
    call = AttentionCall(128, "bfloat16", 320, 1, None, softcap)
    assert attention_check._compare_over_rings(attention_pallas, call, 4) == ""


def test_a_kernel_that_cannot_run_is_tried_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError("no such plan\nat all")

    monkeypatch.setitem(attention.IMPLEMENTATIONS, "pallas", Kernel(refuse))
    assert check_attention("pallas", CALL, 2).startswith("fails on this GPU (no such plan")
    monkeypatch.setitem(attention.IMPLEMENTATIONS, "pallas", Kernel())
    assert check_attention("pallas", CALL, 2) == ""


def test_a_verdict_is_of_one_gpu_and_of_one_version_of_its_libraries() -> None:
    def key(kind: str, versions: str) -> str:
        device = SimpleNamespace(device_kind=kind, client=SimpleNamespace(platform_version=versions))
        return attention_check._make_key("cudnn", CALL, 4, device)

    assert len({key("H100", "cuda 12"), key("H200", "cuda 12"), key("H200", "cuda 13")}) == 3


def test_the_verdicts_are_beside_the_compiled_programs(tmp_path: Path) -> None:
    old = {name: jax.config.values[name] for name in ("jax_compilation_cache_dir", "jax_enable_compilation_cache")}
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_enable_compilation_cache", True)
        assert attention_check._verdicts_file() == tmp_path / attention_check.FILE
        jax.config.update("jax_enable_compilation_cache", False)
        assert attention_check._verdicts_file() is None
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
