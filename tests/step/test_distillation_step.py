"""The step of a distillation: a teacher that no step changes, in every storage, and what it costs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import jax
import numpy as np
import pytest
import toy

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import (
    Config,
    DistillationConfig,
    MeshConfig,
    OptimizerConfig,
    PrecisionConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model.decoder_specs import pad_vocabulary_size, param_specs
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.run.initial_weights import open_teacher, read_frozen
from jaxopt_llm.step.program import Program, make_program
from jaxopt_llm.step.state import TrainState, checkpoint_specs, initialize_state, state_shardings
from jaxopt_llm.step.validation import validate

ROWS, LENGTH = 8, 24
TEACHER = replace(folders.CONFIG, pattern=("global",), layers=2, width=64)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder(tmp_path_factory.mktemp("teacher"), TEACHER, most=200_000)


def configure(teacher: Path, **settings: Any) -> Config:
    config = Config(
        model=toy.UNIFORM,
        training=TrainingConfig(steps=9, batch_size=ROWS, sequence_length=LENGTH, objective="distill", loss_chunk=16),
        distillation=DistillationConfig(teacher=str(teacher)),
        optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0),
        schedule=ScheduleConfig(warmup_steps=0, kind="constant"),
        precision=PrecisionConfig(compute_dtype="float32"),
        remat=RematConfig("full"),
        mesh=MeshConfig(fsdp=1),
    )
    return replace_fields(config, settings)


def make(config: Config) -> tuple[Program, Placement]:
    validate(config)
    mesh = make_mesh(config.mesh, jax.devices("cpu")[: config.mesh.devices])
    placement = Placement(mesh, config.sharding, config.precision)
    return make_program(config, placement), placement


def train(config: Config, steps: int, start: Any = None) -> tuple[list[dict[str, float]], TrainState]:
    """Return the metrics of each step and the last state. Check that the teacher stays as it is."""
    program, placement = make(config)
    given = None
    if start is not None:
        given = jax.device_put(start, state_shardings(program.specs, placement).masters)
    state = initialize_state(program.specs, program.optimizers, 0, placement, given)
    state = replace(state, teacher=read_frozen(open_teacher(config, 0), program.specs.teacher, placement))
    before = jax.tree.map(np.asarray, state.teacher)
    batch = jax.device_put(
        toy.microbatches(toy.packed(ROWS, LENGTH), config.training.accumulation), program.batch_sharding
    )
    records = []
    for _ in range(steps):
        state, metrics = program.step(state, batch)
        records.append({name: float(np.asarray(value)) for name, value in metrics.items()})
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.teacher), before)
    return records, state


@pytest.fixture(scope="module")
def on_one_device(teacher: Path) -> list[dict[str, float]]:
    return train(configure(teacher), 12)[0]


def test_a_student_comes_near_its_teacher(on_one_device: list[dict[str, float]]) -> None:
    records = on_one_device
    assert records[-1]["divergence"] < 0.7 * records[0]["divergence"]
    assert all(record["loss"] == record["divergence"] for record in records)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_student_that_is_its_teacher_learns_nothing(beta: float, teacher: Path) -> None:
    config = configure(teacher, model=TEACHER, **{"distillation.beta": beta, "training.accumulation": 2})
    (record,), _ = train(config, 1, folders.params(TEACHER))
    assert record["divergence"] == pytest.approx(0, abs=1e-6) and record["grad_norm"] < 1e-5
    assert record["next_token"] > 4


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_teacher_in_codes_is_near_the_teacher(
    base: str, teacher: Path, on_one_device: list[dict[str, float]]
) -> None:
    settings = {"distillation.teacher_base": base, "precision.compute_dtype": "bfloat16", "mesh.fsdp": 2}
    records, state = train(configure(teacher, **settings), 3)
    kinds = {type(leaf) for leaf in jax.tree.leaves(state.teacher, is_leaf=leaves.is_wrapped)}
    assert (leaves.Int8Weight if base == "int8" else leaves.Nf4Weight) in kinds
    exact = on_one_device[0]["divergence"]
    assert records[0]["divergence"] == pytest.approx(exact, rel=0.02 if base == "int8" else 0.1)
    assert abs(records[0]["divergence"] / exact - 1) > 1e-5


def test_adapters_learn_from_a_teacher(teacher: Path) -> None:
    records, _ = train(configure(teacher, **{"lora.rank": 2, "optimizer.learning_rate": 0.1}), 12)
    assert records[-1]["divergence"] < 0.95 * records[0]["divergence"]


def test_a_checkpoint_has_no_teacher(teacher: Path) -> None:
    program, _ = make(configure(teacher))
    saved = [path for path, _ in tree.leaves_with_path(checkpoint_specs(program.specs))]
    assert saved and not [path for path in saved if "teacher" in path]
    assert all("teacher" not in path for path, _ in tree.leaves_with_path(program.specs.masters))


def test_a_teacher_costs_its_forward_and_its_weights(teacher: Path) -> None:
    def compile_step(**settings: Any) -> tuple[float, int]:
        program, _ = make(configure(teacher, **settings))
        step = program.step.lower(program.state, program.batch).compile()
        return hlo.count_dot_flops(str(step.as_text())), hlo.read_memory(step).arguments

    flops, arguments = compile_step()
    without, fewer = compile_step(**{"training.objective": "next_token"})
    tokens, model = ROWS * LENGTH, TEACHER
    head = 2 * tokens * pad_vocabulary_size(model.vocabulary_size) * model.width
    heads = 2 * model.width * model.head_dim * (model.heads + model.kv_heads)
    products = 2 * tokens * model.layers * (heads + 3 * model.width * model.mlp_width)
    scores = 4 * tokens * model.layers * LENGTH * model.heads * model.head_dim
    assert head + products < flops - without <= head + products + scores
    held = sum(np.prod(spec.shape) for spec in jax.tree.leaves(param_specs(model)))
    assert arguments - fewer == pytest.approx(4 * held, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"distillation.teacher": "", "distillation.temperature": 2.0},
            "distillation.temperature=2.0: the probabilities that prepare --teacher keeps are those at temperature 1",
        ),
        (
            {"distillation.teacher": "", "data.content": "prompt"},
            "no data hold what a teacher says of answers that the model draws",
        ),
        ({"training.z_loss": 0.1}, "distill does not support training.z_loss=0.1: set --training.z-loss 0"),
        ({"optimizer.in_backward": True}, "distill does not support optimizer.in_backward=True"),
        ({"training.local_steps": 2}, "distill does not support training.local_steps=2"),
        ({"distillation.beta": 1.5}, "distillation.beta=1.5: must be at least 0 and at most 1"),
        ({"mesh.tensor": 8}, "distillation.teacher=.*: model.heads=4 is not divisible by mesh.tensor=8"),
        ({"mesh.pipeline": 3, "training.accumulation": 4}, "distillation.teacher=.*: mesh.pipeline=3 exceeds the 2"),
    ],
)
def test_what_a_distillation_does_not_support_is_refused(settings: dict[str, Any], message: str, teacher: Path) -> None:
    if "mesh.tensor" in settings:  # that the student supports
        settings = settings | {"model": replace(toy.UNIFORM, heads=8, kv_heads=8)}
    with pytest.raises(InputError, match=message):
        validate(configure(teacher, **settings))


def test_a_teacher_in_nf4_needs_whole_blocks(tmp_path: Path) -> None:
    narrow = folders.folder(tmp_path, replace(TEACHER, width=24))
    with pytest.raises(
        InputError, match="distillation.teacher_base=nf4: model.width=24 .* --distillation.teacher_base int8"
    ):
        validate(configure(narrow, **{"distillation.teacher_base": "nf4"}))
