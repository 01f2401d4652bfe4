"""What a pipeline holds and moves by each schedule, read off programs compiled for eight H200s."""

from typing import Any

import jax
import programs
import pytest
from compiled_steps import ROWS, SEQUENCE, WIDTH, Compiled, compiled
from marks import slow

from jaxopt_llm.compiler import hlo, instructions
from jaxopt_llm.compiler.hlo import Collective
from jaxopt_llm.config import MeshConfig, PipelineConfig
from jaxopt_llm.execution.schedules import make_table
from jaxopt_llm.execution.segments import LARGEST_UNROLLED_CHUNK
from jaxopt_llm.execution.stage_layout import EVEN
from jaxopt_llm.model import param

LAYERS = 8
DEEP = MeshConfig(pipeline=4, fsdp=2)
MIXED = MeshConfig(pipeline=2, fsdp=2, tensor=2)
# Layers whose gradients are no more than the inputs that wait, which show in the sum so.
NARROW = (("head_dim", 16), ("mlp_width", 512))
GPIPE, INTERLEAVED = PipelineConfig("gpipe"), PipelineConfig("interleaved", virtual_stages=2)
STORED = PipelineConfig(residuals="store")
STORED_INTERLEAVED = PipelineConfig("interleaved", virtual_stages=2, residuals="store")


def parameters(step: Compiled) -> tuple[int, int]:
    """Of the stacks, and outside them."""
    non_layer = param.count_parameters(step.program.specs.masters["non_layer"])
    return param.count_parameters(step.program.specs.masters) - non_layer, non_layer


def activation(mesh: MeshConfig) -> int:
    """Bytes of what a device sends: of a microbatch, what neither the batch's axes nor `tensor` divide."""
    return ROWS // mesh.size("fsdp") * SEQUENCE * WIDTH * 2 // mesh.tensor


def by_kind(collectives: list[Collective]) -> dict[str, float]:
    """Bytes of arrays, each as often as it is sent. XLA may send two as one."""
    return {
        kind: sum(each.array_bytes * each.times for each in collectives if each.kind == kind)
        for kind in {each.kind for each in collectives}
    }


@pytest.mark.core
@pytest.mark.parametrize(
    ("mesh", "stage", "pipelined"),
    [(DEEP, 1, EVEN), *slow((DEEP, 1, INTERLEAVED), (DEEP, 1, STORED), (DEEP, 1, STORED_INTERLEAVED))],
)
def test_memory_is_flat_in_the_number_of_microbatches(mesh: MeshConfig, stage: int, pipelined: PipelineConfig) -> None:
    few, many = (
        compiled(LAYERS, mesh, stage, accumulation=count, pipelined=pipelined, switches=NARROW).memory.temporaries
        for count in (8, 32)
    )
    assert many <= 1.02 * few


EXPERTS = (("moe.experts", 8), ("moe.expert_width", 256), ("moe.experts_per_token", 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "of", [{"switches": (*NARROW, *EXPERTS)}, {"switches": NARROW, "adapters_over": "float"}], ids=["experts", "lora"]
)
def test_stored_activations_do_not_grow_with_the_microbatches(of: dict[str, Any]) -> None:
    """Check with experts and with adapters. What remat none stores has to show in the memory."""
    few, many = (
        compiled(LAYERS, DEEP, 1, "none", accumulation=count, pipelined=STORED, **of).memory.temporaries
        for count in (8, 32)
    )
    again = compiled(LAYERS, DEEP, 1, "none", accumulation=8, pipelined=EVEN, **of).memory.temporaries
    assert many <= 1.02 * few
    assert few > 1.2 * again


@pytest.mark.slow
def test_a_chunk_that_runs_again_keeps_what_the_policy_says() -> None:
    """Its layers have no loop. XLA must not merge what the policy computes again with the second forward."""
    pipelined = PipelineConfig(residuals="recompute")
    none, some = (
        compiled(LAYERS, DEEP, 1, policy, accumulation=8, pipelined=pipelined, switches=NARROW, shape=(16, 512))
        for policy in ("none", "save_qkv")
    )
    assert hlo.count_dot_flops(some.text) > 1.05 * hlo.count_dot_flops(none.text)
    assert some.memory.temporaries < 0.9 * none.memory.temporaries


@pytest.mark.slow
def test_gpipe_keeps_an_input_of_each_microbatch() -> None:
    few, many = (
        compiled(LAYERS, DEEP, 1, accumulation=count, pipelined=GPIPE, switches=NARROW).memory.temporaries
        for count in (8, 32)
    )
    assert many > 1.15 * few
    assert many - few == pytest.approx(24 * activation(DEEP), rel=0.05)


@pytest.mark.core
@pytest.mark.parametrize(
    ("mesh", "stage", "pipelined", "sequence_parallel"),
    [
        (DEEP, 1, EVEN, False),
        *slow((DEEP, 1, GPIPE, False), (DEEP, 1, INTERLEAVED, False)),
        *slow((MIXED, 3, EVEN, True), (MIXED, 3, INTERLEAVED, True)),
    ],
)
def test_between_stages_there_is_what_the_schedule_says(
    mesh: MeshConfig, stage: int, pipelined: PipelineConfig, sequence_parallel: bool
) -> None:
    """A permute to each neighbour for each tick, and sums of a microbatch's activations at the model's ends."""
    microbatches = 8
    step = compiled(
        LAYERS, mesh, stage, accumulation=microbatches, sequence_parallel=sequence_parallel, pipelined=pipelined
    )
    table = make_table(pipelined.schedule, mesh.pipeline, microbatches, pipelined.virtual_stages)
    between = [each for each in step.collectives if "pipeline" in each.axes and each.array_bytes > 10_000]
    assert {each.axes for each in between} == {("pipeline",)}
    moved = by_kind(between)
    forward, backward = (sum(half.active) for half in (table.forward, table.backward))
    # The very first gradient and the very last of what goes forward are nobody's, and may be left out.
    assert moved.pop("collective-permute") / activation(mesh) in (forward + backward, forward + backward - 1)
    # Of embedded tokens, of what the last stage gives, and of the gradients of both.
    assert moved.pop("all-reduce") / activation(mesh) == 4 * microbatches
    assert not moved


@pytest.mark.core
def test_gradients_of_tables_are_not_summed_over_stages() -> None:
    """A tied table's gradient is formed where its rows are; of what is outside the stacks one norm is left."""
    step = compiled(LAYERS, DEEP, 1, accumulation=8)
    once = [each for each in step.collectives if "pipeline" in each.axes and each.times == 1]
    # A phase of a single tick sends activations once.
    after = [(each.kind, each.array_bytes) for each in once if each.array_bytes not in (activation(DEEP), 4)]
    assert [each for each in after if each[1] > 1000] == [("all-reduce", WIDTH * 4 / DEEP.fsdp)]


@pytest.mark.parametrize("pipelined", [EVEN, *slow((INTERLEAVED,))])
@pytest.mark.slow
def test_gradients_are_reduced_once_after_the_ticks(pipelined: PipelineConfig) -> None:
    for microbatches in (8, 32):
        step = compiled(LAYERS, DEEP, 1, accumulation=microbatches, pipelined=pipelined)
        stacks, non_layer = parameters(step)
        reduced = [
            each
            for each in step.collectives
            if each.axes == ("fsdp",) and each.kind in ("reduce-scatter", "all-reduce")
        ]
        total = sum(each.array_bytes * each.times for each in reduced)
        assert total == pytest.approx(4 * (stacks + non_layer) / DEEP.pipeline, rel=0.02)


@pytest.mark.parametrize(
    ("mesh", "stage", "per_parameter", "pipelined"),
    [(DEEP, 1, 2 + 12 / 2, EVEN), *slow((DEEP, 1, 2 + 12 / 2, INTERLEAVED), (MIXED, 3, 12 / 2, EVEN))],
)
def test_each_stage_holds_its_layers_and_its_rows_alone(
    mesh: MeshConfig, stage: int, per_parameter: float, pipelined: PipelineConfig
) -> None:
    step = compiled(LAYERS, mesh, stage, accumulation=8, pipelined=pipelined)
    batch = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.program.batch)) / mesh.size("fsdp")
    expected = per_parameter * sum(parameters(step)) / mesh.pipeline / mesh.tensor + batch
    assert step.memory.arguments == pytest.approx(expected, rel=0.02)
    assert step.memory.aliased >= step.memory.arguments - batch - 4096, "the state is not updated in place"


@pytest.mark.parametrize("pipelined", [EVEN, *slow((INTERLEAVED,))])
@pytest.mark.slow
def test_the_program_does_not_grow_with_microbatches_nor_long_chunks(pipelined: PipelineConfig) -> None:
    chunks = DEEP.pipeline * pipelined.virtual_stages
    short, again, long, longer = (
        programs.count_instructions(compiled(chunks * layers, DEEP, 1, accumulation=count, pipelined=pipelined).text)
        for layers, count in (
            (2, 8),
            (2, 64),
            (LARGEST_UNROLLED_CHUNK + 1, 8),
            (LARGEST_UNROLLED_CHUNK + 5, 8),
        )
    )
    assert again <= 1.02 * short
    assert longer <= 1.02 * long


def test_layers_run_while_neighbours_send() -> None:
    """In ticks that run forward and backward, both permutes last over several kernels."""
    text = compiled(LAYERS, DEEP, 1, accumulation=8).text
    steady = [
        names
        for computation in instructions.parse_module(text).values()
        if sum(each.opcode == "collective-permute-start" for each in computation.values()) == 2
        and any(each.opcode == "conditional" for each in computation.values())
        for names in [[each.opcode for each in computation.values()]]
    ]
    (ticks,) = steady
    for start, done in zip(*(_positions(ticks, f"collective-permute-{end}") for end in ("start", "done")), strict=True):
        assert sum(name in ("custom-call", "fusion") for name in ticks[start:done]) >= 4


def _positions(names: list[str], name: str) -> list[int]:
    return [index for index, each in enumerate(names) if each == name]
