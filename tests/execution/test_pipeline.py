"""Every schedule computes what one device does: loss, gradients, and the loss of an evaluation."""

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_matrix import assert_equal

from jaxopt_llm.execution import pipeline, scan
from jaxopt_llm.execution.schedules import PipelineConfig
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.execution.stages import EVEN, rest_on_stages
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Auxiliary, Params, Parts, make_parts
from jaxopt_llm.parallel.xla_options import compiler_options
from jaxopt_llm.tree import leaves_with_path

ROWS, LENGTH = 32, 16
UNIFORM = replace(toy.UNIFORM, layers=11)  # chunks of unequal lengths
SEGMENTS = replace(toy.CONFIG, layers=9, tied_head=False)
SCHEDULES = {"gpipe": PipelineConfig("gpipe"), "1f1b": EVEN, "interleaved": PipelineConfig("interleaved", 2)}
MESHES = {
    "data-tensor": (1, {"pipeline": 2, "data": 2, "tensor": 2}),
    "fsdp": (1, {"pipeline": 4, "fsdp": 2}),
    "fsdp-tensor": (3, {"pipeline": 2, "fsdp": 2, "tensor": 2}),
    "odd": (0, {"pipeline": 5}),
}
# Each schedule once, each mesh once and each number of microbatches for a stage once.
DIAGONAL = [("gpipe", "data-tensor", 1), ("1f1b", "fsdp", 4), ("interleaved", "fsdp-tensor", 2)]
REST = [case for case in itertools.product(SCHEDULES, tuple(MESHES)[:3], (1, 2, 4)) if case not in DIAGONAL]


def penalised(plain: Parts) -> Parts:
    """With an auxiliary loss that tells layers apart, and a count of the tokens that passed any."""

    def none() -> Auxiliary:
        return Auxiliary(jnp.float32(0), {"tokens": jnp.float32(0)})

    def block(kind: Any, weights: Params, x: jax.Array, context: Context, layer: Any, cache: Any) -> Any:
        x, cache, _ = plain.block(kind, weights, x, context, layer, cache)
        penalty = 1e-3 * (1 + layer["index"]) * jnp.sum(x.astype(jnp.float32) ** 2)
        return x, cache, Auxiliary(penalty, {"tokens": jnp.float32(x.shape[0] * x.shape[1])})

    return replace(plain, block=block, zero_auxiliary=none)


def compute(
    config: ModelConfig, zero: int, microbatches: int, pipelined: PipelineConfig, **axes: int
) -> tuple[dict[str, float], Params]:
    """Losses, those of an evaluation too, and gradients [repeats, ...], of packed rows."""
    placement = toy.placement(zero, **axes)
    parts, stages = penalised(make_parts(config, loss_chunk=7, z_loss=1e-2)), axes.get("pipeline", 1)
    if stages > 1:
        parts = rest_on_stages(parts, stages, pipelined)
    remat = RematConfig("full")
    executor = pipeline.make_executor(remat, pipelined) if stages > 1 else scan.make_executor(remat)
    params = toy.on_stages(parts.specs, toy.params(make_parts(config).specs))
    params = jax.device_put(params, jax.tree.map(placement.parameters, parts.specs))
    batch = toy.microbatches(toy.packed(ROWS, LENGTH), microbatches)
    batch = jax.device_put(batch, placement.activation(None, "batch", "sequence"))
    nothing = jax.tree.map(lambda spec: None, parts.specs)

    def both(params: Params, batch: Batch) -> Any:
        cotangent = 1 / jnp.sum(batch.loss_mask).astype(jnp.float32)
        loss, _, added, gradients = executor.loss_and_gradients(parts, params, nothing, batch, cotangent, placement)
        evaluated, also_added = executor.loss(parts, params, batch, placement.for_evaluation())
        return {"loss": loss, "added": added, "evaluated": evaluated, "also_added": also_added}, gradients

    run = jax.jit(both, compiler_options=compiler_options(placement.mesh, microbatches))
    losses, gradients = jax.tree.map(np.asarray, run(params, batch))

    def by_layer(spec: Any, gradient: np.ndarray) -> np.ndarray:
        if spec.leading < 3:
            return gradient
        places = np.ravel(np.asarray(spec.layers))
        rows = gradient.reshape(places.size, *gradient.shape[3:])
        assert not rows[places < 0].any(), "a place without a layer has a gradient"
        return rows[np.argsort(places)[np.sum(places < 0) :]]

    return {name: float(loss) for name, loss in leaves_with_path(losses)}, jax.tree.map(
        by_layer, parts.specs, gradients
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
    """times: microbatches for each stage."""
    assert_as_on_one_device(UNIFORM, mesh, SCHEDULES[schedule], times * MESHES[mesh][1]["pipeline"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipelined", "microbatches"),
    [
        (PipelineConfig("1f1b", split=(2, 7)), 4),
        (PipelineConfig("interleaved", 2, split=(2, 4, 2, 1)), 8),
    ],
    ids=str,
)
def test_segments_go_over_the_stages_in_any_split(pipelined: PipelineConfig, microbatches: int) -> None:
    assert_as_on_one_device(SEGMENTS, "data-tensor", pipelined, microbatches)


def test_stages_divide_a_table_that_has_no_multiple_of_them() -> None:
    """384 rows over 5: each has 77, the last one of padding."""
    assert_as_on_one_device(UNIFORM, "odd", EVEN, 2)


def test_there_may_be_fewer_microbatches_than_stages() -> None:
    assert_as_on_one_device(UNIFORM, "data-tensor", SCHEDULES["interleaved"], 1)
