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
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.run.compile import make_held_out_loss
from jaxopt_llm.run.initial_weights import open_teacher, read_frozen
from jaxopt_llm.step.program import Program, StoredTeacher, make_program
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


def start(config: Config, top_k: int = 0) -> tuple[Program, Placement, TrainState, Any]:
    """Return the program, its placement, its state and a batch. top_k: number of stored tokens; 0: a teacher runs."""
    validate(config)
    mesh = make_mesh(config.mesh, jax.devices("cpu")[: config.mesh.devices])
    placement = Placement(mesh, config.sharding, config.precision, config.offload)
    program = make_program(config, placement, stored=StoredTeacher(top_k, TEACHER.vocabulary_size))
    given = toy.on_stages(program.specs.masters, toy.params(param_specs(config.model)))
    given = jax.device_put(given, state_shardings(program.specs, placement).masters)
    state = initialize_state(program.specs, program.optimizers, 0, placement, given)
    rows = toy.packed(ROWS, LENGTH)
    if top_k:
        rows = store(rows, top_k)
    else:
        state = replace(state, teacher=read_frozen(open_teacher(config, 0), program.specs.teacher, placement))
    batch = toy.microbatches(rows, config.training.accumulation)
    return program, placement, state, jax.device_put(batch, program.batch_sharding)


def store(batch: Batch, top_k: int) -> Batch:
    """Return the batch with what the teacher says of it, in float32."""
    log_q = log_softmax(read_teacher(batch))
    ids = np.argsort(-log_q, axis=-1)[..., :top_k]
    kept = np.take_along_axis(log_q, ids, axis=-1)
    with np.errstate(divide="ignore"):
        rest = np.log(
            np.maximum(1 - np.exp(kept).sum(axis=-1, keepdims=True), 0) if top_k < 400 else np.zeros((1, 1, 1))
        )
    rest = np.broadcast_to(rest, (*kept.shape[:-1], 1))
    found = np.concatenate([kept, rest], axis=-1).astype(np.float32)
    return batch.replace(teacher_ids=ids.astype(np.int32), teacher_log_probabilities=found)


def read_teacher(batch: Batch) -> np.ndarray:
    """Return the logits of the teacher in float64."""
    params, config = folders.params(TEACHER), toy.reference_config(TEACHER)
    return reference.logits(params, config, batch.tokens, batch.segment_ids, batch.positions)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def compute(config: Config, top_k: int = 0) -> tuple[dict[str, float], Params]:
    """Return the loss with the metrics, and the gradients by layer."""
    program, placement, state, batch = start(config, top_k)
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
    config, params = toy.reference_config(STUDENT), toy.params(param_specs(STUDENT))
    where = (batch.segment_ids, batch.positions)
    of_teacher = read_teacher(batch)
    outs, _, backward = reference.decoder(params, config, batch.tokens, *where, batch.loss_mask, [])
    (student,), count = outs, np.sum(batch.loss_mask)
    classes = STUDENT.vocabulary_size

    log_p, log_q = (log_softmax(each[..., :classes] / temperature) for each in (student, of_teacher))
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


# --- What the data hold of a teacher


STORED = {"distillation.teacher": "", "distillation.temperature": 1.0}


@functools.cache
def of_some_tokens() -> tuple[dict[str, float], Params]:
    return compute(configure(Path(), **STORED), 6)


def test_all_tokens_of_a_teacher_are_the_teacher() -> None:
    """The teacher has ids that the student has not: they get no probability, as of a teacher on the devices."""
    check(compute(configure(Path(), **STORED), TEACHER.vocabulary_size), expected(**SETTINGS | {"temperature": 1.0}))


@pytest.mark.parametrize("mesh", ["data, context", "stages"])
def test_a_mesh_changes_nothing_of_stored_tokens(mesh: str) -> None:
    check(compute(configure(Path(), **MESHES[mesh], **STORED), 6), of_some_tokens())


def test_the_rest_is_one_of_the_outcomes() -> None:
    """The loss of a few tokens and the rest is below that of all tokens, and follows the formula."""
    batch = store(toy.packed(ROWS, LENGTH), 6)
    params = toy.params(param_specs(STUDENT)), toy.reference_config(STUDENT)
    log_p = log_softmax(reference.logits(*params, batch.tokens, batch.segment_ids, batch.positions)[..., :258])
    q = np.exp(batch.teacher_log_probabilities.astype(np.float64))
    known = batch.teacher_ids < 258
    q[..., :-1] *= known
    q /= q.sum(axis=-1, keepdims=True)
    p = np.exp(np.take_along_axis(log_p, np.where(known, batch.teacher_ids, 0), axis=-1)) * known
    p = np.concatenate([p, 1 - p.sum(axis=-1, keepdims=True)], axis=-1)
    beta, mixture = SETTINGS["beta"], (1 - SETTINGS["beta"]) * p + SETTINGS["beta"] * q

    def kl(first: np.ndarray) -> np.ndarray:
        return np.sum(first * np.log(np.where(first > 0, first, 1) / np.where(mixture > 0, mixture, 1)), axis=-1)

    loss = np.mean((beta * kl(q) + (1 - beta) * kl(p))[batch.loss_mask])
    assert of_some_tokens()[0]["divergence"] == pytest.approx(loss, abs=1e-6)
    assert loss < 0.9 * expected(**SETTINGS | {"temperature": 1.0})[0]["divergence"]


def test_updates_in_the_backward_learn_the_same() -> None:
    masters = []
    for in_backward in (False, True):
        given = {"optimizer.in_backward": in_backward, "optimizer.clip_norm": 0.0, "training.accumulation": 1}
        program, _, state, batch = start(configure(Path(), **STORED, **given), 6)
        masters.append(jax.tree.map(np.asarray, program.step(state, batch)[0].masters))
    jax.tree.map(lambda found, wanted: np.testing.assert_allclose(found, wanted, atol=1e-6), *reversed(masters))
