"""Steps of a group that is late in every round, and jumps to the step of the others."""

from typing import Any

import pytest

from jaxopt_llm.config import CheckpointConfig
from jaxopt_llm.core.errors import Preempted
from jaxopt_llm.training.run_steps import run_steps


class LateLoop:
    """Loop of a run that jumps over a round after each round. stops: a stop is requested after this step."""

    def __init__(self, steps: int, round_steps: int, every: int, stops: int) -> None:
        self._steps, self._round, self._config, self._stops = steps, round_steps, CheckpointConfig(every=every), stops
        self.trained: list[int] = []
        self.saved: list[tuple[int, bool]] = []
        self.evaluated: list[int] = []
        self.at = 0

    def step(self, step: int) -> None:
        self.trained.append(step)
        self.at = step

    def meet_groups(self, step: int) -> int | None:
        if step % self._round:
            return None
        self.at = min(step + self._round, self._steps)
        return self.at

    def poll(self, before: int, step: int) -> tuple[bool, bool]:
        assert step == self.at
        return step >= self._stops, self._config.is_due(before, step, failed=None)

    def record(self, evaluates: bool) -> None:
        self.evaluated += [self.at] if evaluates else []

    def ends_early(self, step: int) -> bool:
        return False

    def roll_back(self) -> None:
        return None

    def save(self, due: bool, exits: bool, last: bool) -> None:
        self.saved += [(self.at, last)] if due or exits else []

    def replicate(self, step: int) -> None:
        assert step == self.at


def test_what_was_due_at_a_step_that_was_jumped_over_is_done_after_the_jump() -> None:
    loop: Any = LateLoop(steps=40, round_steps=5, every=8, stops=100)
    run_steps(loop, 0, 40, evaluate_every=15)
    assert loop.trained == [*range(1, 6), *range(11, 16), *range(21, 26), *range(31, 36)]
    assert loop.saved == [(10, False), (20, False), (24, False), (32, False), (40, True)]
    assert loop.evaluated == [20, 30, 40]


def test_a_stop_is_seen_after_a_jump() -> None:
    loop: Any = LateLoop(steps=40, round_steps=5, every=100, stops=11)
    with pytest.raises(Preempted):
        run_steps(loop, 0, 40, evaluate_every=100)
    assert loop.saved == [(11, False)]
    loop = LateLoop(steps=40, round_steps=1, every=100, stops=3)
    with pytest.raises(Preempted):
        run_steps(loop, 0, 40, evaluate_every=100)
    assert loop.saved == [(4, False)]
