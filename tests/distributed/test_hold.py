"""The wait of a program that is ready to train."""

import subprocess
import sys
import time

import pytest

from jaxopt_llm.distributed import hold

HOLD = """
import time
import jaxopt_llm.distributed.hold as hold
time.sleep(0.5)
hold.hold_start(lambda: False, print)
print(time.monotonic() - hold._started)
"""


def test_the_steps_do_not_begin_before_the_time_that_the_supervisor_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the start of the program, so that what it does before is part of the wait."""
    monkeypatch.setenv(hold.HOLD_VARIABLE, "1.5")
    told = subprocess.run([sys.executable, "-c", HOLD], capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[0].startswith("ready; waits ")
    assert float(told[1]) >= 1.5


def test_a_request_to_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hold.HOLD_VARIABLE, "1e9")
    asked: list[float] = []

    def is_stopped() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 2

    hold.hold_start(is_stopped, lambda text: None)
    assert len(asked) == 3


def test_without_a_supervisor_nothing_is_said_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hold.HOLD_VARIABLE, raising=False)
    said: list[str] = []
    hold.hold_start(lambda: False, said.append)
    assert not said
