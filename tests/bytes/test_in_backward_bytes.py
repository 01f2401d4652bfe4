"""What an optimizer in the backward saves, read off programs compiled for eight H200s (see test_bytes.py)."""

import math
from typing import Any

import jax
import pytest
from compiled_steps import (
    DEVICES,
    FSDP,
    ROWS,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    Compiled,
    compiled,
    layer_parameters,
    per_layer,
)

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import MeshConfig, OffloadConfig
from jaxopt_llm.model import param

BLOCK_INPUT = ROWS // DEVICES * SEQUENCE * WIDTH * 2


def test_gradients_never_exist_whole() -> None:
    """Without ZeRO, where they are whole on every device: all temporaries together are less than half of them, and of
    a layer's gradient no stack is made."""
    step = compiled(8, FSDP, 0, in_backward=True)
    specs = step.program.specs.masters
    assert step.memory.temporaries < 4 * param.count_parameters(specs) / 2
    batch = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.program.batch)) / DEVICES
    assert step.memory.aliased >= step.memory.arguments - batch - 4096, "the state is not updated in place"
    reduced = sum(each.array_bytes * each.times for each in step.collectives if each.kind == "all-reduce")
    assert reduced == pytest.approx(4 * param.count_parameters(specs), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "stage", "gradient", "settings"),
    [
        (FSDP, 0, 4, {}),
        (FSDP, 1, 4, {}),
        (FSDP, 2, 4 / 8, {}),
        (FSDP, 3, 4 / 8, {}),
        (MeshConfig(data=2, fsdp=4), 3, 4 / 4, {}),
        (FSDP, 1, 4, {"offload": OffloadConfig(optimizer=True)}),
    ],
)
@pytest.mark.slow
def test_a_layer_more_costs_its_input_alone(
    mesh: MeshConfig, stage: int, gradient: float, settings: dict[str, Any]
) -> None:
    """And as many bytes on the wire, as many FLOPs, and as much at rest, as with the ordinary executor."""

    def temporaries(step: Compiled) -> int:
        return step.memory.temporaries

    found, before = (per_layer(temporaries, mesh, stage, in_backward=each, **settings) for each in (True, False))
    assert found <= 1.1 * BLOCK_INPUT + 0.01 * gradient * layer_parameters()
    assert before - found >= 0.9 * gradient * layer_parameters()
    step, ordinary = (compiled(16, mesh, stage, in_backward=each, **settings) for each in (True, False))
    assert step.wire_bytes() == pytest.approx(ordinary.wire_bytes(), rel=1e-4)
    assert hlo.count_dot_flops(step.text) == hlo.count_dot_flops(ordinary.text)
    assert (step.memory.arguments, step.memory.host) == (ordinary.memory.arguments, ordinary.memory.host)
    assert step.memory.aliased >= ordinary.memory.aliased - 4096, "the state is not updated in place"
    if settings:  # of the moments and masters no more than two layers', or the table's, is ever on the device
        kept = compiled(16, mesh, stage, in_backward=True)
        assert temporaries(step) - temporaries(kept) < 12 / 8 * max(2 * layer_parameters(), VOCABULARY * WIDTH)
