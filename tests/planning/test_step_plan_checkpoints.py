"""Size and interval of the checkpoints of a planned run."""

import dataclasses
from typing import Any

import pytest

from jaxopt_llm.config import CheckpointConfig, Config, EvaluationConfig, LoraConfig, TrainingConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.model import decoder_specs, param
from jaxopt_llm.planning import step_plan
from jaxopt_llm.planning.search.state_sizes import _state_specs
from jaxopt_llm.planning.step_plan import format_checkpoints, plan_checkpoints

pytestmark = pytest.mark.core


def plan(config: Config, step_seconds: float, keep_frozen: bool = True) -> step_plan.CheckpointPlan:
    parts = (config.model, config.lora, config.training.trainable, config.optimizer, config.precision)
    specs = _state_specs(*parts, 1, config.pipeline, averages=config.training.ema_decay > 0)
    specs = dataclasses.replace(specs, keep_frozen=keep_frozen)
    return plan_checkpoints(config, specs, step_seconds)


def with_checkpoints(**settings: Any) -> Config:
    training = TrainingConfig(steps=100_000)
    return Config(training=training, checkpoint=CheckpointConfig(**settings), evaluation=EvaluationConfig(every=500))


def test_a_checkpoint_holds_masters_and_moments() -> None:
    parameters = param.count_parameters(decoder_specs.param_specs(Config().model))
    assert plan(Config(), 1.0).bytes == pytest.approx(12 * parameters, rel=1e-3)  # float32, and two moments
    averaged = Config(training=TrainingConfig(ema_decay=0.999))
    assert plan(averaged, 1.0).bytes == pytest.approx(16 * parameters, rel=1e-3)
    adapted = Config(lora=LoraConfig(rank=8))
    frozen = plan(adapted, 1.0).bytes - plan(adapted, 1.0, keep_frozen=False).bytes
    assert frozen == plan(adapted, 1.0).frozen_bytes == 2 * parameters  # bfloat16
    assert plan(adapted, 1.0, keep_frozen=False).frozen_bytes == plan(Config(), 1.0).frozen_bytes == 0
    _, line = format_checkpoints(plan(adapted, 1.0))
    assert line.endswith("iB of it are frozen parameters; with a folder as --model.pretrained they are not saved")


@pytest.mark.parametrize(
    ("settings", "seconds", "advice"),
    [
        ({}, 10.0, {}),  # 83 minutes
        ({}, 61.0, {"checkpoint.every": 30}),
        ({}, 61.0 * 60, {"checkpoint.every": 1}),
        ({"every": 200, "keep_every": 1000}, 61.0, {"checkpoint.every": 30, "checkpoint.keep_every": 1020}),
        ({"keep_best": 1}, 61.0, {"checkpoint.every": 30, "evaluation.every": 30}),
    ],
)
def test_a_long_interval_is_advised_against(settings: dict[str, int], seconds: float, advice: dict[str, int]) -> None:
    config = with_checkpoints(**settings)
    assert plan(config, seconds).advice == advice
    changed = replace_fields(config, advice)
    assert changed.problems() == config.problems() == []


def test_the_lines_name_the_time_that_a_crash_would_lose() -> None:
    first, second = format_checkpoints(plan(with_checkpoints(), 61.0))
    assert first.startswith("checkpoints: one every 500 steps (8.5 hours), ") and first.endswith(" each")
    assert second == "  a crash would lose up to 8.5 hours; save every 30.5 minutes with --checkpoint.every 30"
    (only,) = format_checkpoints(plan(with_checkpoints(), 1.0))
    assert "(8.3 minutes)" in only
    few = dataclasses.replace(with_checkpoints(), training=TrainingConfig(steps=100))
    assert plan(few, 61.0).every == 100 and not plan(few, 61.0).advice
