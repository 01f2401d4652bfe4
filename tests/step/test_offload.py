"""Tests of parameters in host memory: bitwise the same training as on the device."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import toy

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import (
    CheckpointConfig,
    LoraConfig,
    OffloadConfig,
    OptimizerConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.offload import HOST
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint
from jaxopt_llm.run.compile import make_held_out_loss, measure_loss
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import TrainState

MODEL = replace(toy.CONFIG, layers=2, pattern=("global",))
PLACED: dict[str, dict[str, Any]] = {
    "one device": {},
    "zero1": {"zero_stage": 1, "fsdp": 2},
    "zero3": {"zero_stage": 3, "fsdp": 4, "tensor": 2},
    "pipeline": {"zero_stage": 3, "pipeline": 2, "fsdp": 2},
    "pipeline of copies": {"zero_stage": 1, "pipeline": 2, "fsdp": 2},
}
TRAINED = {
    "parameters": LoraConfig(),
    "adapters": LoraConfig(rank=2),
    "adapters over int8": LoraConfig(rank=2, base="int8"),
}


@functools.cache
def program(trained: str, placed: str, offload: OffloadConfig, accumulation: int = 1) -> tuple[Program, Placement]:
    placement = replace(toy.placement(**PLACED[placed]), offload=offload)
    training = TrainingConfig(batch_size=8, sequence_length=16, accumulation=accumulation)
    arguments = (OptimizerConfig(name="sgd"), ScheduleConfig(1, 10), RematConfig(), TRAINED[trained], placement)
    return toy.make_program(MODEL, training, *arguments), placement


def batch(of: Program, seed: int) -> Any:
    return jax.device_put(toy.microbatches(toy.packed(8, 16, seed), of.batch.tokens.shape[0]), of.batch_sharding)


def begin(of: Program, placement: Placement) -> TrainState:
    return training_state.initialize_state(of.specs, of.optimizers, 0, placement)


def memories(leaves: Params) -> dict[str, set[str]]:
    """Return the memory kinds of the parameters in "non_layer", and of the stacks."""
    kinds: dict[str, set[str]] = {"non_layer": set(), "stacks": set()}
    for section, each in leaves.items():
        found = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(each)}
        kinds["non_layer" if section == "non_layer" else "stacks"] |= found
    return kinds


@pytest.mark.parametrize(
    ("trained", "placed", "accumulation", "optimizer"),
    [
        ("parameters", "zero1", 1, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("adapters over int8", "zero3", 1, False),
                ("parameters", "one device", 1, False),
                ("parameters", "zero3", 2, False),
                ("adapters", "zero1", 2, False),
                ("adapters", "pipeline", 2, False),
                ("parameters", "pipeline of copies", 2, True),
            )
        ),
    ],
)
def test_on_the_host_they_train_the_same_to_the_bit_and_resume(
    trained: str, placed: str, accumulation: int, optimizer: bool, tmp_path: Path
) -> None:
    offloaded = program(trained, placed, OffloadConfig(optimizer, parameters=True), accumulation)
    on_device = program(trained, placed, OffloadConfig(), accumulation)

    def after(of: Program, state: TrainState, *seeds: int) -> TrainState:
        for seed in seeds:
            state, _ = of.step(state, batch(of, seed))
        return state

    start = begin(*offloaded)
    on_device_shardings = training_state.state_shardings(on_device[0].specs, on_device[1])
    wanted = after(on_device[0], jax.device_put(start, on_device_shardings, may_alias=False), 0, 1)
    first = after(offloaded[0], start, 0)
    base = first.trainable if trained == "parameters" else first.frozen
    assert memories(base) == {"non_layer": {"device"}, "stacks": {HOST}}
    if trained != "parameters":
        assert memories(first.trainable)["stacks"] == {"device"}, "adapters"
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(1, offloaded[0].to_checkpoint(first), {})
    found = offloaded[0].to_checkpoint(after(offloaded[0], first, 1))
    wanted = on_device[0].to_checkpoint(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)

    of, placement = offloaded
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(1, **abstract_checkpoint(training_state.checkpoint_specs(of.specs), placement))
    state = training_state.resume_state(of.specs, 1, placement, **restored)
    assert memories(state.trainable if trained == "parameters" else state.frozen)["stacks"] == {HOST}
    resumed = of.to_checkpoint(after(of, state, 1))
    jax.tree.map(np.testing.assert_array_equal, resumed, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_program", [2**30, 1000])
@pytest.mark.slow
def test_initial_values_and_the_held_out_loss_are_the_same_to_the_bit(
    bytes_per_program: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check one program and several programs for the leaves in host memory."""
    monkeypatch.setattr(training_state, "HOST_BYTES_PER_PROGRAM", bytes_per_program)
    losses, states = [], []
    for parameters in (False, True):
        of, placement = program("adapters over int8", "zero3", OffloadConfig(parameters=parameters))
        states.append(begin(of, placement))
        losses.append(
            measure_loss(make_held_out_loss(of.model, of.executor, placement), states[-1], [batch(of, 0)]).mean
        )
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert losses[0] == losses[1]
