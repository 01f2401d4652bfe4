"""The step of an objective over pairs, with adapters: the reference is the model without them."""

import functools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import toy

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import (
    Config,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder_specs import pad_vocabulary_size
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.program import Program, make_program
from jaxopt_llm.step.state import initialize_state
from jaxopt_llm.step.validation import validate

ROWS, LENGTH = 8, 48
BASE = Config(
    model=replace(toy.UNIFORM, layers=4),
    training=TrainingConfig(
        steps=9, batch_size=ROWS, sequence_length=LENGTH, accumulation=2, objective="dpo", loss_chunk=16
    ),
    lora=LoraConfig(rank=2),
    optimizer=OptimizerConfig(learning_rate=2e-2, weight_decay=0.0),
    schedule=ScheduleConfig(warmup_steps=0, kind="constant"),
    precision=PrecisionConfig(compute_dtype="float32"),
    remat=RematConfig("full"),
    mesh=MeshConfig(fsdp=1),
)
ON_MESHES = {
    "fsdp, tensor": {"mesh.fsdp": 2, "mesh.tensor": 2},
    "stages": {
        "mesh.pipeline": 2,
        "mesh.fsdp": 2,
        "sharding.zero_stage": 1,
        "pipeline": PipelineConfig(residuals="store"),
    },
    "in bfloat16 and nf4": {"mesh.fsdp": 2, "precision.compute_dtype": "bfloat16", "lora.base": "nf4"},
}


def make(settings: dict[str, Any], compared: bool = False) -> tuple[Program, Placement]:
    config = replace_fields(BASE, {"preference.reference": "stored" if compared else "auto"} | settings)
    validate(config)
    mesh = make_mesh(config.mesh, jax.devices("cpu")[: config.mesh.devices])
    placement = Placement(mesh, config.sharding, config.precision)
    return make_program(config, placement), placement


def train(steps: int, compared: bool = False, **settings: Any) -> list[dict[str, float]]:
    """Train on pairs. compared: whether the batch has the log-probabilities of the initial model, from the corpus."""
    program, placement = make(settings, compared)
    state = initialize_state(program.specs, program.optimizers, 0, placement)
    frozen = jax.tree.map(np.asarray, state.frozen)
    batch = replace(toy.microbatches(toy.pairs(ROWS, LENGTH), 2), reference=None)
    if settings.get("training.objective") == "kto":
        batch = replace(batch, labels=((batch.segment_ids + 1) // 2 % 3 == 1).astype(np.float32))
    if compared:
        batch = replace(batch, reference=read_reference(batch))
    batch = jax.device_put(batch, program.batch_sharding)
    records = []
    for _ in range(steps):
        state, metrics = program.step(state, batch)
        records.append({name: float(np.asarray(value)) for name, value in metrics.items()})
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.frozen), frozen)
    return records


@functools.cache
def find_log_probabilities() -> np.ndarray:
    """Return those of the initial model without adapters, on one device."""
    program, placement = make({"lora.rank": 0})
    state = initialize_state(program.specs, program.optimizers, 0, placement)
    batch = toy.microbatches(toy.pairs(ROWS, LENGTH), 2)
    model, executor = program.model, program.executor
    found = jax.jit(functools.partial(executor.read_tokens, model.log_probabilities, model, placement=placement))
    return np.asarray(found(state.masters, jax.device_put(batch, program.batch_sharding)))


def read_reference(batch: Batch) -> np.ndarray:
    """Return the sum of the log-probabilities of each document at one of its counted tokens, as a corpus has it."""
    placed = np.zeros(batch.tokens.shape, np.float32)
    for row in np.ndindex(*batch.tokens.shape[:2]):
        for segment in range(1, int(batch.segment_ids[row].max()) + 1):
            (places,) = np.nonzero((batch.segment_ids[row] == segment) & batch.loss_mask[row])
            placed[row][places[-1]] = find_log_probabilities()[row][places].sum()
    return placed


@pytest.fixture(scope="module")
def on_one_device() -> list[dict[str, float]]:
    return train(6)


def test_the_margin_grows_from_zero(on_one_device: list[dict[str, float]]) -> None:
    """At first the adapters add nothing, so the model is its reference."""
    first, last = on_one_device[0], on_one_device[-1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/margin"] == pytest.approx(0, abs=1e-6)
    assert first["grad_norm"] > 0
    assert last["loss"] < 0.5 and last["rewards/margin"] > 0.3 and last["rewards/accuracy"] > 0.9


@pytest.mark.parametrize("mesh", ON_MESHES)
def test_a_mesh_trains_alike(mesh: str, on_one_device: list[dict[str, float]]) -> None:
    settings = ON_MESHES[mesh]
    found = train(6, **settings)
    if "lora.base" in settings:  # other weights, but the same arithmetic in both forwards
        assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert found[-1]["rewards/margin"] > 0.3
        return
    for name in ("loss", "grad_norm", "log_probabilities/chosen"):
        assert [each[name] for each in found] == pytest.approx([each[name] for each in on_one_device], rel=2e-4)


@pytest.mark.parametrize(
    ("settings", "compared", "reads"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"lora.rank": 0}, False, True),
        ({"training.trainable": ("*norm*",)}, False, True),
        ({"lora.pretrained": "runs/sft"}, False, True),
        ({"training.objective": "cpo"}, True, False),
        ({"training.objective": "cpo", "lora.rank": 0}, False, False),
    ],
)
def test_only_a_model_with_adapters_runs_its_reference(settings: dict[str, Any], compared: bool, reads: bool) -> None:
    """In all other cases a program with a reference reads it from the batch, also that of `plan`."""
    assert (make(settings, compared)[0].batch.reference is not None) == reads


@pytest.mark.parametrize("mesh", [None, "stages"])
def test_log_probabilities_of_the_corpus_take_the_place_of_the_forward(
    mesh: str | None, on_one_device: list[dict[str, float]]
) -> None:
    found = train(3, compared=True, **(ON_MESHES[mesh] if mesh else {}))
    for name in ("loss", "grad_norm", "rewards/margin"):
        expected = [each[name] for each in on_one_device[:3]]
        assert [each[name] for each in found] == pytest.approx(expected, rel=2e-4, abs=1e-5)
    assert found[2]["rewards/margin"] > 0.05


@pytest.mark.parametrize("mesh", [None, "stages"])
def test_a_function_takes_the_place_of_the_formula(
    mesh: str | None, on_one_device: list[dict[str, float]], tmp_path: Path
) -> None:
    file = tmp_path / "losses.py"
    file.write_text(
        "import jax\n"
        "def dpo(chosen, rejected):\n"
        "    margin = 0.1 * (chosen.gain - rejected.gain)\n"
        "    return -jax.nn.log_sigmoid(margin), {'margin': 7 * margin}\n"
    )
    found = train(3, **{"preference.function": f"{file}:dpo"}, **(ON_MESHES[mesh] if mesh else {}))
    for name in ("loss", "grad_norm", "rewards/margin"):
        expected = [each[name] for each in on_one_device[:3]]
        assert [each[name] for each in found] == pytest.approx(expected, rel=2e-4, abs=1e-5)
    assert found[2]["preference/margin"] == pytest.approx(7 * found[2]["rewards/margin"], rel=1e-5)


def test_judged_answers_are_learned_with_either_reference() -> None:
    """Desirable and undesirable answers gain and lose, also where the reference is in the corpus."""
    records, from_corpus = (train(4, compared=compared, **{"training.objective": "kto"}) for compared in (False, True))
    first, last = records[0], records[-1]
    assert first["loss"] == pytest.approx(0.5, abs=1e-6) and first["kl"] == pytest.approx(0, abs=1e-6)
    assert last["rewards/chosen"] > 0.05 > -0.05 > last["rewards/rejected"] and last["loss"] < 0.47
    for name in ("loss", "grad_norm", "kl", "rewards/margin"):
        expected = [each[name] for each in records]
        assert [each[name] for each in from_corpus] == pytest.approx(expected, rel=2e-4, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"lora.rank": 0, "mesh.fsdp": 2, "mesh.tensor": 2}, {"lora.rank": 2, "training.trainable": ("*norm*",)}],
)
def test_whole_weights_learn_to_prefer(settings: dict[str, Any]) -> None:
    """The reference is the initial model: the loss is that of the changes of the sums since then."""
    records = train(4, compared=True, **{"optimizer.learning_rate": 3e-3, **settings})
    assert records[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert records[0]["rewards/margin"] == pytest.approx(0, abs=1e-6)
    batch, side = toy.microbatches(toy.pairs(ROWS, LENGTH), 2), []
    for rejected in (0, 1):
        counted = batch.loss_mask & (batch.segment_ids > 0) & (batch.segment_ids % 2 != rejected)
        side.append(float(np.sum(find_log_probabilities()[counted])) / int(np.sum(batch.segment_ids.max(-1) // 2)))
    for record in records:
        rewards = [
            0.1 * (record[f"log_probabilities/{name}"] - of_reference)
            for name, of_reference in zip(("chosen", "rejected"), side, strict=True)
        ]
        assert [record["rewards/chosen"], record["rewards/rejected"]] == pytest.approx(rewards, abs=1e-5)
    assert records[-1]["loss"] < 0.69 and records[-1]["rewards/margin"] > 0.01


def test_the_reference_costs_a_forward_and_no_memory() -> None:
    def compile_step(objective: str, compared: bool = False) -> tuple[float, int]:
        program, _ = make({"training.objective": objective, "lora.targets": ("*/attention/*",)}, compared)
        step = program.step.lower(program.state, program.batch).compile()
        return hlo.count_dot_flops(str(step.as_text())), hlo.read_memory(step).peak

    (next_token, memory), (dpo, dpo_memory), (cpo, _) = map(compile_step, ("next_token", "dpo", "cpo"))
    model, tokens = BASE.model, ROWS * LENGTH
    head = 2 * tokens * pad_vocabulary_size(model.vocabulary_size) * model.width
    assert cpo - next_token == pytest.approx(head, rel=0.01)  # the log-probabilities
    per_layer = 2 * model.width * model.head_dim * (model.heads + model.kv_heads) + 3 * model.width * model.mlp_width
    products = 2 * tokens * model.layers * per_layer
    scores = 4 * tokens * model.layers * LENGTH * model.heads * model.head_dim
    assert head + products < dpo - cpo <= head + products + scores
    assert dpo_memory <= 1.15 * memory
    assert compile_step("dpo", compared=True)[0] == cpo


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training.z_loss": 0.1}, "dpo does not support training.z_loss=0.1: set --training.z-loss 0"),
        ({"model.mtp_layers": 1}, "dpo does not support model.mtp_layers=1: set --model.mtp-layers 0"),
    ],
)
def test_what_an_objective_does_not_support_is_refused(settings: dict[str, Any], message: str) -> None:
    assert any(re.search(message, each) for each in replace_fields(BASE, settings).problems())
