"""metrics.jsonl: one JSON object per logged step, the record of a run."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.errors import InputError
from jaxopt_llm.files import replace_durably


@dataclass(frozen=True)
class LoggingConfig:
    every: int = 10
    """steps between two logged steps"""
    tensorboard: bool = True
    """whether records also go to the run directory's tensorboard/"""
    wandb_project: str = ""
    """project of Weights & Biases that records also go to; empty is off"""


class MetricsLog:
    """Appends records to a file. Python writes floats so that they read back to the same bits."""

    def __init__(self, path: Path, resume_step: int, say: Callable[[str], None]) -> None:
        """Cuts the file back to `resume_step` first: what an interrupted run logged after its last checkpoint is
        about to happen again. say: told, in a line, that a record could not be written."""
        if path.exists():
            try:
                kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= resume_step]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path} has a line that is no record ({error}); mend or move the file") from error
            replace_durably(path, "".join(kept))
        self._path, self._say = path, say
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def write(self, record: dict[str, Any]) -> None:
        """What a full disk does not take waits for the next record."""
        self._waiting += (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            self._append()
        except OSError as error:
            self._say(f"{self._path} could not be written ({error}): its records wait for the next one")

    def _append(self) -> None:
        whole = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(self._waiting) < len(self._waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(whole)  # no half lines
            raise
        self._waiting = b""

    def sync(self) -> None:
        """Until what is written would survive a power cut: no checkpoint is to be newer than its records."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Raises OSError where a record could not be written to the end."""
        with self._file:
            self._append()


def _whole_lines(path: Path) -> list[str]:
    """A line without its newline was cut short by the death of its writer."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
