"""Objectives over pairs and groups on every mesh: losses, gradients and log-probabilities are those of one device.

The divergence of kto is over all devices of a microbatch, also those of other gradient groups.
"""

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
from jaxopt_llm.config import GrpoConfig, PipelineConfig, PreferenceConfig, RematConfig
from jaxopt_llm.execution import pipeline, scan
from jaxopt_llm.execution.stage_layout import EVEN, stack_by_stage
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import OBJECTIVE, Params
from jaxopt_llm.model.objectives import Objective
from jaxopt_llm.model.objectives.grpo import Grpo
from jaxopt_llm.model.objectives.judged import REPORTED, Judged
from jaxopt_llm.model.objectives.preference import Preference
from jaxopt_llm.parallel.zero import parameter_sharding

ROWS, LENGTH = 8, 48
MODEL = replace(toy.UNIFORM, layers=4)
SETTINGS = PreferenceConfig(beta=0.3, label_smoothing=0.1, nll_weight=0.5)
STORED = PipelineConfig("interleaved", 2, residuals="store")
OBJECTIVES: dict[str, Objective] = {
    "dpo": Preference("dpo", SETTINGS),
    "kto": Judged(PreferenceConfig(beta=0.3)),
    "grpo": Grpo(GrpoConfig(level="sequence", normalisation="sequence", beta=0.3, epsilon=0.05), 256),
}
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, int], PipelineConfig]] = {
    "fsdp, tensor": (3, {"sequence_parallel": True}, {"fsdp": 2, "tensor": 2}, EVEN),
    "data, context": (3, {"context_exchange": "ring"}, {"data": 2, "context": 2}, EVEN),
    "stages": (1, {}, {"pipeline": 2, "fsdp": 2, "tensor": 2}, STORED),
}
KTO_MESHES = {"groups": (0, {}, {"data": 2, "context": 2}, EVEN), "stages": (1, {}, {"pipeline": 2, "fsdp": 2}, STORED)}


def make_batch(objective: str) -> Batch:
    """Return two microbatches. Those of kto have labels, and a reference below most models."""
    if objective == "kto":
        batch = toy.pairs(ROWS, LENGTH)
        labels = ((batch.segment_ids + 1) // 2 % 3 == 1).astype(np.float32)
        return toy.microbatches(replace(batch, labels=labels, reference=batch.reference - 6), 2)
    batch, random = toy.pairs(ROWS, LENGTH), np.random.default_rng(2)
    near_uniform = random.normal(-np.log(MODEL.vocabulary_size), 0.3, batch.tokens.shape).astype(np.float32)
    labels = np.take(random.normal(size=99).astype(np.float32), batch.segment_ids)
    return toy.microbatches(batch.replace(labels=labels, sampled=near_uniform, reference=near_uniform), 2)


def place(
    objective: str,
    zero: int = 0,
    sharding: dict[str, Any] | None = None,
    axes: dict[str, int] | None = None,
    pipelined: PipelineConfig = EVEN,
) -> tuple[Any, Any, Any, Params, Any]:
    """Return the model, its executor, the placement, the parameters and two microbatches."""
    axes = axes or {}
    placement = toy.placement(zero, **axes)
    placement = replace(placement, sharding=replace(placement.sharding, **(sharding or {})))
    model = Decoder(MODEL, loss_chunk=7, objective=OBJECTIVES[objective])
    stages, remat = axes.get("pipeline", 1), RematConfig("full")
    if stages > 1:
        model = stack_by_stage(model, stages, pipelined)
    executor = pipeline.make_executor(remat, pipelined) if stages > 1 else scan.make_executor(remat)
    params = toy.on_stages(model.specs, toy.params(Decoder(MODEL).specs))
    params = jax.device_put(params, parameter_sharding(model.specs, placement))
    batch = jax.device_put(make_batch(objective), placement.activation(None, "batch", "sequence"))
    return model, executor, placement, params, batch


def compute(*arguments: Any) -> tuple[np.ndarray, np.ndarray, int, Params]:
    model, executor, placement, params, batch = place(*arguments)
    frozen = jax.tree.map(lambda spec: None, model.specs)

    def run(params: Params, batch: Any) -> Any:
        count = model.objective.count(batch)
        weight = 1 / count.astype(jnp.float32)
        sums, gradients = executor.loss_and_gradients(model, params, frozen, batch, weight, placement)
        evaluated = executor.loss(model, params, batch, placement)
        found = executor.read_tokens(model.log_probabilities, model, params, batch, placement)
        return sums[OBJECTIVE], evaluated[OBJECTIVE], count, found, gradients

    jitted = jax.jit(run, compiler_options=compiler_options(placement.mesh, 2))
    loss, evaluated, count, found, gradients = jax.tree.map(np.asarray, jitted(params, batch))
    np.testing.assert_allclose(loss, evaluated, rtol=1e-5)
    by_layer = jax.tree.map(
        lambda spec, x: x.reshape(-1, *x.shape[3:])[np.argsort(np.ravel(spec.layers))] if spec.leading == 3 else x,
        model.specs,
        gradients,
    )
    return loss, found, int(count), by_layer


one_device = functools.cache(compute)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("objective", ["dpo", "grpo"])
def test_a_mesh_changes_nothing(objective: str, mesh: str) -> None:
    loss, found, count, gradients = compute(objective, *MESHES[mesh])
    expected_loss, expected, units, expected_gradients = one_device(objective)
    assert count == units
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    counts = np.asarray(make_batch(objective).loss_mask)
    np.testing.assert_allclose(found[counts], expected[counts], rtol=2e-5)
    assert_equal(gradients, expected_gradients)


@pytest.mark.parametrize("mesh", KTO_MESHES)
def test_the_divergence_is_that_of_all_devices(mesh: str) -> None:
    loss, _, count, gradients = compute("kto", *KTO_MESHES[mesh])
    expected_loss, _, pairs, expected_gradients = one_device("kto")
    assert count == pairs and expected_loss[REPORTED.index("kl")] > pairs
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_equal(gradients, expected_gradients)


def test_gradients_are_differences_of_the_loss() -> None:
    model, executor, placement, params, batch = place("dpo")
    _, _, pairs, gradients = one_device("dpo")
    # Along the gradient of each leaf the loss changes much more than its rounding.
    direction = jax.tree.map(lambda x: x / max(np.linalg.norm(x), 1e-30), gradients)
    expected = sum(float(np.sum(g * d)) for g, d in zip(*map(jax.tree.leaves, (gradients, direction)), strict=True))
    step, losses = 1e-3, []
    for sign in (1, -1):
        moved = jax.tree.map(lambda x, d, sign=sign: x + sign * step * d, params, direction)
        losses.append(float(executor.loss(model, moved, batch, placement)[OBJECTIVE][0]) / pairs)
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(expected, rel=1e-3)
