"""events.jsonl: the history of a run."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from disks import files_no_larger_than

from jaxopt_llm.core.errors import Preempted, TrainingDiverged
from jaxopt_llm.observe.dashboards import EventLog

pytestmark = pytest.mark.core


def read(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def test_events_of_all_starts_are_kept_in_order(tmp_path: Path) -> None:
    before = time.time()
    log = EventLog(tmp_path, print)
    log.write(0, "start")
    log.write_save(5, "")
    log.write_save(8, "disk full")
    log.write_end(9, Preempted(9))
    again = EventLog(tmp_path, print)
    again.write(5, "resume")
    again.write_end(7, TrainingDiverged("step 7:\nloss nan"))
    again.write_end(7, ZeroDivisionError("division by zero"))
    again.write_end(10, None)
    events = read(tmp_path)
    assert [(event["step"], event["event"], event.get("detail")) for event in events] == [
        (0, "start", None),
        (5, "checkpoint", None),
        (8, "checkpoint_failed", "disk full"),
        (9, "stop", "preempted at step 9; run again to continue"),
        (5, "resume", None),
        (7, "fault", "step 7: loss nan"),
        (7, "fault", "ZeroDivisionError: division by zero"),
        (10, "end", None),
    ]
    assert all(before - 1 < event["time"] < time.time() + 1 for event in events)


def test_a_line_that_was_cut_short_does_not_take_the_next_event_with_it(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"time": 1, "st')
    EventLog(tmp_path, print).write(5, "resume")
    torn, event = (tmp_path / "events.jsonl").read_text().splitlines()
    assert torn == '{"time": 1, "st' and json.loads(event)["event"] == "resume"


def test_a_full_disk_loses_an_event_and_no_run(tmp_path: Path) -> None:
    messages: list[str] = []
    log = EventLog(tmp_path, messages.append)
    log.write(0, "start")
    with files_no_larger_than((tmp_path / "events.jsonl").stat().st_size + 5):
        log.write(1, "skipped")
    log.write(2, "end")
    assert [event["event"] for event in read(tmp_path)] == ["start", "end"]
    assert len(messages) == 1 and messages[0].endswith("the event skipped of step 1 is lost")


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    EventLog(tmp_path, print, writes=False).write(0, "start")
    assert not list(tmp_path.iterdir())
