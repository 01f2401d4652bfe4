"""What a record says of speed."""

import time

import pytest

from jaxopt_llm.observe.meter import Meter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_a_record_has_the_means_of_the_steps_since_the_last(clock: list[float]) -> None:
    meter = Meter(tokens_per_step=60, utilisation={"mfu": 0.01})
    meter.restart(4)
    clock[0] += 6.0
    meter.waited(3.0)
    record = meter.record(6, {"loss": 1.5})
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
    record = meter.record(7, {})
    assert (record["step_seconds"], record["data_seconds"]) == (1.0, 0.0)


def test_what_goes_before_a_restart_is_left_out(clock: list[float]) -> None:
    meter = Meter(tokens_per_step=60, utilisation={})
    clock[0] += 1000.0
    meter.waited(1000.0)
    meter.restart(1)
    clock[0] += 2.0
    record = meter.record(2, {})
    assert (record["step_seconds"], record["data_seconds"]) == (2.0, 0.0)
