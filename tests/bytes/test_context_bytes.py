"""What a sequence costs that devices divide: memory, and what goes round, read off programs for H200s."""

import pytest
from compiled_steps import HEADS, ROWS, SEQUENCE, WIDTH, compiled
from marks import slow
from test_attention_bytes import KERNELS, TRITON, calls

from jaxopt_llm.compiler import instructions
from jaxopt_llm.config import MeshConfig
from jaxopt_llm.model import param

LAYERS = 8


@pytest.mark.parametrize("attention", ["pallas", *slow(("xla",))])
@pytest.mark.slow
def test_a_layers_activations_fall_with_the_number_of_devices(attention: str) -> None:
    """Beside its gradients, which stage 0 does not divide. On more devices than two these outgrow the activations."""
    steps = {
        count: [compiled(layers, MeshConfig(context=count), 0, "none", attention=attention) for layers in (16, 8)]
        for count in (1, 2)
    }
    specs = steps[1][0].program.specs.masters["segment_0"]
    gradients = 4 * param.count_parameters(param.period_specs(specs))
    one, two = (
        (deep.memory.temporaries - shallow.memory.temporaries) / 8 - gradients for deep, shallow in steps.values()
    )
    # XLA 0.11.2 keeps one array of the residual stream twice.
    assert two == pytest.approx(one / 2, rel=0.08)


@pytest.mark.core
@pytest.mark.parametrize(
    ("attention", "mesh"),
    [
        ("pallas", MeshConfig(fsdp=2, context=4)),
        *slow(
            ("pallas", MeshConfig(fsdp=4, context=2)),
            *((each, MeshConfig(fsdp=2, context=4)) for each in ("cudnn", "xla")),
        ),
    ],
)
def test_keys_and_values_go_round_and_no_activation_is_gathered(attention: str, mesh: MeshConfig) -> None:
    step = compiled(LAYERS, mesh, 3, attention=attention)
    sent = [each for each in step.collectives if each.axes == ("context",) and each.array_bytes > 10_000]
    assert {each.kind for each in sent} == {"collective-permute"}
    # Keys and values forward, again in the forward that is run again, and backward, whose first are those again. Their
    # gradients in 32 bits, but where XLA rounds before it sends: one device's own at first, and what comes home.
    part = ROWS // mesh.size("fsdp") * SEQUENCE // mesh.context * WIDTH * 2
    parts = sum(each.array_bytes * each.times for each in sent) / (LAYERS * 2 * part)
    operands, steps = 3 * (mesh.context - 1) - 1, mesh.context
    assert operands + 2 * steps - 2 <= parts <= operands + 2 * steps


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.parametrize(("attention", "call"), [("pallas", TRITON), ("cudnn", r'custom_call_target="(__cudnn\$fmha)')])
def test_what_goes_round_is_sent_beside_a_kernel(attention: str, call: str) -> None:
    """But for gradients on their last way, home. Of sizes that XLA does not combine: what is small waits at a ring's
    ends for what it is sent with."""
    rows, length = 2, 65_536
    step = compiled(4, MeshConfig(fsdp=2, context=4), 3, "save_attention", attention=attention, shape=(rows, length))
    part = rows // 2 * length // 4 * WIDTH * 2
    started: dict[str, tuple[int, int]] = {}
    beside = alone = kernels = 0
    for computation, instruction, run in instructions.walk_instructions(step.text):
        kernels += instruction.find(call) is not None
        if instruction.opcode == "collective-permute-start":
            size = sum(array.bytes for name in instruction.operands for array in computation[name].results)
            started[instruction.name] = kernels, size * instructions.count_runs(instruction, run)
        elif instruction.opcode == "collective-permute-done":
            before, sent = started.pop(instruction.operands[0])
            beside, alone = (beside + sent, alone) if kernels > before else (beside, alone + sent)
    steps = 3  # of keys and values twice, and of their gradients in 32 bits, which in the end are sent home in 16
    assert beside >= 4 * (2 * steps + 2 * steps - 1) * 2 * part
    assert alone <= 1.01 * 4 * 2 * part


@pytest.mark.core
@pytest.mark.parametrize("attention", ["pallas", *slow(("xla",))])
def test_all_to_all_sends_operands_results_and_gradients_once_each(attention: str) -> None:
    mesh = MeshConfig(fsdp=2, context=4)
    step = compiled(LAYERS, mesh, 3, "save_attention", attention=attention, context_exchange="all_to_all")
    sent = [each for each in step.collectives if each.axes == ("context",) and each.array_bytes > 10_000]
    assert {each.kind for each in sent} == {"all-to-all"}
    part = ROWS // mesh.size("fsdp") * SEQUENCE // mesh.context * WIDTH * 2
    numbers = (
        3 * ROWS // mesh.size("fsdp") * SEQUENCE // mesh.context * HEADS * 4
    )  # of each query and head, back and forth
    # Queries, keys, values and the result; backward these but for the result, whose gradient comes, and three.
    expected = LAYERS * ((4 + 7) * part + numbers)
    assert sum(each.array_bytes * each.times for each in sent) == pytest.approx(expected, rel=0.01)
    assert not [each for each in step.collectives if each.kind == "collective-permute" and each.array_bytes >= part]


@pytest.mark.core
def test_zero_divides_over_the_context_too() -> None:
    mesh = MeshConfig(fsdp=2, context=4)
    step = compiled(LAYERS, mesh, 3, attention="pallas")
    batch = 17 * ROWS * SEQUENCE / 8  # four integers and a boolean
    assert step.memory.arguments == pytest.approx(
        12 / 8 * param.count_parameters(step.program.specs.masters) + batch, rel=0.01
    )


@pytest.mark.slow
def test_a_saved_result_is_not_computed_again() -> None:
    mesh = MeshConfig(fsdp=2, context=4)
    step = compiled(LAYERS, mesh, 3, "save_attention", attention="pallas")
    assert calls(step) == LAYERS * mesh.context * (KERNELS["forward"] + KERNELS["backward"])
