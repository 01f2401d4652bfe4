"""The wait of a program that is ready to train."""

import time

import pytest

from jaxopt_llm.distributed import launchers


def test_the_steps_do_not_begin_before_the_time_that_the_supervisor_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.monotonic() + 0.5
    monkeypatch.setenv(launchers.HOLD_VARIABLE, str(begin))
    said: list[str] = []
    launchers.hold_start(lambda: False, said.append)
    assert time.monotonic() >= begin
    assert said[0].startswith("ready; waits ")


def test_a_request_to_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launchers.HOLD_VARIABLE, "1e9")
    asked: list[float] = []

    def is_stopped() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 2

    launchers.hold_start(is_stopped, lambda text: None)
    assert len(asked) == 3


@pytest.mark.parametrize("until", [None, "0.0"])
def test_without_such_a_time_nothing_is_said_and_nothing_waits(
    until: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(launchers.HOLD_VARIABLE, raising=False)
    if until is not None:
        monkeypatch.setenv(launchers.HOLD_VARIABLE, until)
    said: list[str] = []
    launchers.hold_start(lambda: False, said.append)
    assert not said
