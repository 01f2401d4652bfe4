"""Objectives over pairs on every mesh: losses, gradients and log-probabilities are those of one device.

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
from jaxopt_llm.config import PipelineConfig, PreferenceConfig, RematConfig
from jaxopt_llm.execution import pipeline, scan
from jaxopt_llm.execution.stage_layout import EVEN, stack_by_stage
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.objectives import Objective
from jaxopt_llm.model.objectives.judged import REPORTED, Judged
from jaxopt_llm.model.objectives.preference import Preference
from jaxopt_llm.parallel.zero import parameter_sharding

ROWS, LENGTH = 8, 48
MODEL = replace(toy.UNIFORM, layers=4)
SETTINGS = PreferenceConfig(beta=0.3, label_smoothing=0.1, nll_weight=0.5)
STORED = PipelineConfig("interleaved", 2, residuals="store")
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, int], PipelineConfig]] = {
    "fsdp, tensor": (3, {"sequence_parallel": True}, {"fsdp": 2, "tensor": 2}, EVEN),
    "data, context": (3, {"context_exchange": "ring"}, {"data": 2, "context": 2}, EVEN),
    "stages": (1, {}, {"pipeline": 2, "fsdp": 2, "tensor": 2}, STORED),
}
OBJECTIVES: dict[str, Objective] = {"dpo": Preference("dpo", SETTINGS), "kto": Judged(PreferenceConfig(beta=0.3))}
KTO_MESHES = {"groups": (0, {}, {"data": 2, "context": 2}, EVEN), "stages": (1, {}, {"pipeline": 2, "fsdp": 2}, STORED)}


def make_batch(objective: str) -> Batch:
    """Return two microbatches of pairs. Those of kto have labels, and a reference below most models."""
    batch = toy.pairs(ROWS, LENGTH)
    if objective == "kto":
        labels = ((batch.segment_ids + 1) // 2 % 3 == 1).astype(np.float32)
        batch = replace(batch, labels=labels, reference=batch.reference - 6)
    return toy.microbatches(batch, 2)


def place(
    zero: int = 0,
    sharding: dict[str, Any] | None = None,
    axes: dict[str, int] | None = None,
    pipelined: PipelineConfig = EVEN,
    objective: str = "dpo",
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
    batch = make_batch(objective)
    return (
        model,
        executor,
        placement,
        params,
        jax.device_put(batch, placement.activation(None, "batch", "sequence")),
    )


def compute(*arguments: Any, objective: str = "dpo") -> tuple[np.ndarray, np.ndarray, int, Params]:
    model, executor, placement, params, batch = place(*arguments, objective=objective)
    frozen = jax.tree.map(lambda spec: None, model.specs)

    def run(params: Params, batch: Any) -> Any:
        count = model.objective.count(batch)
        weight = 1 / count.astype(jnp.float32)
        loss, _, gradients = executor.loss_and_gradients(model, params, frozen, batch, weight, placement)
        evaluated, _ = executor.loss(model, params, batch, placement)
        found = executor.read_tokens(model.log_probabilities, model, params, batch, placement)
        return loss, evaluated, count, found, gradients

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
def test_a_mesh_changes_nothing(mesh: str) -> None:
    loss, found, count, gradients = compute(*MESHES[mesh])
    expected_loss, expected, pairs, expected_gradients = one_device()
    assert count == pairs
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    counts = np.asarray(toy.microbatches(toy.pairs(ROWS, LENGTH), 2).loss_mask)
    np.testing.assert_allclose(found[counts], expected[counts], rtol=2e-5)
    assert_equal(gradients, expected_gradients)


@pytest.mark.parametrize("mesh", KTO_MESHES)
def test_the_divergence_is_that_of_all_devices(mesh: str) -> None:
    loss, _, count, gradients = compute(*KTO_MESHES[mesh], objective="kto")
    expected_loss, _, pairs, expected_gradients = one_device(objective="kto")
    assert count == pairs and expected_loss[REPORTED.index("kl")] > pairs
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_equal(gradients, expected_gradients)


def test_gradients_are_differences_of_the_loss() -> None:
    model, executor, placement, params, batch = place()
    _, _, pairs, gradients = one_device()
    # Along the gradient of each leaf the loss changes much more than its rounding.
    direction = jax.tree.map(lambda x: x / max(np.linalg.norm(x), 1e-30), gradients)
    expected = sum(float(np.sum(g * d)) for g, d in zip(*map(jax.tree.leaves, (gradients, direction)), strict=True))
    step, losses = 1e-3, []
    for sign in (1, -1):
        moved = jax.tree.map(lambda x, d, sign=sign: x + sign * step * d, params, direction)
        losses.append(float(executor.loss(model, moved, batch, placement)[0][0]) / pairs)
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(expected, rel=1e-3)
