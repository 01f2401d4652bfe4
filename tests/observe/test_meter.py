"""Speed in the records of a run."""

import math
import time

import pytest

from jaxopt_llm.observe.meter import LossWindow, Meter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_a_record_has_the_means_since_the_last_record(clock: list[float]) -> None:
    meter = Meter("tokens", units_per_step=60, utilisation={"mfu": 0.01})
    meter.restart(4)
    clock[0] += 6.0
    meter.add_wait(3.0)
    record = meter.make_record(6, {"loss": 1.5})
    assert record == {
        "step": 6,
        "loss": 1.5,
        "tokens": 360,
        "tokens_per_second": 20.0,
        "step_seconds": 3.0,
        "data_seconds": 1.5,
        "mfu": 0.2,
    }
    clock[0] += 1.0
    record = meter.make_record(7, {})
    assert (record["step_seconds"], record["data_seconds"]) == (1.0, 0.0)


def test_time_before_a_restart_does_not_count(clock: list[float]) -> None:
    meter = Meter("tokens", units_per_step=60, utilisation={})
    clock[0] += 1000.0
    meter.add_wait(1000.0)
    meter.restart(1)
    clock[0] += 2.0
    record = meter.make_record(2, {})
    assert (record["step_seconds"], record["data_seconds"]) == (2.0, 0.0)


def test_the_mean_of_a_window_leaves_out_losses_that_are_not_finite() -> None:
    window = LossWindow()
    assert window.mean is None
    for loss, updated in ((3.0, True), (math.nan, False), (math.inf, False), (6.0, False)):
        window = window.add(loss, updated)
    assert window == LossWindow(steps=4, updates=1, finite=2, total=9.0) and window.mean == 4.5
