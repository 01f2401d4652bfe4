"""metrics.jsonl after interruptions."""

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from disks import files_no_larger_than

from jaxopt_llm.observe import dashboards
from jaxopt_llm.observe.dashboards import MetricsLog


def write(path: Path, *steps: int, resume_step: int = 0) -> None:
    log = MetricsLog(path, resume_step, print)
    for step in steps:
        log.write({"step": step, "resumed_at": resume_step})
    log.close()


def read(path: Path) -> list[tuple[int, int]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(record["step"], record["resumed_at"]) for record in records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_resume_removes_later_records_and_goes_on(path: Path) -> None:
    write(path, 1, 2, 3, 4)
    write(path, 3, 4, 5, resume_step=2)
    assert read(path) == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2)]
    assert list(path.parent.iterdir()) == [path]


def test_a_resume_after_the_last_record_keeps_all(path: Path) -> None:
    write(path, 1, 2)
    write(path, 5, resume_step=4)
    assert read(path) == [(1, 0), (2, 0), (5, 4)]


@pytest.mark.parametrize(
    "torn", ['{"step": 2, "lo', '{"step": 2, "resumed_at": 0}'], ids=["within", "before its newline"]
)
def test_a_torn_last_line_is_dropped(path: Path, torn: str) -> None:
    write(path, 1)
    with path.open("a") as file:
        file.write(torn)
    write(path, 3, resume_step=2)
    assert read(path) == [(1, 0), (3, 2)]


def test_a_record_is_in_the_file_before_the_next_is_written(path: Path) -> None:
    log = MetricsLog(path, 0, print)
    log.write({"step": 1, "resumed_at": 0})
    assert read(path) == [(1, 0)]
    log.close()


def test_a_record_that_a_full_disk_rejects_waits_for_the_next(path: Path) -> None:
    messages: list[str] = []
    log = MetricsLog(path, 0, messages.append)
    log.write({"step": 1, "resumed_at": 0})
    with files_no_larger_than(path.stat().st_size + 5):
        log.write({"step": 2, "resumed_at": 0})
        assert read(path) == [(1, 0)]  # and not five bytes more
    assert len(messages) == 1 and str(path) in messages[0]
    log.write({"step": 3, "resumed_at": 0})
    assert read(path) == [(1, 0), (2, 0), (3, 0)]
    with files_no_larger_than(path.stat().st_size):
        log.write({"step": 4, "resumed_at": 0})
        with pytest.raises(OSError):
            log.close()


def test_a_sync_writes_what_waits_and_after_a_failed_one_everything_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a failed fsync once, and then drops the pages that it could not write."""
    log = MetricsLog(path, 0, [].append)
    log.write({"step": 1, "resumed_at": 0})
    with files_no_larger_than(path.stat().st_size):
        log.write({"step": 2, "resumed_at": 0})
        with pytest.raises(OSError):
            log.sync()
    log.sync()
    assert read(path) == [(1, 0), (2, 0)]

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError):
            log.sync()
    inode = path.stat().st_ino
    log.sync()
    assert path.stat().st_ino != inode
    log.write({"step": 3, "resumed_at": 0})
    log.close()
    assert read(path) == [(1, 0), (2, 0), (3, 0)] and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("value", [0.1, 1 / 3, float(np.float32(1 / 3)), 5e-324, -0.0, 1e300])
def test_floats_read_back_to_the_same_bits(path: Path, value: float) -> None:
    log = MetricsLog(path, 0, print)
    log.write({"step": 1, "loss": value})
    log.close()
    assert json.loads(path.read_text())["loss"].hex() == value.hex()


def test_a_record_is_written_while_another_thread_syncs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save in the background may sync for long, and also after the log is closed, as after an error."""
    log = MetricsLog(path, 0, [].append)
    begun, allowed, fsync = threading.Event(), threading.Event(), os.fsync

    def wait_and_sync(descriptor: int) -> None:
        begun.set()
        assert allowed.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", wait_and_sync)
    syncing = threading.Thread(target=log.sync)
    syncing.start()
    assert begun.wait(60)
    log.write({"step": 1, "resumed_at": 0})
    assert read(path) == [(1, 0)]
    allowed.set()
    syncing.join()
    log.close()
    log.sync()


def test_a_log_that_was_closed_without_its_records_cannot_be_synced(path: Path) -> None:
    log = MetricsLog(path, 0, [].append)
    with files_no_larger_than(0):
        log.write({"step": 1, "resumed_at": 0})
        with pytest.raises(OSError):
            log.close()
    with pytest.raises(ValueError, match="closed"):
        log.sync()


def test_closing_writes_the_file_again_after_a_sync_that_failed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reports an error of the disk once: the next fsync would succeed, without the pages that were lost."""
    log, fsync, written = MetricsLog(path, 0, [].append), os.fsync, list[Path]()

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log.write({"step": 1, "resumed_at": 0})
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        log.sync()
    monkeypatch.setattr(os, "fsync", fsync)
    replace = dashboards.replace_durably
    monkeypatch.setattr(dashboards, "replace_durably", lambda file, text: (written.append(file), replace(file, text)))
    log.close()
    assert written == [path]
    assert read(path) == [(1, 0)]
