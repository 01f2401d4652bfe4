"""What a sequence costs that devices divide: memory, and what goes round, read off programs for H200s."""

import pytest
from test_attention_bytes import KERNELS, calls
from test_bytes import ROWS, SEQUENCE, WIDTH, compiled, slow

from jaxopt_llm.model import param
from jaxopt_llm.parallel.mesh import MeshConfig

LAYERS = 8

pytestmark = pytest.mark.core


@pytest.mark.parametrize("attention", ["pallas", *slow(("xla",))])
def test_a_layers_activations_fall_with_the_number_of_devices(attention: str) -> None:
    """Beside its gradients, which stage 0 does not divide. On more devices than two these outgrow the activations."""
    steps = {
        count: [compiled(layers, MeshConfig(context=count), 0, "none", attention=attention) for layers in (16, 8)]
        for count in (1, 2)
    }
    specs = steps[1][0].program.specs.masters["segment_0"]
    gradients = 4 * param.count(param.layer_specs(specs))
    one, two = (
        (deep.memory.temporaries - shallow.memory.temporaries) / 8 - gradients for deep, shallow in steps.values()
    )
    assert two == pytest.approx(one / 2, rel=0.02)


@pytest.mark.parametrize("mesh", [MeshConfig(fsdp=2, context=4), *slow((MeshConfig(fsdp=4, context=2),))])
@pytest.mark.parametrize("attention", ["xla", "pallas"])
def test_keys_and_values_go_round_and_no_activation_is_gathered(mesh: MeshConfig, attention: str) -> None:
    step = compiled(LAYERS, mesh, 3, attention=attention)
    sent = [each for each in step.collectives if each.axes == ("context",) and each.array_bytes > 10_000]
    assert {each.kind for each in sent} == {"collective-permute"}
    # Keys and values forward, and the same backward, which the forward that is run again shares. Their gradients in 32
    # bits, but where XLA rounds before it sends: one device's own at first, and what comes home.
    part = ROWS // mesh.fsdp * SEQUENCE // mesh.context * WIDTH * 2
    parts = sum(each.array_bytes * each.times for each in sent) / (LAYERS * 2 * part)
    operands, steps = 2 * (mesh.context - 1), mesh.context
    assert operands + 2 * steps - 2 <= parts <= operands + 2 * steps


def test_zero_divides_over_the_context_too() -> None:
    mesh = MeshConfig(fsdp=2, context=4)
    step = compiled(LAYERS, mesh, 3, attention="pallas")
    batch = 17 * ROWS * SEQUENCE / 8  # four integers and a boolean
    assert step.memory.arguments == pytest.approx(12 / 8 * param.count(step.program.specs.masters) + batch, rel=0.01)


def test_a_saved_result_is_not_computed_again() -> None:
    mesh = MeshConfig(fsdp=2, context=4)
    step = compiled(LAYERS, mesh, 3, "save_attention", attention="pallas")
    assert calls(step) == LAYERS * mesh.context * (KERNELS["forward"] + KERNELS["backward"])
