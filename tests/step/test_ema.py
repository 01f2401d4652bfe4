"""The average of a decoder's weights: with every way to update them, in evaluation, and in checkpoints."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from marks import slow

from jaxopt_llm.config import LoraConfig, OffloadConfig, OptimizerConfig, RematConfig, ScheduleConfig, TrainingConfig
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint
from jaxopt_llm.run.compile import make_held_out_loss
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step import update
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import TrainState

pytestmark = pytest.mark.core

ROWS, LENGTH, STEPS, DECAY = 8, 16, 4, 0.2


@dataclass(frozen=True)
class Setting:
    name: str
    mesh: dict[str, int]
    optimizer: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    lora: LoraConfig = LoraConfig()  # noqa: RUF009

    def __str__(self) -> str:
        return self.name

    @property
    def placement(self) -> Placement:
        return toy.placement(**self.mesh)

    def make_program(self, placement: Placement) -> Program:
        training = TrainingConfig(
            batch_size=ROWS, sequence_length=LENGTH, accumulation=self.accumulation, ema_decay=DECAY
        )
        optimizer = OptimizerConfig(learning_rate=1e-2, epsilon=1e-3, **self.optimizer)
        rest = (ScheduleConfig(warmup_steps=0), RematConfig("full"), self.lora)
        return toy.make_program(toy.UNIFORM, training, optimizer, *rest, placement)


WHOLE = Setting("all layers at once", {"zero_stage": 3, "fsdp": 4, "tensor": 2})
STAGES = Setting("on stages", {"zero_stage": 1, "pipeline": 2, "fsdp": 2}, accumulation=2)
SETTINGS = [
    WHOLE,
    STAGES,
    Setting("in the backward", {"zero_stage": 3, "fsdp": 2}, {"in_backward": True, "clip_norm": 0}),
    *slow(
        Setting("with codes", {"zero_stage": 2, "fsdp": 2}, {"state_dtype": "int8"}),
        Setting("of adapters", {"zero_stage": 3, "fsdp": 2}, lora=LoraConfig(rank=2, base="nf4", dora=True)),
    ),
]


def begin(program: Program, placement: Placement) -> TrainState:
    return training_state.initialize_state(program.specs, program.optimizers, 0, placement)


def make_batch(program: Program, step: int, accumulation: int = 1) -> Any:
    batch = toy.microbatches(toy.packed(ROWS, LENGTH, seed=step), accumulation)
    return jax.device_put(batch, program.batch_sharding)


def read(program: Program, state: TrainState) -> Any:
    return jax.tree.map(np.array, program.to_checkpoint(state))


def resume(program: Program, placement: Placement, trees: Any) -> TrainState:
    abstract = abstract_checkpoint(training_state.checkpoint_specs(program.specs), placement)
    arrays = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), trees, abstract)
    return training_state.resume_state(program.specs, STEPS, placement, **arrays)


def train(setting: Setting) -> tuple[Program, TrainState]:
    program = setting.make_program(setting.placement)
    state = begin(program, setting.placement)
    for step in range(STEPS):
        state, _ = program.step(state, make_batch(program, step, setting.accumulation))
    return program, state


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_close(one: Any, other: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), one, other)


def test_the_decay_grows_to_its_setting() -> None:
    weights = [float(update.new_weight(0.9999, jnp.int32(updates))) for updates in (0, 1, 10, 1000, 10**6)]
    assert weights == pytest.approx([9 / 10, 9 / 11, 9 / 20, 9 / 1010, 1e-4], rel=1e-6)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_average_is_that_of_numpy(setting: Setting) -> None:
    program = setting.make_program(setting.placement)
    state = begin(program, setting.placement)
    trees = read(program, state)
    assert_equal(trees["average"], trees["masters"])
    expected = trees["masters"]
    for step in range(STEPS):
        state, _ = program.step(state, make_batch(program, step, setting.accumulation))
        trees, decay = read(program, state), min(DECAY, (1 + step) / (10 + step))
        expected = jax.tree.map(
            lambda old, new, decay=decay: decay * old + (1 - decay) * new, expected, trees["masters"]
        )
    assert_close(trees["average"], expected)
    assert not all(map(np.array_equal, jax.tree.leaves(trees["average"]), jax.tree.leaves(trees["masters"])))


@pytest.mark.parametrize("setting", [WHOLE, STAGES], ids=str)
def test_evaluation_and_samples_read_the_average(setting: Setting) -> None:
    placement, (program, state) = setting.placement, train(setting)
    trees = read(program, state)
    used = training_state.use_average(state, program.specs, placement)
    assert_equal(read(program, used)["masters"], trees["average"])
    # A state whose masters are the average, made by a resume, has the same loss.
    swapped = resume(program, placement, trees | {"masters": trees["average"], "average": trees["masters"]})
    held_out = make_held_out_loss(program.model, program.executor, placement)
    batch = make_batch(program, 100, setting.accumulation)
    found, expected, trained = (float(held_out(each, batch)[0]) for each in (used, swapped, state))
    assert found == expected != trained
    target = toy.placement(zero_stage=3, fsdp=placement.mesh.size)
    reader = training_state.make_weight_reader(program.specs, placement, target)
    assert_equal(jax.tree.map(np.asarray, reader(state)), toy.by_layer(trees["average"]))


def test_stages_continue_the_average_of_one_stage_to_the_bit_and_back() -> None:
    program, state = train(WHOLE)
    trees = read(program, state)
    staged = STAGES.make_program(STAGES.placement)
    on_stages = resume(staged, STAGES.placement, trees)
    assert_equal(read(staged, on_stages)["average"], trees["average"])
    back = resume(program, WHOLE.placement, read(staged, on_stages))
    assert_equal(read(program, back)["average"], trees["average"])


def test_the_average_starts_as_the_weights_that_a_run_starts_from() -> None:
    program = WHOLE.make_program(WHOLE.placement)
    shardings = training_state.state_shardings(program.specs, WHOLE.placement)
    given = jax.tree.map(jax.device_put, toy.params(program.specs.masters), shardings.masters)
    state = training_state.initialize_state(program.specs, program.optimizers, 0, WHOLE.placement, given)
    assert_equal(read(program, state)["average"], toy.params(program.specs.masters))
    program.step(state, make_batch(program, 0))  # the average is no alias of the masters, which are donated


def test_an_offloaded_average_is_that_on_the_device() -> None:
    program, state = train(WHOLE)
    offloaded = Placement(
        *(WHOLE.placement.mesh, WHOLE.placement.sharding, WHOLE.placement.precision), OffloadConfig(optimizer=True)
    )
    other = WHOLE.make_program(offloaded)
    found = begin(other, offloaded)
    for step in range(STEPS):
        found, _ = other.step(found, make_batch(other, step))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found.average)}
    assert kinds == {"pinned_host"}
    expected, average = (read(*pair)["average"] for pair in ((program, state), (other, found)))
    assert_close(average, expected)
    used = training_state.use_average(found, other.specs, offloaded)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(used.masters)} == {"device"}
