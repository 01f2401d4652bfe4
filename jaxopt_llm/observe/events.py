"""Writer of events.jsonl, the history of a run: starts, saves, skipped steps and ends, with their times."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from jaxopt_llm.core.errors import CommandError, Preempted, one_line
from jaxopt_llm.observe.metrics import Say, append_whole


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
