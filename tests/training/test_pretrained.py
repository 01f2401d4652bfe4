"""Initial parameters from a folder, in every placement and under adapters."""

from dataclasses import replace
from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm import tree
from jaxopt_llm.checkpoint import huggingface
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.model import leaves
from jaxopt_llm.parallel.offload import OffloadConfig
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import pretrained
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.lora import LoraConfig
from jaxopt_llm.training.optimizer import OptimizerConfig
from jaxopt_llm.training.program import Program, make_program
from jaxopt_llm.training.schedule import ScheduleConfig
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step import TrainingConfig

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> huggingface.Folder:
    return huggingface.open_folder(folders.folder(tmp_path_factory.mktemp("model") / "folder"))


def begin(folder: huggingface.Folder, placement: Placement, lora: LoraConfig) -> tuple[Program, Any, TrainState]:
    """A program, its state as initialised, and with the folder's parameters."""
    training = TrainingConfig(batch_size=8, sequence_length=16, accumulation=2)
    program = make_program(
        folder.config, training, OptimizerConfig(), ScheduleConfig(1, 10), RematConfig(), lora, placement
    )

    state = training_state.initialize(program.specs, program.optimizers, 0, placement)
    initial = jax.tree.map(np.array, state)  # copies: the state is used up
    return program, initial, pretrained.put(folder, state, program.specs, placement)


def assert_equal(found: Any, expected: Any) -> None:
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(np.asarray(one), np.asarray(other)), found, expected)


def assert_rests(program: Program, state: TrainState, placement: Placement) -> None:
    resting = training_state.shardings(program.specs, placement)
    jax.tree.map(lambda leaf, sharding: np.testing.assert_equal(leaf.sharding, sharding), state, resting)


@pytest.mark.parametrize(
    ("offloaded", "axes"),
    [
        (False, {"zero_stage": 3, "fsdp": 2, "tensor": 2}),
        (True, {"zero_stage": 2, "compute_dtype": "bfloat16", "data": 2, "fsdp": 2}),
        (False, {"zero_stage": 1, "compute_dtype": "bfloat16", "pipeline": 2, "fsdp": 2}),
    ],
    ids=["stage 3", "stage 2 on the host", "stage 1 in a pipeline"],
)
def test_training_begins_from_the_folder(offloaded: bool, axes: dict[str, Any], folder: huggingface.Folder) -> None:
    placement = replace(toy.placement(**axes), offload=OffloadConfig(optimizer=offloaded, parameters=offloaded))
    program, initial, state = begin(folder, placement, LoraConfig())
    expected = folders.params()
    if placement.size("pipeline") > 1:
        expected = toy.on_stages(program.parts.specs, expected)
    assert_equal(state.masters, expected)
    assert_equal(state.moments, initial.moments)
    if placement.compute_copy:
        assert_equal(state.compute, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), expected))
    assert_rests(program, state, placement)


@pytest.mark.parametrize("base", [pytest.param("float", marks=pytest.mark.slow), "int8"])
def test_adapters_begin_over_the_folders_weights(base: Any, folder: huggingface.Folder) -> None:
    placement = toy.placement(zero_stage=3, fsdp=2, tensor=2, compute_dtype="bfloat16")
    program, initial, state = begin(folder, placement, LoraConfig(rank=2, base=base))
    assert_equal(state.masters, initial.masters)  # the adapters, which are all that trains
    wrapped = leaves.wrap(program.parts.specs, jax.tree.map(jnp.asarray, folders.params()), seed=0)
    _, expected = tree.partition(wrapped, leaves.is_adapter)
    assert_equal(state.frozen, expected)
    assert_rests(program, state, placement)
