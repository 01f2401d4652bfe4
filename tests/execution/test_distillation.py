"""The loss and the gradients of a distillation: those of a decoder in float64, on one device and on every mesh."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import jax
import numpy as np
import pytest
import reference
import toy
from test_matrix import assert_equal

from jaxopt_llm.compiler.xla_options import compiler_options
from jaxopt_llm.config import (
    Config,
    DistillationConfig,
    MeshConfig,
    PipelineConfig,
    PrecisionConfig,
    RematConfig,
    RopeConfig,
    TrainingConfig,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.run.compile import make_held_out_loss
from jaxopt_llm.run.initial_weights import open_teacher, read_frozen
from jaxopt_llm.step.program import Program, make_program
from jaxopt_llm.step.state import TrainState, initialize_state, state_shardings
from jaxopt_llm.step.step import differentiate_decoder
from jaxopt_llm.step.validation import validate

ROWS, LENGTH = 8, 24
STUDENT = replace(toy.UNIFORM, layers=4)
# Another width, depth, kind of block and head, and more ids: the tables of both are padded differently.
TEACHER = replace(folders.CONFIG, pattern=("global",), layers=2, vocabulary_size=400, rope=RopeConfig(theta=100.0))
SETTINGS = {"beta": 0.3, "temperature": 1.5, "next_token_weight": 0.5}
MESHES: dict[str, dict[str, Any]] = {
    "fsdp, tensor": {"mesh.fsdp": 2, "mesh.tensor": 2, "sharding.sequence_parallel": True},
    "data, context": {"mesh.data": 2, "mesh.context": 2},
    "replicas of stage 1": {"mesh.data": 2, "mesh.fsdp": 2, "sharding.zero_stage": 1},
    "stages": {
        "mesh.pipeline": 2,
        "mesh.fsdp": 2,
        "mesh.tensor": 2,
        "sharding.zero_stage": 1,
        "pipeline": PipelineConfig(residuals="store"),
    },
    "a teacher on the host": {"mesh.fsdp": 2, "offload.parameters": True},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder(tmp_path_factory.mktemp("teacher"), TEACHER)


def configure(teacher: Path, **settings: Any) -> Config:
    config = Config(
        model=STUDENT,
        training=TrainingConfig(
            steps=9, batch_size=ROWS, sequence_length=LENGTH, accumulation=2, objective="distill", loss_chunk=7
        ),
        distillation=DistillationConfig(teacher=str(teacher), **SETTINGS),
        precision=PrecisionConfig(compute_dtype="float32"),
        remat=RematConfig("full"),
        mesh=MeshConfig(fsdp=1),
    )
    return replace_fields(config, settings)


def start(config: Config) -> tuple[Program, Placement, TrainState, Any]:
    """Return the program, its placement, its state and a batch."""
    validate(config)
    mesh = make_mesh(config.mesh, jax.devices("cpu")[: config.mesh.devices])
    placement = Placement(mesh, config.sharding, config.precision, config.offload)
    program = make_program(config, placement)
    given = toy.on_stages(program.specs.masters, toy.params(param_specs(config.model)))
    given = jax.device_put(given, state_shardings(program.specs, placement).masters)
    state = initialize_state(program.specs, program.optimizers, 0, placement, given)
    state = replace(state, teacher=read_frozen(open_teacher(config, 0), program.specs.teacher, placement))
    batch = toy.microbatches(toy.packed(ROWS, LENGTH), config.training.accumulation)
    return program, placement, state, jax.device_put(batch, program.batch_sharding)


def compute(config: Config) -> tuple[dict[str, float], Params]:
    """Return the loss with the metrics, and the gradients by layer."""
    program, placement, state, batch = start(config)
    differentiate = differentiate_decoder(program.model, program.executor, placement, None, program.teacher)

    def run(state: TrainState, batch: Any) -> Any:
        found = differentiate(state, batch, 1.0)
        return found.loss, found.metrics, found.gradients

    options = dict(compiler_options(placement.mesh, config.training.accumulation)) | toy.QUICK_COMPILE
    loss, metrics, gradients = jax.tree.map(np.asarray, jax.jit(run, compiler_options=options)(state, batch))
    measure = make_held_out_loss(program.model, program.executor, placement, teacher=program.teacher)
    held_out, count = measure.lower(state, batch).compile(toy.QUICK_COMPILE)(state, batch)
    np.testing.assert_allclose(np.asarray(held_out)[0] / int(count), loss, rtol=1e-5)
    by_layer = jax.tree.map(
        lambda spec, x: x.reshape(-1, *x.shape[3:])[np.argsort(np.ravel(spec.layers))] if spec.leading == 3 else x,
        program.specs.masters,
        gradients,
    )
    return {"loss": loss} | metrics, by_layer


def expected(temperature: float, beta: float, next_token_weight: float) -> tuple[dict[str, float], Params]:
    """Return the same in float64, by TRL's formula for `generalized_jsd_loss`."""
    batch = toy.packed(ROWS, LENGTH)
    configs = {"student": toy.reference_config(STUDENT), "teacher": toy.reference_config(TEACHER)}
    params = {"student": toy.params(param_specs(STUDENT)), "teacher": folders.params(TEACHER)}
    where = (batch.segment_ids, batch.positions)
    of_teacher = reference.logits(params["teacher"], configs["teacher"], batch.tokens, *where)
    outs, _, backward = reference.decoder(
        params["student"], configs["student"], batch.tokens, *where, batch.loss_mask, []
    )
    (student,), count = outs, np.sum(batch.loss_mask)
    classes = STUDENT.vocabulary_size

    def normalise(logits: np.ndarray) -> np.ndarray:
        shifted = (logits - logits.max(axis=-1, keepdims=True)) / temperature
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    log_p, log_q = normalise(student[..., :classes]), normalise(of_teacher[..., :classes])
    p, q = np.exp(log_p), np.exp(log_q)
    log_m = np.log((1 - beta) * p + beta * q) if 0 < beta < 1 else log_q if beta else log_p
    if beta == 0:
        of_class, slope = q * (log_q - log_p), -q / p
    else:
        share = 1 - beta if beta < 1 else 1.0
        of_class, slope = share * p * (log_p - log_m), share * (log_p - log_m)
        of_class = of_class + beta * q * (log_q - log_m) * (beta < 1)
    mask = batch.loss_mask[..., None]
    d_out = np.zeros_like(student)
    d_out[..., :classes] = mask * p * (slope - np.sum(p * slope, axis=-1, keepdims=True)) / temperature
    cross_entropy, d_cross_entropy = reference.cross_entropy(student, batch.targets, batch.loss_mask)
    divergence = np.sum(of_class * mask)
    gradients = backward([(d_out + next_token_weight * d_cross_entropy) / count])
    means = {"divergence": divergence / count, "next_token": cross_entropy / count}
    return {"loss": means["divergence"] + next_token_weight * means["next_token"]} | means, gradients


def check(found: tuple[dict[str, float], Params], wanted: tuple[dict[str, float], Params]) -> None:
    assert found[0].keys() == wanted[0].keys()
    for name, value in wanted[0].items():
        assert found[0][name] == pytest.approx(value, rel=1e-5)
    assert_equal(found[1], wanted[1])


@functools.cache
def on_one_device(teacher: Path) -> tuple[dict[str, float], Params]:
    return compute(configure(teacher))


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_kl_divergence_is_that_of_the_formula(teacher: Path, beta: float) -> None:
    settings = {"beta": beta, "temperature": 1.0, "next_token_weight": 0.0}
    given = {f"distillation.{name}": value for name, value in settings.items()}
    check(compute(configure(teacher, **given)), expected(**settings))


def test_the_jensen_shannon_divergence_is_that_of_the_formula(teacher: Path) -> None:
    check(on_one_device(teacher), expected(**SETTINGS))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_changes_nothing(mesh: str, teacher: Path) -> None:
    check(compute(configure(teacher, **MESHES[mesh])), on_one_device(teacher))
