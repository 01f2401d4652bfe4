"""Every schedule computes the same as one device: loss, gradients, and the loss of an evaluation."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_matrix import assert_equal

from jaxopt_llm.compiler.xla_options import compiler_options
from jaxopt_llm.config import ModelConfig, PipelineConfig, RematConfig
from jaxopt_llm.core.tree import leaves_with_path
from jaxopt_llm.execution import pipeline, scan
from jaxopt_llm.execution.stage_layout import EVEN, stack_by_stage
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import AUXILIARY_LOSS, Params, Sums
from jaxopt_llm.parallel.zero import parameter_sharding

ROWS, LENGTH = 32, 16
UNIFORM = replace(toy.UNIFORM, layers=11)  # chunks of unequal lengths
SEGMENTS = replace(toy.CONFIG, layers=9, tied_head=False)
SCHEDULES = {
    "gpipe": PipelineConfig("gpipe", residuals="store"),
    "1f1b": PipelineConfig(residuals="store"),
    "interleaved": PipelineConfig("interleaved", 2, residuals="store"),
}
MESHES = {
    "data-tensor": (1, {"pipeline": 2, "data": 2, "tensor": 2}),
    "fsdp": (1, {"pipeline": 4, "fsdp": 2}),
    "fsdp-tensor": (3, {"pipeline": 2, "fsdp": 2, "tensor": 2}),
    "odd": (0, {"pipeline": 5}),
}
# Each schedule once, each mesh once and each number of microbatches per stage once.
DIAGONAL = [("gpipe", "data-tensor", 1), ("1f1b", "fsdp", 4), ("interleaved", "fsdp-tensor", 2)]
# With the diagonal, each pair of two of them once.
REST = [
    *(("gpipe", "fsdp", 2), ("gpipe", "fsdp-tensor", 4)),
    *(("1f1b", "data-tensor", 2), ("1f1b", "fsdp-tensor", 1)),
    *(("interleaved", "data-tensor", 4), ("interleaved", "fsdp", 1)),
]


class Penalised(Decoder):
    """Decoder with an auxiliary loss that differs between layers, and a count of the tokens of all layers."""

    def zero_auxiliary(self) -> Sums:
        return {AUXILIARY_LOSS: jnp.float32(0), "tokens": jnp.float32(0)}

    def block(self, kind: Any, params: Params, x: jax.Array, context: Context, layer: Any, cache: Any) -> Any:
        x, cache, _ = super().block(kind, params, x, context, layer, cache)
        penalty = 1e-3 * (1 + layer["index"]) * jnp.sum(x.astype(jnp.float32) ** 2)
        return x, cache, {AUXILIARY_LOSS: penalty, "tokens": jnp.float32(x.shape[0] * x.shape[1])}


def compute(
    config: ModelConfig, zero: int, microbatches: int, pipelined: PipelineConfig, **axes: int
) -> tuple[dict[str, float], Params]:
    """Return the losses, also of an evaluation, and the gradients [R, ...], of packed rows."""
    placement = toy.placement(zero, **axes)
    model, stages = Penalised(config, loss_chunk=7, z_loss=1e-2), axes.get("pipeline", 1)
    if stages > 1:
        model = stack_by_stage(model, stages, pipelined)
    remat = RematConfig("full")
    executor = pipeline.make_executor(remat, pipelined) if stages > 1 else scan.make_executor(remat)
    params = toy.on_stages(model.specs, toy.params(Decoder(config).specs))
    params = jax.device_put(params, parameter_sharding(model.specs, placement))
    batch = toy.microbatches(toy.packed(ROWS, LENGTH), microbatches)
    batch = jax.device_put(batch, placement.activation(None, "batch", "sequence"))
    frozen = jax.tree.map(lambda spec: None, model.specs)

    def both(params: Params, batch: Batch) -> Any:
        loss_weight = 1 / jnp.sum(batch.loss_mask).astype(jnp.float32)
        sums, gradients = executor.loss_and_gradients(model, params, frozen, batch, loss_weight, placement)
        evaluated = executor.loss(model, params, batch, placement.for_evaluation())
        return {"trained": sums, "evaluated": evaluated}, gradients

    run = jax.jit(both, compiler_options=compiler_options(placement.mesh, microbatches))
    losses, gradients = jax.tree.map(np.asarray, run(params, batch))

    def by_layer(spec: Any, gradient: np.ndarray) -> np.ndarray:
        if spec.leading < 3:
            return gradient
        layers = np.ravel(np.asarray(spec.layers))
        rows = gradient.reshape(layers.size, *gradient.shape[3:])
        assert not rows[layers < 0].any(), "an empty slot has a gradient"
        return rows[np.argsort(layers)[np.sum(layers < 0) :]]

    return {name: float(loss) for name, loss in leaves_with_path(losses)}, jax.tree.map(
        by_layer, model.specs, gradients
    )


one_device = functools.cache(functools.partial(compute, zero=0, microbatches=1, pipelined=EVEN))


def assert_as_on_one_device(config: ModelConfig, mesh: str, pipelined: PipelineConfig, microbatches: int) -> None:
    zero, axes = MESHES[mesh]
    losses, gradients = compute(config, zero, microbatches, pipelined, **axes)
    expected_losses, expected = one_device(config)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_equal(gradients, expected)


@pytest.mark.parametrize(
    ("schedule", "mesh", "times"),
    [
        *(pytest.param(*case, marks=[pytest.mark.core] * (case[0] == "interleaved")) for case in DIAGONAL),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in REST),
    ],
)
def test_a_schedule_changes_nothing(schedule: str, mesh: str, times: int) -> None:
    """times: microbatches per stage."""
    assert_as_on_one_device(UNIFORM, mesh, SCHEDULES[schedule], times * MESHES[mesh][1]["pipeline"])


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "interleaved"])
def test_a_chunk_that_runs_again_changes_nothing(schedule: str) -> None:
    assert_as_on_one_device(UNIFORM, "fsdp", replace(SCHEDULES[schedule], residuals="recompute"), 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipelined", "microbatches"),
    [
        (PipelineConfig("1f1b", split=(2, 7), residuals="store"), 4),
        (PipelineConfig("interleaved", 2, split=(2, 4, 2, 1)), 8),
    ],
    ids=str,
)
def test_segments_can_be_split_over_stages_anywhere(pipelined: PipelineConfig, microbatches: int) -> None:
    assert_as_on_one_device(SEGMENTS, "data-tensor", pipelined, microbatches)


def test_stages_split_a_table_whose_rows_they_do_not_divide() -> None:
    """384 rows over 5 stages: each has 77, and the last one has one row of padding."""
    assert_as_on_one_device(UNIFORM, "odd", EVEN, 2)


@pytest.mark.slow
def test_there_may_be_fewer_microbatches_than_stages() -> None:
    assert_as_on_one_device(UNIFORM, "data-tensor", SCHEDULES["interleaved"], 1)
