"""Objectives over scores on every mesh: losses and gradients are those of one device."""

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
from jaxopt_llm.model.model import OBJECTIVE, Params
from jaxopt_llm.model.objectives import Objective
from jaxopt_llm.model.objectives.scores import Classify, Reward
from jaxopt_llm.parallel.zero import parameter_sharding

ROWS, LENGTH, CLASSES = 8, 48, 3
STORED = PipelineConfig("interleaved", 2, residuals="store")
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, int], PipelineConfig]] = {
    "fsdp, tensor": (3, {"sequence_parallel": True}, {"fsdp": 2, "tensor": 2}, EVEN),
    "data, context": (3, {"context_exchange": "ring"}, {"data": 2, "context": 2}, EVEN),
    "stages": (1, {}, {"pipeline": 2, "fsdp": 2, "tensor": 2}, STORED),
}
OBJECTIVES: dict[str, Objective] = {
    "reward": Reward(PreferenceConfig(center_weight=0.1)),
    "classify": Classify(CLASSES),
    "numbers": Classify(1),
}


def make_batch(name: str) -> Batch:
    """Return two microbatches of documents with labels."""
    batch = toy.pairs(ROWS, LENGTH)
    of_documents = np.arange(1 + int(np.max(batch.segment_ids)), dtype=np.float32) % CLASSES
    labels = of_documents[np.asarray(batch.segment_ids)] / (1 if name == "classify" else 2)
    return toy.microbatches(replace(batch, reference=None, labels=labels), 2)


def compute(
    name: str,
    zero: int = 0,
    sharding: dict[str, Any] | None = None,
    axes: dict[str, int] | None = None,
    pipelined: PipelineConfig = EVEN,
) -> tuple[np.ndarray, int, Params]:
    """Return the sums of an objective, the number of its units, and the gradients by layer."""
    axes = axes or {}
    placement = toy.placement(zero, **axes)
    placement = replace(placement, sharding=replace(placement.sharding, **(sharding or {})))
    config = replace(toy.UNIFORM, layers=4, logit_scale=3.0, scores=CLASSES if name == "classify" else 1)
    plain = model = Decoder(config, objective=OBJECTIVES[name])
    stages, remat = axes.get("pipeline", 1), RematConfig("full")
    if stages > 1:
        model = stack_by_stage(model, stages, pipelined)
    executor = pipeline.make_executor(remat, pipelined) if stages > 1 else scan.make_executor(remat)
    params = jax.device_put(
        toy.on_stages(model.specs, toy.params(plain.specs)), parameter_sharding(model.specs, placement)
    )
    batch = jax.device_put(make_batch(name), placement.activation(None, "batch", "sequence"))
    frozen = jax.tree.map(lambda spec: None, model.specs)

    def run(params: Params, batch: Any) -> Any:
        count = model.objective.count(batch)
        weight = 1 / count.astype(jnp.float32)
        sums, gradients = executor.loss_and_gradients(model, params, frozen, batch, weight, placement)
        return sums[OBJECTIVE], executor.loss(model, params, batch, placement)[OBJECTIVE], count, gradients

    jitted = jax.jit(run, compiler_options=compiler_options(placement.mesh, 2))
    loss, evaluated, count, gradients = jax.tree.map(np.asarray, jitted(params, batch))
    np.testing.assert_allclose(loss, evaluated, rtol=1e-5)
    by_layer = jax.tree.map(
        lambda spec, x: x.reshape(-1, *x.shape[3:])[np.argsort(np.ravel(spec.layers))] if spec.leading == 3 else x,
        model.specs,
        gradients,
    )
    return loss, int(count), by_layer


one_device = functools.cache(compute)


@pytest.mark.parametrize(
    ("name", "mesh"), [("reward", "stages"), ("numbers", "data, context"), *(("classify", mesh) for mesh in MESHES)]
)
def test_a_mesh_changes_nothing(name: str, mesh: str) -> None:
    loss, count, gradients = compute(name, *MESHES[mesh])
    expected_loss, units, expected_gradients = one_device(name)
    assert count == units
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert np.linalg.norm(expected_gradients["non_layer"]["score"]["table"]) > 0
    assert_equal(gradients, expected_gradients)
