"""Journal of a run's faults, faults.jsonl, and the files of the run that the supervisor reads.

A fault is a line: when, where, what, the checkpoint that remained and the restart that follows. When the run is back, a
second line says how long it was away: a supervisor that dies in between leaves the first.
"""

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxopt_llm.core import json_files
from jaxopt_llm.supervision.child import describe_code
from jaxopt_llm.supervision.host import End

JOURNAL = "faults.jsonl"
_TAIL_BYTES = 65536  # of events.jsonl and metrics.jsonl, which are read at each fault


class Journal:
    """Journal in a run directory. Of the supervisors of a job, the leader writes it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write_fault(self, cause: End, ends: Sequence[End], restart: int) -> None:
        """Append a fault.

        Args:
            ends: those of all hosts.
            restart: number of the restart that follows, counted from the last new checkpoint; 0 if the job ends.
        """
        who = {"fault": self.describe(cause), "code": cause.code, "process": cause.index, "host": cause.host}
        steps = {"checkpoint": newest_checkpoint(self._directory), "reached": last_step(self._directory)}
        codes = {str(end.index): end.code for end in ends}
        self._append({**who, "what": cause.what, "codes": codes, **steps, "restart": restart})

    def write_hosts(self, indices: Sequence[int], flags: Sequence[str]) -> None:
        """Append that the run continues on other hosts. flags: the settings that they need."""
        self._append({"hosts": list(indices), "flags": list(flags)})

    def write_strikes(self, index: int, count: int) -> None:
        """Append that the last fault counts against a host."""
        self._append({"blamed": index, "strikes": count})

    @staticmethod
    def describe(cause: End) -> str:
        return "host lost" if cause.code is None else describe_code(cause.code)

    def write_recovery(self, seconds: float) -> None:
        """Append that the run is back. seconds: since the fault."""
        self._append({"recovered_after": round(seconds, 1)})

    def _append(self, entry: dict[str, Any]) -> None:
        """Append a line by one write.

        A line that cannot be written is reported and lost: the journal is not worth a run.
        """
        line = json.dumps({"time": round(time.time(), 3), **entry}) + "\n"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with (self._directory / JOURNAL).open("ab", buffering=0) as file:
                file.write(line.encode())
        except OSError as error:
            print(f"supervise: a line of the journal is lost ({error}): {line}", end="", file=sys.stderr, flush=True)


def newest_checkpoint(directory: Path) -> int:
    """Return the step of the newest complete checkpoint of a run; 0 if there is none."""
    folder = directory / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    return max((int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)), default=0)


def last_step(directory: Path) -> int:
    """Return the last step that a run has recorded; 0 if there is none."""
    return max((entry["step"] for entry in _read_tail(directory / "metrics.jsonl") if "step" in entry), default=0)


def last_start(directory: Path) -> dict[str, Any]:
    """Return the event of the last start of a run, after which its first step came; {} if there is none."""
    events = _read_tail(directory / "events.jsonl")
    return next((entry for entry in reversed(events) if entry.get("event") in ("start", "resume")), {})


def find_corrupted(directory: Path) -> list[int]:
    """Return the processes whose devices may have computed wrongly since the last start; [] if none was named."""
    for entry in reversed(_read_tail(directory / "events.jsonl")):
        if entry.get("event") == "corruption":
            return [int(process) for process in entry.get("processes", ())]
        if entry.get("event") in ("start", "resume"):
            break
    return []


def read_strikes(directory: Path) -> list[tuple[float, int, int]]:
    """Return (time, host, count) of the strikes in the journal's tail."""
    entries = _read_tail(directory / JOURNAL)
    return [(entry["time"], entry["blamed"], entry["strikes"]) for entry in entries if "blamed" in entry]


def read_hosts(directory: Path) -> tuple[int, ...]:
    """Return the hosts on which a run continued last, by the journal's tail; () if it names none."""
    entries = _read_tail(directory / JOURNAL)
    return next((tuple(entry["hosts"]) for entry in reversed(entries) if "hosts" in entry), ())


def _read_tail(path: Path) -> list[dict[str, Any]]:
    """Return the entries in the last part of a file with one on each line."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        lines = file.read().split(b"\n")
    return [entry for line in lines if isinstance(entry := _parse(line), dict)]


def _parse(line: bytes) -> Any:
    """Return the value of a line; None for one that is cut, at the ends of what is read."""
    try:
        return json_files.parse(line)
    except ValueError:
        return None
