"""Retention policy and the interval of checkpoints."""

import pytest

from jaxopt_llm.checkpoint.native.step_directories import list_reasons_to_keep
from jaxopt_llm.config import CheckpointConfig

pytestmark = pytest.mark.core

LOSSES = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 2.5}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (CheckpointConfig(keep=1), {50: ["newest"]}),
        (CheckpointConfig(keep=9), {step: ["newest"] for step in LOSSES}),
        (CheckpointConfig(keep=1, keep_every=20), {20: ["every 20"], 40: ["every 20"], 50: ["newest"]}),
        (CheckpointConfig(keep=2, keep_best=2), {20: ["best"], 40: ["newest", "best"], 50: ["newest"]}),
    ],
)
def test_reasons_to_keep(config: CheckpointConfig, kept: dict[int, list[str]]) -> None:
    assert {step: reasons for step, reasons in list_reasons_to_keep(LOSSES, config).items() if reasons} == kept


def test_failed_save_is_retried_after_a_tenth_of_the_interval() -> None:
    config = CheckpointConfig(every=50)
    assert [step for step in range(1, 101) if config.is_due(step, failed=None)] == [50, 100]
    assert [step for step in range(51, 57) if config.is_due(step, failed=50)] == [55, 56]
    assert CheckpointConfig(every=2).is_due(3, failed=2)
