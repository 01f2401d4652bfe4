"""Logs of a run, one JSON object on each line: metrics.jsonl with its records, and events.jsonl with its history.

A record has the numbers of a logged step. An event is a start, a save, a skipped step or an end, with its time.
"""

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import CommandError, InputError, Preempted, one_line
from jaxopt_llm.core.files import replace_durably

Say = Callable[[str], None]  # receives one line for each record that could not be written


def append_whole(file: BinaryIO, lines: bytes) -> None:
    """Append lines to an unbuffered file, completely or not at all.

    Raises:
        OSError: the lines could not be written, for example because the disk is full.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(lines) < len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(size)  # remove an incomplete line
        raise


class MetricsLog:
    """Log that appends records to a file. Floats read back to the same bits.

    One other thread may call `sync`, also after `close`; a `write` does not wait for its fsync.
    """

    def __init__(self, path: Path, resume_step: int, say: Say) -> None:
        """Open the file, and remove the records after `resume_step` from it.

        An interrupted run may have logged steps after its last checkpoint. These steps will run again.

        Raises:
            InputError: the file has a line that is not a record.
        """
        if path.exists():
            try:
                # A line without a newline was cut short when its writer died.
                whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
                lines = [line for line in whole if json_files.parse(line)["step"] <= resume_step]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path} has a line that is not a record ({error}); fix or move the file") from error
            replace_durably(path, "".join(lines))
        self._path, self._say = path, say
        self._file = path.open("ab", buffering=0)
        self._pending = b""
        self._unsynced = False  # a sync failed: the kernel does not write these pages again
        self._lock = threading.Lock()  # of the file and of the records that wait
        self._syncing = threading.Lock()  # taken before the other one

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. If the disk is full, the record waits and is written together with the next one."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            with self._lock:
                self._pending += line
                self._append()
        except OSError as error:
            self._say(f"{self._path} could not be written ({error}); the next record will write it again")

    def _append(self) -> None:
        append_whole(self._file, self._pending)
        self._pending = b""

    def sync(self) -> None:
        """Wait until the records are on disk: no checkpoint may be newer than its records.

        Raises:
            OSError: a record could not be written; the next call writes it again.
            ValueError: the log is closed, and `close` could not bring all records to the disk.
        """
        with self._syncing:
            with self._lock:
                if self._file.closed and not self._pending and not self._unsynced:
                    return
                self._append_and_repair()
            self._sync_file()

    def _append_and_repair(self) -> None:
        """Write the pending records, and after a sync that failed the whole file again."""
        self._append()
        if self._unsynced:
            replace_durably(self._path, self._path.read_text())
            self._file.close()
            self._file = self._path.open("ab", buffering=0)

    def _sync_file(self) -> None:
        self._unsynced = True
        os.fsync(self._file.fileno())
        self._unsynced = False

    def close(self) -> None:
        """Bring the records to the disk and close the file.

        Raises:
            OSError: a record could still not be written.
        """
        with self._syncing, self._lock:
            try:
                self._append_and_repair()
                self._sync_file()
            finally:
                self._file.close()


class EventLog:
    """Log of events, one JSON object for each. A resume keeps all earlier events.

    An event that cannot be written is reported and lost: the history is not worth a run. Any thread may write.
    """

    def __init__(self, directory: Path, say: Say, writes: bool = True) -> None:
        """Name the file in the run directory, which need not exist before the first event.

        writes: whether this process writes the events of the job.
        """
        self._path, self._say, self._writes = directory / "events.jsonl", say, writes
        self._lock = threading.Lock()

    def write(self, step: int, event: str, detail: str = "", **more: Any) -> None:
        """Append an event. more: further fields."""
        if not self._writes:
            return
        fields = more if not detail else {"detail": detail, **more}
        entry = {"time": round(time.time(), 3), "step": step, "event": event, **fields}
        line = (json.dumps(entry) + "\n").encode()
        try:
            with self._lock, self._path.open("a+b", buffering=0) as file:
                append_whole(file, b"\n" * _ends_within_a_line(file) + line)
        except OSError as error:
            self._say(f"{self._path} could not be written ({error}); the event {event} of step {step} is lost")

    def write_save(self, step: int, failure: str) -> None:
        """Append the end of a save. failure: why it failed, or ""."""
        self.write(step, "checkpoint_failed" if failure else "checkpoint", failure)

    def write_end(self, step: int, error: BaseException | None, reason: str = "") -> None:
        """Append the end of the process: the end of the run, a requested stop, or a fault.

        reason: why the run ends before its last step.
        """
        if error is None:
            self.write(step, "end", reason)
        elif isinstance(error, Preempted):
            self.write(step, "stop", one_line(error))
        else:
            kind = "" if isinstance(error, CommandError) else f"{type(error).__name__}: "
            self.write(step, "fault", kind + one_line(error))


def _ends_within_a_line(file: BinaryIO) -> bool:
    """Return whether the last line was cut short when the machine died."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
