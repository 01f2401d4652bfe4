"""Warm-up and cosine: which learning rate each step has."""

import numpy as np
import pytest

from jaxopt_llm.training.schedule import ScheduleConfig, warmup_cosine

PEAK = 2.0
SCHEDULE = ScheduleConfig(warmup_steps=4, decay_steps=20, final_share=0.1)


def rates(config: ScheduleConfig, steps: int) -> np.ndarray:
    """Of the first steps; a step's count is of those done before it."""
    schedule = warmup_cosine(PEAK, config)
    return np.array([schedule(count) for count in range(steps)])


def test_warm_up_is_linear_and_its_first_step_learns() -> None:
    np.testing.assert_allclose(rates(SCHEDULE, 4), PEAK * np.array([0.25, 0.5, 0.75, 1]), rtol=1e-6)


def test_the_cosine_falls_from_the_peak_to_the_final_share_at_decay_steps() -> None:
    done = np.arange(16 + 1) / 16  # of the way from step 4 to step 20
    expected = PEAK * (0.1 + 0.9 * (1 + np.cos(np.pi * done)) / 2)
    np.testing.assert_allclose(rates(SCHEDULE, 20)[3:], expected, rtol=1e-6)


def test_the_rate_stays_at_its_end() -> None:
    np.testing.assert_allclose(rates(SCHEDULE, 25)[19:], 0.1 * PEAK, rtol=1e-6)


def test_without_warm_up_the_rate_falls_from_the_peak_to_its_end() -> None:
    share = 0.1 + 0.9 * (1 + np.cos(np.pi * np.arange(1, 21) / 20)) / 2
    np.testing.assert_allclose(rates(ScheduleConfig(warmup_steps=0, decay_steps=20), 20), share * PEAK, rtol=1e-6)


@pytest.mark.parametrize(
    "config, named",
    [
        (ScheduleConfig(warmup_steps=20, decay_steps=20), "schedule.warmup_steps=20"),
        (ScheduleConfig(warmup_steps=-1), "schedule.warmup_steps=-1"),
        (ScheduleConfig(final_share=1.5), "schedule.final_share=1.5"),
    ],
)
def test_a_schedule_that_cannot_be_is_named(config: ScheduleConfig, named: str) -> None:
    (problem,) = config.problems()
    assert named in problem
    assert SCHEDULE.problems() == []
