"""TensorBoard shows what metrics.jsonl holds."""

import struct
import sys
from pathlib import Path

import pytest
from disks import files_no_larger_than
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jaxopt_llm.errors import InputError
from jaxopt_llm.observe.dashboards import Dashboards
from jaxopt_llm.observe.metrics import LoggingConfig


def events(directory: Path) -> list[Event]:
    """Of the one file."""
    (file,) = (directory / "tensorboard").iterdir()
    return events_of(file)


def events_of(file: Path) -> list[Event]:
    """A record: its length, a checksum, its bytes, a checksum."""
    found, content = [], file.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found


def test_a_record_is_one_scalar_a_number(tmp_path: Path) -> None:
    with Dashboards(LoggingConfig(), tmp_path, resume_step=0, settings={}, say=print) as dashboards:
        dashboards.write({"step": 7, "loss": 0.5, "tokens": 1000})
    shown = [(event.step, value.tag, value.simple_value) for event in events(tmp_path) for value in event.summary.value]
    assert shown == [(7, "loss", 0.5), (7, "tokens", 1000.0)]


def test_a_resume_hides_what_was_shown_after_its_step(tmp_path: Path) -> None:
    with Dashboards(LoggingConfig(), tmp_path, resume_step=5, settings={}, say=print):
        pass
    restarts = [event.step for event in events(tmp_path) if event.session_log.status == SessionLog.START]
    assert restarts == [6]


def test_a_full_disk_costs_the_records_that_it_lasts(tmp_path: Path) -> None:
    said: list[str] = []
    with Dashboards(LoggingConfig(), tmp_path, resume_step=0, settings={}, say=said.append) as dashboards:
        dashboards.write({"step": 1, "loss": 0.5})
        with files_no_larger_than(64):
            dashboards.write({"step": 2, "loss": 0.25})
        dashboards.write({"step": 3, "loss": 0.125})
    assert len(said) == 1 and "step 2" in said[0]
    (last,) = (tmp_path / "tensorboard").glob("*.3")
    assert [(event.step, value.simple_value) for event in events_of(last) for value in event.summary.value] == [
        (3, 0.125)
    ]


def test_nothing_is_written_where_it_is_off(tmp_path: Path) -> None:
    with Dashboards(LoggingConfig(tensorboard=False), tmp_path, resume_step=0, settings={}, say=print) as dashboards:
        dashboards.write({"step": 1, "loss": 0.5})
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="logging.wandb_project=mine wants the package wandb"):
        Dashboards(
            LoggingConfig(tensorboard=False, wandb_project="mine"), tmp_path, resume_step=0, settings={}, say=print
        )
