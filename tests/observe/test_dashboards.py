"""Records of metrics.jsonl in TensorBoard and Weights & Biases."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from boards import events, events_of
from disks import files_no_larger_than
from tensorboardX.proto.event_pb2 import SessionLog

from jaxopt_llm.config import LoggingConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.observe.dashboards import Dashboards


def test_each_number_of_a_record_is_a_scalar(tmp_path: Path) -> None:
    with Dashboards(LoggingConfig(), tmp_path, resume_step=0, settings={}, say=print) as dashboards:
        dashboards.write({"step": 7, "loss": 0.5, "tokens": 1000, "expert_load": [1.5, None, 0.25]})
    shown = [(event.step, value.tag, value.simple_value) for event in events(tmp_path) for value in event.summary.value]
    loads = [(7, "expert_load/0", 1.5), (7, "expert_load/2", 0.25)]
    assert shown == [(7, "loss", 0.5), (7, "tokens", 1000.0), *loads]


def test_a_resume_hides_records_after_its_step(tmp_path: Path) -> None:
    with Dashboards(LoggingConfig(), tmp_path, resume_step=5, settings={}, say=print):
        pass
    restarts = [event.step for event in events(tmp_path) if event.session_log.status == SessionLog.START]
    assert restarts == [6]


# tensorboardX flushes a file before it closes it, so on a full disk a writer cannot be closed, only dropped.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_loses_only_the_records_written_meanwhile(tmp_path: Path) -> None:
    messages: list[str] = []
    with Dashboards(LoggingConfig(), tmp_path, resume_step=0, settings={}, say=messages.append) as dashboards:
        dashboards.write({"step": 1, "loss": 0.5})
        with files_no_larger_than(64):
            dashboards.write({"step": 2, "loss": 0.25})
        dashboards.write({"step": 3, "loss": 0.125})
    assert len(messages) == 1 and "step 2" in messages[0]
    (last,) = (tmp_path / "tensorboard").glob("*.3")
    assert [(event.step, value.simple_value) for event in events_of(last) for value in event.summary.value] == [
        (3, 0.125)
    ]


def test_nothing_is_written_if_dashboards_are_off(tmp_path: Path) -> None:
    with Dashboards(LoggingConfig(tensorboard=False), tmp_path, resume_step=0, settings={}, say=print) as dashboards:
        dashboards.write({"step": 1, "loss": 0.5})
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="logging.wandb_project=mine requires wandb .*pip install wandb"):
        Dashboards(WANDB, tmp_path, resume_step=0, settings={}, say=print)


WANDB = LoggingConfig(tensorboard=False, wandb_project="mine")


class FakeWandb(ModuleType):
    """Recorder of the calls into the package."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> "FakeWandb":
            self.calls.append((name, (*arguments, options)))
            return self

        return call


def test_weights_and_biases_has_every_record_at_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (7, 5):  # the second run resumes before the logged step
        with Dashboards(WANDB, tmp_path, resume_step=4, settings={"seed": 1}, say=print) as dashboards:
            dashboards.write({"step": step, "loss": 0.5, "grad_norm": None})
    runs = [options for name, (*_, options) in fake.calls if name == "init"]
    assert [run["config"] for run in runs] == [{"seed": 1}] * 2
    assert runs[0]["id"] == runs[1]["id"] and runs[1]["resume"] == "allow"
    assert [arguments for name, arguments in fake.calls if name == "log"] == [
        ({"step": step, "loss": 0.5}, {}) for step in (7, 5)
    ]
    assert fake.calls[1] == ("define_metric", ("*", {"step_metric": "step"}))
    assert fake.calls[-1][0] == "finish"


def test_a_server_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()

    def init(**_: Any) -> None:
        raise fake.Error("no route")

    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(fake, "init", init, raising=False)
    with pytest.raises(InputError, match="no route; set WANDB_MODE=offline"):
        Dashboards(WANDB, tmp_path, resume_step=0, settings={}, say=print)


def test_tensorboard_does_not_import_torch(tmp_path: Path) -> None:
    """Check this with a fake torch: where torch is installed, its import would take seconds of every start."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    program = """
from pathlib import Path
from jaxopt_llm.observe.dashboards import Dashboards
from jaxopt_llm.config import LoggingConfig
with Dashboards(LoggingConfig(), Path.cwd(), 0, {}, print) as boards:
    boards.write({"step": 1, "loss": 2.0})
"""
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert list((tmp_path / "tensorboard").iterdir())
