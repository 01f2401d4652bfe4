"""Unrolled layers: the same gradients as a loop, and no stacks for the backward in the program of a GPU."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import toy

from jaxopt_llm.compiler import topology
from jaxopt_llm.compiler.instructions import parse_module
from jaxopt_llm.config import (
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
)
from jaxopt_llm.config.training import Unroll
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.executor import sum_of_squares
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import OBJECTIVE
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.planning import breakdown
from jaxopt_llm.planning.kernel_bytes import list_fused, walk_kernels
from jaxopt_llm.step import step

pytestmark = pytest.mark.core


PLACEMENTS: dict[str, dict[str, int]] = {
    "one device": {},
    "fsdp, tensor": {"zero_stage": 3, "fsdp": 2, "tensor": 2},
    "gradient groups": {"zero_stage": 1, "data": 2, "fsdp": 2},
}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("case", PLACEMENTS)
def test_unrolled_layers_compute_the_same(case: str, microbatches: int) -> None:
    model = Decoder(toy.CONFIG)
    params = toy.params(model.specs)
    frozen, batch = jax.tree.map(lambda leaf: None, params), toy.microbatches(toy.packed(8, 16), microbatches)

    def compute(placement: Placement, unrolled: bool) -> tuple[float, object]:
        def step(params: object) -> tuple[jax.Array, object]:
            sums, gradients = scan.loss_and_gradients(
                model, params, frozen, batch, np.float32(0.01), placement, RematConfig("none"), unrolled
            )
            return sums[OBJECTIVE], gradients

        loss, gradients = jax.jit(step, compiler_options=toy.QUICK_COMPILE)(params)
        return float(loss), jax.tree.map(np.asarray, gradients)

    loss, gradients = compute(toy.placement(**PLACEMENTS[case]), unrolled=True)
    loop_loss, loop_gradients = compute(toy.placement(), unrolled=False)
    assert loss == pytest.approx(loop_loss, rel=1e-6)
    assert toy.distance(gradients, loop_gradients) < 1e-5


def compile_step(unroll: Unroll, model: ModelConfig = toy.UNIFORM, accumulation: int = 1) -> str:
    """Return the step for one GPU as text."""
    mesh = make_mesh(MeshConfig(), topology.gpu_topology("h200", 1, 1))
    placement = Placement(mesh, ShardingConfig(), PrecisionConfig())
    training = TrainingConfig(
        batch_size=2, sequence_length=64, attention="xla", unroll=unroll, accumulation=accumulation
    )
    sections = training, OptimizerConfig(), ScheduleConfig(), RematConfig("none"), LoraConfig()
    program = toy.make_program(model, *sections, placement)
    lowered = topology.lower_without_gpu(program.step, program.state, program.batch)
    return str(topology.compile_without_gpu(lowered).as_text())


def count_stacked(text: str) -> int:
    """Count the arrays of all layers that a program writes layer by layer."""
    instructions = (each for body in parse_module(text).values() for each in body.values())
    written = (each.results[0].shape for each in instructions if each.opcode == "dynamic-update-slice")
    return sum(shape[0] == toy.UNIFORM.layers for shape in written)


def count_joined_reductions(text: str) -> int:
    """Count the computations that sum a concatenation of all layers: they read it at a quarter of the memory's rate."""
    counts = (
        any(each.opcode == "concatenate" and len(each.operands) == toy.UNIFORM.layers for each in body.values())
        and any(each.opcode == "reduce" for each in body.values())
        for body in parse_module(text).values()
    )
    return sum(counts)


def test_an_unrolled_step_has_no_stacks() -> None:
    unrolled = compile_step("all")
    assert count_stacked(compile_step("none")) > 10
    assert count_stacked(unrolled) == 0
    assert count_joined_reductions(unrolled) == 0


def test_without_its_own_reduction_each_layer_joins_one_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that `count_joined_reductions` finds what the step avoids."""
    monkeypatch.setattr(step, "sum_of_squares", lambda gradients, specs, by_period: sum_of_squares(gradients, specs))
    assert count_joined_reductions(compile_step("all")) > 0


# XLA joins small matmuls that read the same array into one. These are too large for it.
WIDE = dataclasses.replace(toy.UNIFORM, width=4096, heads=32, kv_heads=32, head_dim=128, mlp_width=8192)


def count_kernels_of_gradients(text: str) -> tuple[int, int]:
    """Count the kernels of microbatches that write a weight's gradient: those that are matmuls, and all others."""
    module, found = parse_module(text), [0, 0]
    for computation, kernel, times in walk_kernels(module):
        sizes = (math.prod(each.shape) for each in kernel.results if each.dtype == "f32")
        if times > 1 and max(sizes, default=0) >= WIDE.width**2:
            part = breakdown.classify(computation, kernel, list_fused(module, kernel))
            found[part != breakdown.MATMULS] += times
    return found[0], found[1]


@pytest.mark.slow
def test_unrolled_matmuls_add_to_the_sum_of_microbatches() -> None:
    """Check that no kernel of its own adds a gradient to the sum: 12 bytes a parameter and microbatch."""
    matrices, microbatches = 7, 2
    assert count_kernels_of_gradients(compile_step("all", WIDE, microbatches)) == (
        matrices * WIDE.layers * microbatches,
        0,
    )
    assert count_kernels_of_gradients(compile_step("none", WIDE, microbatches))[1] >= matrices * microbatches
