"""Tests of the learning rate of each step, against formulas in plain Python."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from jaxopt_llm.config import ScheduleConfig
from jaxopt_llm.step.hyperparameters import find_shape, make_schedule

PEAK = 2.0
SCHEDULE = ScheduleConfig(warmup_steps=4, decay_steps=20, final_share=0.1, cooldown_steps=5)
# Share of the peak after the warm-up, as a function of the step, counted from 1.
SHARES: dict[str, Callable[[int], float]] = {
    "cosine": lambda step: 0.1 + 0.9 * (1 + math.cos(math.pi * min((step - 4) / 16, 1))) / 2,
    "linear": lambda step: 0.1 + 0.9 * (1 - min((step - 4) / 16, 1)),
    "constant": lambda step: 1,
    "wsd": lambda step: 1 if step <= 15 else max(1 - 0.9 * (step - 15) / 5, 0.1),
    "inverse_sqrt": lambda step: max(math.sqrt(4 / step), 0.1),
}


def rates(config: ScheduleConfig, steps: int) -> np.ndarray:
    """Return the rates of the first steps. The argument of a schedule is the number of finished steps."""
    return np.asarray(make_schedule(config.kind, find_shape(PEAK, config, 20), config.warmup_kind)(np.arange(steps)))


@pytest.mark.parametrize("kind", SHARES)
def test_a_linear_warm_up_whose_first_step_learns_and_the_formula_after_it(kind: str) -> None:
    steps = range(1, 501)
    expected = [PEAK * (step / 4 if step < 4 else SHARES[kind](step)) for step in steps]
    np.testing.assert_allclose(rates(replace(SCHEDULE, kind=kind), 500), expected, rtol=1e-5)  # type: ignore[arg-type]


def test_without_warm_up_the_rate_falls_from_the_peak_to_its_end() -> None:
    share = 0.1 + 0.9 * (1 + np.cos(np.pi * np.arange(1, 21) / 20)) / 2
    np.testing.assert_allclose(rates(ScheduleConfig(warmup_steps=0, decay_steps=20), 20), share * PEAK, rtol=1e-6)


@pytest.mark.parametrize(
    "config, named",
    [
        (ScheduleConfig(warmup_steps=20, decay_steps=20), "schedule.warmup_steps=20"),
        (
            ScheduleConfig(warmup_steps=0.999, decay_steps=100),
            "schedule.warmup_steps=0.999 (100 steps):",
        ),
        (
            replace(SCHEDULE, kind="wsd", warmup_steps=0.9),
            "end of schedule.warmup_steps to schedule.decay",
        ),
        (ScheduleConfig(warmup_steps=-1), "schedule.warmup_steps=-1"),
        (ScheduleConfig(warmup_steps=10.5), "schedule.warmup_steps=10.5: must be whole, or a share below 1"),
        (ScheduleConfig(kind="constant", warmup_steps=-1), "schedule.warmup_steps=-1"),
        (ScheduleConfig(final_share=1.5), "schedule.final_share=1.5"),
        (replace(SCHEDULE, kind="wsd", cooldown_steps=17), "schedule.cooldown_steps=17"),
        (replace(SCHEDULE, kind="wsd", cooldown_steps=0), "schedule.cooldown_steps=0"),
        (ScheduleConfig(kind="wsd", cooldown_steps=-5), "schedule.cooldown_steps=-5"),
    ],
)
def test_a_schedule_that_cannot_be_is_named(config: ScheduleConfig, named: str) -> None:
    (problem,) = config.problems()
    assert named in problem
    # Kinds without an end allow a longer warm-up.
    assert SCHEDULE.problems() == ScheduleConfig(kind="constant", warmup_steps=5000).problems() == []


def test_without_decay_steps_the_schedule_ends_with_the_run_and_after_its_warm_up() -> None:
    follows = replace(SCHEDULE, decay_steps=0, kind="cosine")
    np.testing.assert_array_equal(rates(follows, 20), rates(replace(SCHEDULE, kind="cosine"), 20))
    assert follows.problems() == []
    assert [replace(follows, warmup_steps=warmup).choose_end(20) for warmup in (4, 20, 50)] == [20, 21, 51]
    assert replace(follows, kind="wsd", warmup_steps=18).choose_end(20) == 18 + 5


def test_a_warm_up_by_its_share() -> None:
    """Rounded up, as warmup_ratio in transformers, and the same in a run that is continued with more steps."""
    share = replace(SCHEDULE, warmup_steps=0.07, decay_steps=0, kind="cosine")
    assert [share.count_warmup(steps) for steps in (3, 38, 100, 1000)] == [1, 3, 7, 70]
    np.testing.assert_array_equal(rates(share, 20), rates(replace(share, warmup_steps=2), 20))
    assert [replace(share, decay_steps=38).count_warmup(steps) for steps in (38, 500)] == [3, 3]
    assert replace(share, decay_steps=38).problems() == []


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("share", [0.03, 0.5, 0.95])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 50, 400])
def test_a_resume_finds_the_warm_up_of_the_first_start(kind: str, share: float, steps: int) -> None:
    """The first start stores the end of the schedule, which leaves room for the fall."""
    first = ScheduleConfig(warmup_steps=share, kind=kind, cooldown_steps=100)  # type: ignore[arg-type]
    end = first.choose_end(steps)
    stored = replace(first, decay_steps=end)
    assert end >= steps and stored.problems() == [] and stored.count_warmup(9999) == first.count_warmup(steps)
