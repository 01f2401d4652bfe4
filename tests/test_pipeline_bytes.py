"""What a pipeline holds and moves, read off programs compiled for eight H200s."""

import jax
import pytest
from test_bytes import ROWS, SEQUENCE, WIDTH, Compiled, compiled, slow

from jaxopt_llm.model import param
from jaxopt_llm.parallel import hlo
from jaxopt_llm.parallel.mesh import MeshConfig

LAYERS = 8
DEEP = MeshConfig(pipeline=4, fsdp=2)
MIXED = MeshConfig(pipeline=2, fsdp=2, tensor=2)

pytestmark = pytest.mark.core


def parameters(step: Compiled) -> tuple[int, int]:
    """Of the stacks, and outside them."""
    outer = param.count(step.program.specs.masters["outer"])
    return param.count(step.program.specs.masters) - outer, outer


@pytest.mark.parametrize(("mesh", "stage"), [(DEEP, 1), *slow((MIXED, 3))])
def test_memory_is_flat_in_the_number_of_microbatches(mesh: MeshConfig, stage: int) -> None:
    few, many = (compiled(LAYERS, mesh, stage, accumulation=count) for count in (8, 32))
    # Kept for each microbatch, inputs alone would add a fifth.
    assert many.memory.temporaries <= 1.02 * few.memory.temporaries


@pytest.mark.parametrize(
    ("mesh", "stage", "sequence_parallel"), [(DEEP, 1, False), (MIXED, 3, True), *slow((MIXED, 3, False))]
)
def test_between_stages_there_are_neighbours_permutes_and_one_sum_of_what_is_outside_the_stacks(
    mesh: MeshConfig, stage: int, sequence_parallel: bool
) -> None:
    microbatches = 8
    step = compiled(LAYERS, mesh, stage, accumulation=microbatches, sequence_parallel=sequence_parallel)
    between = [each for each in step.collectives if "pipeline" in each.axes and each.array_bytes > 1000]
    permutes = [each for each in between if each.kind == "collective-permute"]
    activation = ROWS // mesh.fsdp * SEQUENCE * WIDTH * 2
    assert {each.axes for each in permutes} == {("pipeline",)}
    sent = activation // mesh.tensor if sequence_parallel else activation
    assert {each.array_bytes for each in permutes} == {sent}
    each_way = microbatches + mesh.pipeline - 1
    assert sum(each.times for each in permutes) in (2 * each_way, 2 * each_way - 1)  # nobody reads the very last

    others = [each for each in between if each.kind != "collective-permute"]
    assert {(each.kind, each.axes, each.times) for each in others} == {("all-reduce", ("pipeline",), 1)}
    _, outer = parameters(step)
    assert sum(each.array_bytes for each in others) == pytest.approx(4 * outer / mesh.fsdp / mesh.tensor, rel=0.02)


def test_gradients_are_reduced_once_after_the_ticks() -> None:
    for microbatches in (8, 32):
        step = compiled(LAYERS, DEEP, 1, accumulation=microbatches)
        stacks, outer = parameters(step)
        reduced = [
            each
            for each in step.collectives
            if each.axes == ("fsdp",) and each.kind in ("reduce-scatter", "all-reduce")
        ]
        total = sum(each.array_bytes * each.times for each in reduced)
        assert total == pytest.approx(4 * (stacks / DEEP.pipeline + outer), rel=0.02)


@pytest.mark.parametrize(("mesh", "stage", "per_parameter"), [(DEEP, 1, 2 + 12 / 2), *slow((MIXED, 3, 12 / 2))])
def test_each_stage_holds_its_layers_alone(mesh: MeshConfig, stage: int, per_parameter: float) -> None:
    step = compiled(LAYERS, mesh, stage, accumulation=8)
    stacks, outer = parameters(step)
    batch = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.program.batch)) / mesh.fsdp
    expected = per_parameter * (stacks / mesh.pipeline + outer) / mesh.tensor + batch
    assert step.memory.arguments == pytest.approx(expected, rel=0.02)
    assert step.memory.aliased >= step.memory.arguments - batch - 4096, "the state is not updated in place"


def test_the_program_does_not_grow_with_depth_nor_with_microbatches() -> None:
    base, *others = (
        hlo.instruction_count(compiled(layers, DEEP, 1, accumulation=count).text)
        for layers, count in ((LAYERS, 8), (2 * LAYERS, 8), (LAYERS, 32))
    )
    assert all(other <= 1.01 * base for other in others)
