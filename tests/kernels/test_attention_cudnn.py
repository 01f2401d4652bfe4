"""Attention by cuDNN: the settings of the lowered calls, and on a GPU the results.

Only a GPU can show whether cuDNN follows these settings, and how fast it is.
"""

import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy
from jax._src.cudnn import fused_attention_stablehlo

from jaxopt_llm.kernels import attention as kernels
from jaxopt_llm.kernels import attention_cudnn
from jaxopt_llm.kernels.attention import attention

pytestmark = pytest.mark.core

LENGTH = 256


def forward_and_backward(call: dict[str, Any], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Compute the output and the gradients. arrays: q, k, v and the gradient of the output."""
    out, pull = jax.vjp(functools.partial(attention, implementation="cudnn", **call), *arrays[:3])
    return out, *pull(arrays[3])


@pytest.mark.parametrize(
    "call, mask, window",
    [
        ({}, "CAUSAL", 0),
        ({"window": 64}, "CAUSAL", 64),
        ({"window": 1}, "CAUSAL", 1),
        ({"causal": False}, "NO_MASK", 0),
    ],
    ids=["causal", "window", "own key only", "bidirectional"],
)
def test_settings_of_the_calls(monkeypatch: pytest.MonkeyPatch, call: dict[str, Any], mask: str, window: int) -> None:
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_000)  # lowering does not need it
    monkeypatch.setattr(kernels, "get_compute_capability", lambda device: (9, 0))
    q, k = (jax.ShapeDtypeStruct((2, LENGTH, heads, 64), jnp.bfloat16) for heads in (8, 2))
    run = jax.jit(functools.partial(forward_and_backward, {"scale": 0.3, **call}))
    text = run.trace(q, k, k, q).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"@__cudnn\$(\w+)\((.*?)\) \{.*?backend_config = \"(.*?)\".*?: \((.*?)\) ->", text)
    assert [name for name, *_ in calls] == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    for _, _, encoded, operands in calls:
        settings = json.loads(encoded.replace(r"\22", '"'))["cudnn_fmha_backend_config"]
        assert (settings["mask_type"], settings["sliding_window_length"], settings["fmha_scale"]) == (mask, window, 0.3)
        # Keys and values are not repeated for the query heads.
        assert operands.split(", ")[:3] == [f"tensor<2x{LENGTH}x{heads}x64xbf16>" for heads in (8, 2, 2)]
    assert f"{LENGTH}x{LENGTH}" not in text


def test_unsupported_calls() -> None:
    assert not attention_cudnn.problems(256, jnp.bfloat16, (9, 0))
    assert not attention_cudnn.problems(72, jnp.float16, (8, 0))
    (head_dim,) = attention_cudnn.problems(256, jnp.bfloat16, (8, 9))
    assert "head_dim=256" in head_dim and "up to 128" in head_dim
    (head_dim, dtype, capability) = attention_cudnn.problems(100, jnp.float32, (7, 5))
    assert "head_dim=100" in head_dim and "float32" in dtype and "(7, 5)" in capability


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("call", [{}, {"window": 300}, {"causal": False}], ids=["causal", "window", "bidirectional"])
@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-3), ("bfloat16", 1e-2)])
def test_output_and_gradients_on_a_gpu_match_the_reference(
    gpu: jax.Device, dtype: str, tolerance: float, call: dict[str, Any], head_dim: int
) -> None:
    """Compare each array as a whole, relative to its norm, with grouped heads and a length that no block divides."""
    capability = kernels.get_compute_capability(gpu)
    if capability is None or attention_cudnn.problems(head_dim, dtype, capability):
        pytest.skip("cuDNN does not support this here")
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(2, 700, heads, head_dim)).astype(jnp.dtype(dtype)) for heads in (4, 2, 2, 4)]
    found = jax.jit(functools.partial(forward_and_backward, call))(*arrays)
    row = np.arange(700)
    distance = row[:, None] - row
    visible = (distance >= 0) & (distance < call.get("window", np.inf)) if call.get("causal", True) else distance < 700
    *operands, gradient = (x.astype(np.float64) for x in arrays)
    out, backward = reference.attend(*operands, np.broadcast_to(visible, (2, 700, 700)), head_dim**-0.5)
    for name, got, want in zip(("out", "q", "k", "v"), found, (out, *backward(gradient)), strict=True):
        assert got.devices() == {gpu}
        assert toy.distance(got, want) < tolerance, name
