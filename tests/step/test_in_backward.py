"""Tests of the optimizer in the backward: the ordinary step has the same masters, moments and gradient norm."""

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import toy

from jaxopt_llm.config import LoraConfig, OffloadConfig, OptimizerConfig, RematConfig, ScheduleConfig, TrainingConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step import state as training_state

EXPERTS = {"layers": 2, "moe.experts": 4, "moe.expert_width": 8, "moe.expert_every": 2, "moe.balance_loss": 0.1}
MODELS = {
    "tied": replace(toy.CONFIG, pattern=("global",), layers=2),
    "two segments": replace(toy.CONFIG, tied_head=False),
    "experts": replace_fields(toy.UNIFORM, EXPERTS),
    "mtp": replace_fields(toy.UNIFORM, EXPERTS | {"mtp_layers": 2}),  # its second module has experts
}
ADAPT = {
    "": LoraConfig(),
    # Trains nothing in the second segment and in "non_layer".
    "lora": LoraConfig(rank=4, targets=("segment_0/*/attention/*",), base="nf4", dora=True, dropout=0.1),
}
ROWS, LENGTH, STEPS = 8, 16, 3
# With this epsilon, rounding noise of a zero gradient does not become a full step.
ADAMW = OptimizerConfig(
    learning_rate=1e-2,
    epsilon=1e-3,
    clip_norm=0,
    momentum=0.8,
    decay_groups=("*norm/*=0", "*/mlp/*=2", "*=1"),
    rate_groups=("non_layer/*=0.5", "*=1"),
)


def train(placement: Placement, optimizer: OptimizerConfig, model: str, adapt: str) -> tuple[Any, list[float]]:
    """Return the checkpoint trees after three steps, and the losses and gradient norms of the steps."""
    training = TrainingConfig(batch_size=ROWS, sequence_length=LENGTH, loss_chunk=7, z_loss=1e-2)
    of = (MODELS[model], training, optimizer, ScheduleConfig(1, 10), RematConfig("full"), ADAPT[adapt])
    program = toy.make_program(*of, placement)
    state = training_state.initialize_state(program.specs, program.optimizers, 0, placement)
    values = []
    for step in range(STEPS):
        batch = jax.device_put(toy.microbatches(toy.packed(ROWS, LENGTH, seed=step), 1), program.batch_sharding)
        state, metrics = program.step(state, batch)
        reported = ("loss", "grad_norm", "router_entropy", "mtp_loss/1", "mtp_loss/2")
        values += [float(metrics[name]) for name in reported if name in metrics]
    assert metrics["skipped"] == 0
    return jax.tree.map(np.asarray, program.to_checkpoint(state)), values


@functools.cache
def ordinary(optimizer: OptimizerConfig, model: str, adapt: str) -> tuple[Any, list[float]]:
    return train(toy.placement(), optimizer, model, adapt)


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    (1, {"data": 2, "fsdp": 2, "tensor": 2}, {}, "tied", ""),
    slow(1, {"data": 2, "expert": 2}, {}, "experts", ""),
    slow(1, {"data": 2, "expert": 2}, {}, "mtp", ""),
    slow(3, {"fsdp": 2}, {}, "mtp", "lora"),  # trains no module
    slow(0, {}, {"name": "muon"}, "two segments", ""),
    slow(0, {"fsdp": 8}, {"name": "lion"}, "two segments", ""),
    slow(1, {"fsdp": 4, "tensor": 2}, {}, "two segments", "lora"),
    slow(1, {"fsdp": 8}, {"state_dtype": "bfloat16", "offload": True}, "tied", ""),
    slow(2, {"data": 2, "fsdp": 4}, {}, "tied", ""),
    slow(3, {"fsdp": 2, "tensor": 4, "sequence_parallel": True}, {}, "tied", ""),
    slow(3, {"data": 2, "fsdp": 4}, {"name": "adafactor"}, "tied", ""),
    slow(3, {"fsdp": 8}, {"state_dtype": "int8"}, "tied", ""),
]


@pytest.mark.parametrize(("stage", "axes", "optimizer", "model", "adapt"), CASES)
@pytest.mark.slow
def test_a_step_is_that_of_the_ordinary_executor(
    stage: int, axes: dict[str, Any], optimizer: dict[str, Any], model: str, adapt: str
) -> None:
    settings = dict(optimizer)
    offload = OffloadConfig(optimizer=settings.pop("offload", False))
    config = replace(ADAMW, **settings)
    placement = replace(toy.placement(stage, **axes), offload=offload)
    found, values = train(placement, replace(config, in_backward=True), model, adapt)
    expected, expected_values = ordinary(config, model, adapt)
    np.testing.assert_allclose(values, expected_values, rtol=2e-6)

    def check(path: str, a: np.ndarray, b: np.ndarray) -> None:
        share = 3e-5 if b.dtype == np.float32 else 1e-3  # in few bits, a value may be rounded to its neighbour
        a, b = (np.asarray(each, np.float64) for each in (a, b))
        assert np.linalg.norm(a - b) <= share * np.linalg.norm(b), path

    tree.map_with_path(check, found, expected)
