"""TensorBoard shows what metrics.jsonl holds."""

import struct
import sys
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jaxopt_llm.errors import InputError
from jaxopt_llm.observe.dashboards import Dashboards
from jaxopt_llm.observe.metrics import LoggingConfig


def events(directory: Path) -> list[Event]:
    """Of all files, in the order of their making. A record: its length, a checksum, its bytes, a checksum."""
    found = []
    for file in sorted((directory / "tensorboard").iterdir()):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def test_a_record_is_one_scalar_a_number(tmp_path: Path) -> None:
    with Dashboards(LoggingConfig(), tmp_path, resume_step=0, settings={}) as dashboards:
        dashboards.write({"step": 7, "loss": 0.5, "tokens": 1000})
    shown = [(event.step, value.tag, value.simple_value) for event in events(tmp_path) for value in event.summary.value]
    assert shown == [(7, "loss", 0.5), (7, "tokens", 1000.0)]


def test_a_resume_hides_what_was_shown_after_its_step(tmp_path: Path) -> None:
    with Dashboards(LoggingConfig(), tmp_path, resume_step=5, settings={}):
        pass
    restarts = [event.step for event in events(tmp_path) if event.session_log.status == SessionLog.START]
    assert restarts == [6]


def test_nothing_is_written_where_it_is_off(tmp_path: Path) -> None:
    with Dashboards(LoggingConfig(tensorboard=False), tmp_path, resume_step=0, settings={}) as dashboards:
        dashboards.write({"step": 1, "loss": 0.5})
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="logging.wandb_project=mine wants the package wandb"):
        Dashboards(LoggingConfig(tensorboard=False, wandb_project="mine"), tmp_path, resume_step=0, settings={})
