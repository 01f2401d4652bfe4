"""What the watchdog concludes from the threads and the seconds of the processes."""

import threading
from dataclasses import replace

import pytest

from jaxopt_llm.config import Config, WatchdogConfig
from jaxopt_llm.distributed import activity
from jaxopt_llm.distributed.activity import Activity, Pace, PerStep, PhaseProgress, Totals, find_slowest
from jaxopt_llm.distributed.watchdog import find_behind, find_limit

FLOORS = WatchdogConfig(factor=10, floor_seconds=600, long_floor_seconds=3600)
RUN = Config(watchdog=FLOORS)


class Clock:
    """Clock that only moves when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(activity, "time", made)
    return made


def test_an_activity_counts_phases_and_waits(clock: Clock) -> None:
    main = Activity()
    with main.wait():  # before the first phase
        assert main.progress is None
    main.enter("data", 7)
    clock.now += 3
    main.enter("step")
    assert main.progress == PhaseProgress(7, "step", 2)
    with main.wait():
        clock.now += 2
        with main.wait():  # a channel within a wait
            assert main.progress == PhaseProgress(7, "step", 3, waiting=True)
    assert main.progress == PhaseProgress(7, "step", 3)
    clock.now += 1
    main.leave()
    assert main.progress is None
    assert main.totals == Totals(7, {"data": 3, "step": 3}, {"step": 2})
    assert (list(main.ended["data"]), list(main.ended["step"])) == ([3], [3])
    main.forget()
    main.enter("data", 8)
    assert not main.ended["data"]
    assert main.progress == PhaseProgress(8, "data", 4)  # the marks go on, as in all processes


def test_a_wait_for_a_lock_is_no_mark() -> None:
    main = Activity()
    with main.wait_for_lock():  # before the first phase
        assert main.progress is None
    main.enter("prepare", 0)
    with main.wait_for_lock():
        assert main.progress == PhaseProgress(0, "prepare", 1, waiting=True)
        main.beat()
    assert main.progress == PhaseProgress(0, "prepare", 1, beats=1)


def test_a_call_that_changes_a_value_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "LOOK_SECONDS", 0.001)
    main, values, looked = Activity(), [1], threading.Event()

    def measure() -> int:
        looked.set()
        return values[0]

    def wait_for_looks(count: int = 3) -> None:
        for _ in range(count):
            looked.clear()
            assert looked.wait(60)

    main.enter("prepare", 0)
    with main.follow(measure):
        wait_for_looks()
        assert main.progress == PhaseProgress(0, "prepare", 1)
        for value in (2, 3):
            values[0] = value
            wait_for_looks()
        assert main.progress == PhaseProgress(0, "prepare", 1, beats=2)
    values[0] = 4
    looked.clear()
    assert not looked.wait(0.05)
    assert main.progress.beats == 2


@pytest.mark.parametrize(
    ("phase", "ended", "limit"),
    [
        ("prepare", (), 3600),
        ("data", (), 600),
        ("data", (1, 2, 3), 600),
        ("data", (100, 200, 1000), 2000),
        ("step", (), 3600),  # it may compile
        ("evaluate", (), 3600),
        ("step", (1,), 600),
        ("evaluate", (70,), 700),
        ("compile", (1,), 3600),
        ("restore", (1,), 3600),
        ("save", (), 3600),
        ("save", (400,), 4000),
    ],
)
def test_a_limit_is_a_multiple_of_the_median_and_at_least_the_floor(
    phase: activity.Phase, ended: tuple[float, ...], limit: float
) -> None:
    assert find_limit(RUN, phase, ended) == limit


def test_the_process_behind_is_the_one_that_the_others_wait_for() -> None:
    ready = PhaseProgress(8, "step", 20, waiting=True)
    in_data = PhaseProgress(8, "data", 18)
    assert find_behind({0: ready, 1: in_data, 2: ready}) == [1]
    # Here process 2 has not begun the wait in which the others are.
    assert find_behind({0: ready, 1: ready, 2: PhaseProgress(8, "step", 20)}) == [2]
    # Process 0 is ahead, and has not come to a wait yet.
    assert find_behind({0: PhaseProgress(9, "data", 22), 1: ready}) == [1]
    assert find_behind({0: ready, 1: ready}) == [0, 1]
    # Process 0 downloads, and process 1 waits for its lock.
    downloads = PhaseProgress(0, "prepare", 3)
    assert find_behind({0: downloads, 1: replace(downloads, waiting=True)}) == [0]
    assert find_behind({}) == []


def per_step(*processes: tuple[float, float, float]) -> PerStep:
    """Return the seconds of processes, each in data, in a step, and of the latter waiting."""
    phases = [{"data": data, "step": step, "evaluate": 5.0} for data, step, _ in processes]
    return PerStep(phases, [{"step": waited, "evaluate": 5.0} for _, _, waited in processes])


def test_the_slowest_process_is_the_one_that_waits_least() -> None:
    # All take 10 s per step. The devices need 6 s, and process 1 reads its batch for 4 s.
    assert find_slowest(per_step((0, 10, 10), (4, 6, 6), (0, 10, 10))) == (1, 10, 6)
    # A difference that is small compared with the work of the devices is none.
    assert find_slowest(per_step((0, 10, 10), (1, 9, 9), (0, 10, 10))) is None
    assert find_slowest(per_step((0, 10, 10), (0, 10, 10), (0, 10, 10))) is None
    # It must take over 1.3 times the median, which is 10 s.
    assert find_slowest(per_step((0, 12.9, 12.9), (2.9, 10, 10), (0, 12.9, 12.9))) is None
    assert find_slowest(per_step((0, 13.1, 13.1), (3.1, 10, 10), (0, 13.1, 13.1))) == (1, pytest.approx(13.1), 10)


def test_seconds_are_per_step_since_the_last_result() -> None:
    def totals(step: int, data: float) -> Totals:
        return Totals(step, {"step": 0.0, "data": data}, {"data": data / 2})

    pace = Pace()
    assert pace.advance([totals(4, 1), totals(4, 2)]) is None
    assert pace.advance([totals(6, 3), totals(4, 2)]) is None  # process 1 has not reported a step since then
    found = pace.advance([totals(8, 9), totals(6, 12)])
    assert found is not None
    assert found.by_field() == {"process_seconds/data": [2, 5], "process_seconds/waited": [1, 2.5]}
    assert pace.advance([totals(10, 9), totals(10, 12)], steps=50) is None


def test_the_steps_before_a_resume_are_not_counted() -> None:
    pace = Pace()
    begun = [Totals(400, {"restore": 5.0}), Totals(400, {"restore": 5.0})]
    stepped = [Totals(401, {"restore": 5.0, "step": 1.0}), Totals(401, {"restore": 5.0, "step": 1.0})]
    for now in ([Totals(), Totals()], begun, [stepped[0], begun[1]], stepped):
        assert pace.advance(now) is None
    found = pace.advance([Totals(451, {"restore": 5.0, "step": 51.0})] * 2, steps=50)
    assert found is not None and found.phases[0]["step"] == 1
