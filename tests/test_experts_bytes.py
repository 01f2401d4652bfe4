"""What a mixture of experts costs: what tokens travel, and what a device holds, read off programs for eight H200s."""

import math
from typing import Any

import pytest
from test_attention_bytes import TRITON
from test_bytes import ROWS, SEQUENCE, WIDTH, Compiled, compiled, slow

from jaxopt_llm.parallel import hlo, instructions
from jaxopt_llm.parallel.mesh import MeshConfig

LAYERS, EXPERTS, INNER, CHOSEN = 8, 8, 1024, 2
MIXTURE = (("experts", EXPERTS), ("expert_width", INNER), ("experts_per_token", CHOSEN))
MESHES = [MeshConfig(fsdp=2, expert=4), MeshConfig(fsdp=2, expert=2, tensor=2), *slow((MeshConfig(expert=8),))]

pytestmark = pytest.mark.core


def mixed(mesh: MeshConfig, remat: str = "full", more: tuple[tuple[str, Any], ...] = ()) -> Compiled:
    return compiled(LAYERS, mesh, 3, remat, switches=MIXTURE + more)


@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_travel_once_there_and_once_back(mesh: MeshConfig) -> None:
    """Over `expert` alone, whatever the number of experts per token: brought together forward, again in the forward
    that is run again, and their results' gradients backward; summed on the way back forward and backward."""
    sent = [each for each in mixed(mesh).collectives if each.axes == ("expert",)]
    together = ROWS // mesh.fsdp * SEQUENCE * WIDTH * 2  # bytes of what the devices along `expert` have of the batch
    by_kind = {
        kind: sum(each.array_bytes * each.times for each in sent if each.kind == kind) / LAYERS
        for kind in ("all-gather", "reduce-scatter")
    }
    assert by_kind["reduce-scatter"] == pytest.approx(2 * together, rel=0.02)
    assert by_kind["all-gather"] == pytest.approx(3 * together, rel=0.05)  # and a few numbers for each choice
    assert not [each for each in sent if each.kind not in by_kind]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_device_holds_its_experts_alone(mesh: MeshConfig) -> None:
    step = mixed(mesh)
    masters = step.program.state.masters["segment_0"]["block_0"]["mlp"]
    for name in ("gate", "up", "down"):
        own = masters[name].sharding.shard_shape(masters[name].shape)
        assert math.prod(own) * mesh.devices == math.prod(masters[name].shape) == LAYERS * EXPERTS * WIDTH * INNER
    # Nor are others gathered: whole over `fsdp`, divided over `expert` and `tensor`.
    largest = max(each.array_bytes for each in step.collectives if each.axes == ("fsdp",) and each.kind == "all-gather")
    assert largest <= 2 * 3 * EXPERTS * WIDTH * INNER * 2 / mesh.expert / mesh.tensor  # three matrices, of two layers


def test_groups_and_a_bias_that_follows_the_load_move_counts_alone() -> None:
    """Numbers by expert, not by token: of each layer its bias, its load, that again, and the bias's gradient."""
    groups = (("router", "sigmoid"), ("router_groups", 4), ("router_groups_per_token", 2), ("router_bias", True))
    moved = [
        sum(each.array_bytes * each.times for each in mixed(MESHES[0], more=more).collectives) for more in ((), groups)
    ]
    assert 0 < moved[1] - moved[0] <= LAYERS * 5 * EXPERTS * 4


def test_products_are_the_kernels() -> None:
    """Of each matrix one forward, again in the forward that is run again, and two backward."""
    step = mixed(MESHES[0])
    names = [
        instruction.find(r'name = \\?"(_grouped_matmul\w*)')
        for _, instruction, run in instructions.walk(step.text)
        if instruction.find(TRITON)
        for _ in range(instructions.times(instruction, run))
    ]
    assert names.count("_grouped_matmul") == LAYERS * 3 * 3
    assert names.count("_grouped_matmul_weight_gradient") == LAYERS * 3


@pytest.mark.parametrize("mesh", MESHES)
def test_products_are_counted_by_the_rows_that_are_filled_on_average(mesh: MeshConfig) -> None:
    """Of a token as many experts' as it is given, not those of the worst case that there is room for."""
    text = mixed(mesh).text
    without = "\n".join(
        line for line in text.splitlines() if "_grouped_matmul" not in line or "custom-call(" not in line
    )
    of_experts = hlo.dot_flops(text) - hlo.dot_flops(without)
    runs = 3 + 3 + 3 + 3  # three matrices: forward, again, and twice backward
    assert of_experts == LAYERS * runs * 2 * ROWS * SEQUENCE * CHOSEN * WIDTH * INNER // mesh.devices
