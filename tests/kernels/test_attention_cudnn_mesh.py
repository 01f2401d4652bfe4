"""Attention by cuDNN in training steps on simulated devices, by the emulation of its primitives."""

from typing import Any

import cudnn_emulator
import jax
import pytest
import test_matrix
from marks import slow

from jaxopt_llm.config import MeshConfig, PrecisionConfig, ShardingConfig
from jaxopt_llm.kernels.attention_auto import AttentionChoice
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement


@pytest.mark.parametrize(
    ("axes", "stage", "exchange", "remat"),
    [
        ({"fsdp": 2, "tensor": 2}, 3, "ring", "save_attention"),
        ({"context": 4, "tensor": 2}, 3, "ring", "none"),
        *slow(
            ({"pipeline": 2, "fsdp": 2}, 1, "ring", "none"),
            ({"fsdp": 2, "context": 2}, 3, "all_to_all", "save_attention"),
            ({"fsdp": 2, "context": 2}, 3, "ring", "save_attention"),
            ({"pipeline": 2, "context": 2}, 1, "ring", "full"),
        ),
    ],
)
def test_a_step_equals_that_of_xla_on_one_device(
    axes: dict[str, int], stage: int, exchange: Any, remat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With documents, grouped queries and, but in a ring, a window, in float32."""
    chosen = "jaxopt_llm.step.program.kernel_choice.choose_attention"
    monkeypatch.setattr(chosen, lambda device, asked, *of: AttentionChoice(asked))
    directions = cudnn_emulator.emulate(monkeypatch)
    mesh = MeshConfig(**axes)
    sharding = ShardingConfig(stage, context_exchange=exchange)  # type: ignore[arg-type]
    placement = Placement(
        make_mesh(mesh, jax.devices("cpu")[: mesh.devices]), sharding, PrecisionConfig(compute_dtype="float32")
    )
    model = "global" if exchange == "ring" and mesh.context > 1 else "tied"
    expected = test_matrix.one_device(model, "full")
    found = test_matrix.compute(placement, 3 if mesh.pipeline > 1 else 1, remat, model, "full", "cudnn")
    assert {"forward", "backward"} == set(directions)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    test_matrix.assert_equal(found.gradients, expected.gradients)
