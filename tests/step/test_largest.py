"""Largest magnitudes of the masters, which the update finds and fp8 rounds the weights with."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
import toy
from marks import slow

from jaxopt_llm.config import LoraConfig, OptimizerConfig, PrecisionConfig, RematConfig, ScheduleConfig, TrainingConfig
from jaxopt_llm.core import tree
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint
from jaxopt_llm.step import program as run_program
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import TrainState

pytestmark = pytest.mark.core

ROWS, LENGTH, STEPS = 8, 16, 3


@dataclass(frozen=True)
class Setting:
    name: str
    mesh: dict[str, int]
    unroll: str = "none"
    accumulation: int = 1
    trainable: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def placement(self) -> Placement:
        return replace(toy.placement(**self.mesh), precision=PrecisionConfig(compute_dtype="float32", matmul="fp8"))

    def make_program(self) -> Program:
        training = TrainingConfig(
            batch_size=ROWS,
            sequence_length=LENGTH,
            accumulation=self.accumulation,
            unroll=self.unroll,  # type: ignore[arg-type]
            trainable=self.trainable,
        )
        lora = LoraConfig(rank=2, targets=("query",)) if self.trainable else LoraConfig()
        rest = (OptimizerConfig(learning_rate=1e-2), ScheduleConfig(warmup_steps=0), RematConfig("full"), lora)
        return toy.make_program(toy.CONFIG, training, *rest, self.placement)


SETTINGS = [
    Setting("whole stacks", {"zero_stage": 3, "fsdp": 2, "tensor": 2}),
    *slow(
        Setting("unrolled", {"zero_stage": 0}, unroll="all"),
        Setting("next to adapters", {"zero_stage": 0, "data": 2}, trainable=("*/mlp/*",)),
    ),
]


def begin(program: Program, setting: Setting) -> TrainState:
    return training_state.initialize_state(program.specs, program.optimizers, 0, setting.placement)


def train(program: Program, setting: Setting, state: TrainState, first: int, steps: int) -> tuple[TrainState, list]:
    losses = []
    for step in range(first, first + steps):
        batch = toy.microbatches(toy.packed(ROWS, LENGTH, seed=step), setting.accumulation)
        state, metrics = program.step(state, jax.device_put(batch, program.batch_sharding))
        losses.append(float(metrics["loss"]))
    return state, losses


def read(program: Program, state: TrainState) -> Any:
    return jax.tree.map(np.array, program.to_checkpoint(state))


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_largest_of_masters(program: Program, state: TrainState) -> None:
    """The first trained matrix of the layers of each shape has its magnitude, equal to the bit, and no adapter has."""
    specs = dict(tree.leaves_with_path(program.specs.largest))
    masters, found = dict(tree.leaves_with_path(state.masters)), dict(tree.leaves_with_path(state.largest))
    trained = dict(tree.leaves_with_path(program.specs.masters))
    matrices = [path for path, spec in trained.items() if spec.leading and spec.contracting and "lora_" not in path]
    assert found.keys() == set({trained[path].shape: path for path in reversed(matrices)}.values()) != set()
    for path, largest in found.items():
        master, leading = np.array(masters[path]), specs[path].leading
        expected = np.max(np.abs(master), axis=tuple(range(leading, master.ndim)))
        np.testing.assert_array_equal(np.array(largest), expected)


@pytest.mark.slow
def test_stages_find_magnitudes_themselves() -> None:
    setting = Setting("on stages", {"zero_stage": 3, "pipeline": 2, "fsdp": 2}, accumulation=2)
    program = setting.make_program()
    assert program.specs.largest is None
    _, losses = train(program, setting, begin(program, setting), 0, STEPS)
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_known_magnitudes_change_no_bit(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    program = setting.make_program()
    state = begin(program, setting)
    assert_largest_of_masters(program, state)
    state, losses = train(program, setting, state, 0, STEPS)
    assert_largest_of_masters(program, state)
    monkeypatch.setattr(run_program, "_keeps_largest", lambda config, placement: False)
    plain = setting.make_program()
    other, expected = train(plain, setting, begin(plain, setting), 0, STEPS)
    assert other.largest is None
    assert losses == expected
    assert_equal(read(program, state), read(plain, other))


def test_a_resume_finds_them_in_the_masters() -> None:
    setting = SETTINGS[0]
    program = setting.make_program()
    state, _ = train(program, setting, begin(program, setting), 0, STEPS)
    saved = read(program, state)
    assert "largest" not in saved
    whole, expected = train(program, setting, state, STEPS, 2)
    abstract = abstract_checkpoint(training_state.checkpoint_specs(program.specs), setting.placement)
    arrays = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), saved, abstract)
    resumed = training_state.resume_state(program.specs, STEPS, setting.placement, **arrays)
    assert_largest_of_masters(program, resumed)
    resumed, losses = train(program, setting, resumed, STEPS, 2)
    assert losses == expected
    assert_equal(read(program, resumed), read(program, whole))


@pytest.mark.parametrize(
    ("matmul", "mesh"), [("compute_dtype", {"zero_stage": 3}), ("fp8", {"zero_stage": 2, "fsdp": 2})], ids=str
)
def test_a_state_without_masters_to_round_has_none(matmul: Any, mesh: dict[str, int]) -> None:
    """With ZeRO 1 and 2 the model reads a copy, whose largest value may be another."""
    placement = replace(toy.placement(**mesh), precision=PrecisionConfig(matmul=matmul))
    rest = (TrainingConfig(), OptimizerConfig(), ScheduleConfig(), RematConfig(), LoraConfig())
    assert toy.make_program(toy.UNIFORM, *rest, placement).specs.largest is None
