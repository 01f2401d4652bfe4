"""Tests of faults that are counted against hosts."""

import json
import time
from pathlib import Path

import pytest

from jaxopt_llm.supervision.faults import JOURNAL, LIMIT, MEMORY_SECONDS, Journal, Strikes
from jaxopt_llm.supervision.host import End


def open_strikes(directory: Path) -> Strikes:
    return Strikes(directory, Journal(directory))


def end(code: int | None, index: int = 1) -> End:
    return End(index, "host", code, "")


def write_events(directory: Path, *events: dict[str, object]) -> None:
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_a_host_is_avoided_from_the_third_fault_on(tmp_path: Path) -> None:
    strikes = open_strikes(tmp_path)
    found = [strikes.add(end(134), (0, 1), ()) for _ in range(LIMIT + 1)]
    assert found == [None] * (LIMIT - 1) + [1, None]
    assert strikes.avoids(1) and not strikes.avoids(0)


@pytest.mark.parametrize("code", [None, 0, 2, 3, 4, 5, 75])
def test_what_no_host_has_caused_counts_against_none(code: int | None, tmp_path: Path) -> None:
    strikes = open_strikes(tmp_path)
    for _ in range(LIMIT):
        strikes.add(end(code), (0, 1), ())
    assert not strikes.avoids(1) and not (tmp_path / JOURNAL).exists()


def test_a_program_that_is_left_over_counts_if_it_is_the_only_one(tmp_path: Path) -> None:
    strikes = open_strikes(tmp_path)
    for _ in range(LIMIT):
        strikes.add(end(137, 2), (0, 1, 2), {1, 2})
    assert not strikes.avoids(2)
    for _ in range(LIMIT):
        strikes.add(end(137, 2), (0, 1, 2), {2})
    assert strikes.avoids(2)


@pytest.mark.parametrize(
    ("events", "avoided"),
    [
        ([{"event": "resume"}, {"event": "corruption", "processes": [1]}], 3),
        ([{"event": "resume"}, {"event": "corruption", "processes": [0, 1]}], None),
        ([{"event": "corruption", "processes": [1]}, {"event": "resume"}], None),
        ([], None),
    ],
    ids=["one device", "two devices", "of an earlier start", "nothing was written"],
)
def test_wrong_bits_count_against_the_device_that_is_named(
    events: list[dict[str, object]], avoided: int | None, tmp_path: Path
) -> None:
    """Processes have other numbers than their hosts: those of this round are 0 and 3."""
    write_events(tmp_path, *events)
    strikes = open_strikes(tmp_path)
    assert strikes.add(end(9, 0), (0, 3), ()) == avoided
    assert not strikes.avoids(0) and strikes.avoids(3) == (avoided == 3)


def test_strikes_outlive_the_leader_and_end_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strikes = open_strikes(tmp_path)
    for _ in range(LIMIT):
        strikes.add(end(1), (0, 1), ())
    assert open_strikes(tmp_path).avoids(1)
    tomorrow = time.time() + MEMORY_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    assert not strikes.avoids(1) and not open_strikes(tmp_path).avoids(1)
