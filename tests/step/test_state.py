"""Tests of the state: it moves from one stage to pipeline stages and back bitwise, for every schedule and split."""

from dataclasses import replace
from typing import Any

import chex
import jax
import numpy as np
import pytest
import toy

from jaxopt_llm.config import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    RematConfig,
    ScheduleConfig,
    TrainingConfig,
)
from jaxopt_llm.core import tree
from jaxopt_llm.model import param
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint
from jaxopt_llm.step import state as training_state
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import TrainState

UNEVEN = replace(toy.CONFIG, layers=13, pattern=("global",))


def program(model: ModelConfig, pipelined: PipelineConfig, **axes: Any) -> tuple[Program, Placement]:
    placement, training = toy.placement(**axes), TrainingConfig(batch_size=8, sequence_length=16, accumulation=2)
    optimizer = OptimizerConfig(state_dtype="bfloat16")
    arguments = (optimizer, ScheduleConfig(1, 10), RematConfig(), LoraConfig(), placement)
    return toy.make_program(model, training, *arguments, pipelined=pipelined), placement


def to_checkpoint(program: Program, state: TrainState) -> Any:
    return jax.tree.map(np.asarray, program.to_checkpoint(state))


def resumed(program: Program, placement: Placement, saved: Any) -> TrainState:
    specs = abstract_checkpoint(training_state.checkpoint_specs(program.specs), placement)
    assert jax.tree.map(np.shape, saved) == jax.tree.map(np.shape, specs)
    arrays = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, spec.sharding), saved, specs)
    return training_state.resume_state(program.specs, 2, placement, **arrays)


@pytest.mark.parametrize(
    ("model", "stages", "pipeline"),
    [
        pytest.param(UNEVEN, 4, PipelineConfig("interleaved", 2), id="interleaved, unequal chunks"),
        pytest.param(UNEVEN, 2, PipelineConfig("interleaved", 3, (1, 4, 2, 3, 1, 2)), id="interleaved and split"),
        pytest.param(
            *(toy.CONFIG, 2, PipelineConfig(split=(4, 1))), id="split, of two segments", marks=pytest.mark.slow
        ),
    ],
)
def test_what_stages_hold_is_everyones(model: ModelConfig, stages: int, pipeline: PipelineConfig) -> None:
    whole, one_device = program(model, pipeline)  # the pipeline settings have no effect there
    staged, on_stages = program(model, pipeline, zero_stage=1, pipeline=stages, fsdp=2)
    random = np.random.default_rng(0)

    def drawn(spec: ParamSpec) -> np.ndarray:
        return np.asarray(random.normal(size=spec.shape), spec.dtype)

    saved = jax.tree.map(drawn, training_state.checkpoint_specs(whole.specs))
    state = resumed(staged, on_stages, saved)

    def holds_its_layers(path: str, spec: ParamSpec, rests: jax.Array, leaf: np.ndarray) -> None:
        if spec.layers is None:
            return
        places = np.asarray(spec.layers)
        assert places.shape[:2] == (pipeline.virtual_stages, stages) and param.count_layers(spec) == len(leaf)
        for (chunk, stage, slot), layer in np.ndenumerate(places):
            expected = leaf[layer] if layer >= 0 else np.zeros_like(leaf[0])
            np.testing.assert_array_equal(rests[chunk, stage, slot], expected, path)

    masters = jax.tree.map(np.asarray, state.masters)
    tree.map_with_path(holds_its_layers, staged.specs.masters, masters, saved["masters"])
    back = to_checkpoint(staged, state)
    chex.assert_trees_all_equal(back, saved)
    on_one_device = to_checkpoint(whole, resumed(whole, one_device, back))
    chex.assert_trees_all_equal(on_one_device, saved)
