"""Faults of a run: the decision that follows a fault, the journal of faults, and the hosts that cause too many.

The journal is the file faults.jsonl. A fault is a line in it: when, where and what it was, the checkpoint that
remained, and the restart that follows. When the run is back, a second line says how long it was away. If the supervisor
dies in between, only the first line exists.

Strikes are faults counted per host. A host with too many of them is used only if no other host can take its place. They
are lines of the journal, so that they outlive the supervisor that leads.
"""

import json
import os
import re
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import (
    CheckpointError,
    InputError,
    Preempted,
    ProcessLost,
    StateCorrupted,
    TrainingDiverged,
)
from jaxopt_llm.supervision.host import End, describe_code

# Exit codes after which the program is not started again: it is done, or a restart would not repair the cause.
FINAL = frozenset((0, InputError.exit_code, TrainingDiverged.exit_code, CheckpointError.exit_code))
STOPPED = Preempted.exit_code
MAX_PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class RestartBudget:
    """Restarts since the last new checkpoint.

    Attributes:
        limit: largest number of restarts without a new checkpoint.
        first_pause: seconds before the first of them; each further pause is twice as long.
    """

    limit: int
    first_pause: float
    checkpoint: int = 0
    restarts: int = 0

    def after_fault(self, checkpoint: int) -> "RestartBudget":
        """Return the budget after a fault. checkpoint: step of the newest checkpoint."""
        if checkpoint > self.checkpoint:
            return replace(self, checkpoint=checkpoint, restarts=1)
        return replace(self, restarts=self.restarts + 1)

    @property
    def exhausted(self) -> bool:
        return self.restarts > self.limit

    @property
    def pause_seconds(self) -> float:
        return min(self.first_pause * 2.0 ** min(self.restarts - 1, 30), MAX_PAUSE_SECONDS)


def find_cause(ends: Sequence[End]) -> End | None:
    """Return the end that caused the other ends, or None if all programs are done.

    Exit code 5 says that another process was lost or is missing, so an end with another code is preferred to it.

    ends: in the order in which they were noticed.
    """
    faults = [end for end in ends if end.code != 0]
    return min(faults, key=lambda end: end.code == ProcessLost.exit_code, default=None)


def find_final_code(ends: Sequence[End]) -> int | None:
    """Return the exit code of the job if a restart would not help, or None to restart it.

    Exit codes 2, 3 and 4 are final only if every host ended with one of them or with 5.
    """
    cause = find_cause(ends)
    if cause is None:
        return 0
    own = [end.code for end in ends if end.code != ProcessLost.exit_code]
    return cause.code if all(code in FINAL for code in own) and cause.code in FINAL else None


# ---- The journal.

JOURNAL = "faults.jsonl"
_TAIL_BYTES = 65536  # of events.jsonl and metrics.jsonl, which are read at each fault


class Journal:
    """Journal in a run directory. Of the supervisors of a job, the leader writes it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write_fault(self, cause: End, ends: Sequence[End], restart: int) -> None:
        """Append a fault.

        Args:
            ends: ends of the program on all hosts.
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
    return [entry for line in lines if (entry := json_files.parse_object(line)) is not None]


# ---- Strikes.

LIMIT = 3  # a host with so many strikes within MEMORY_SECONDS is avoided; wrong bits are as many at once
MEMORY_SECONDS = 86400.0


class Strikes:
    """Strikes of the hosts of a job."""

    def __init__(self, directory: Path, journal: Journal) -> None:
        self._directory, self._journal = directory, journal
        self._strikes = read_strikes(directory)

    def add(self, cause: End, chosen: Sequence[int], killed: Collection[int]) -> int | None:
        """Count the fault that ended a round against the host that caused it. Return the host if it is avoided now.

        Nothing counts if it is not known which host caused the fault: a host or its program was lost; a program was
        stopped, or ended for a reason that is the same on all hosts; several programs had to be killed; or several
        devices may have computed wrongly.

        Args:
            chosen: hosts of the round, in the order of its processes.
            killed: hosts on which the leader had to kill the program.
        """
        host, count = cause.index, 1
        if cause.code in (None, ProcessLost.exit_code, STOPPED, *FINAL) or (host in killed and len(killed) > 1):
            return None
        if cause.code == StateCorrupted.exit_code:
            ranks = find_corrupted(self._directory)
            if len(ranks) != 1 or ranks[0] >= len(chosen):
                return None
            host, count = chosen[ranks[0]], LIMIT
        before = self.avoids(host)
        self._strikes.append((time.time(), host, count))
        self._journal.write_strikes(host, count)
        return host if self.avoids(host) and not before else None

    def avoids(self, host: int) -> bool:
        """Return whether a host has so many strikes that others are preferred to it."""
        oldest = time.time() - MEMORY_SECONDS
        return sum(count for moment, index, count in self._strikes if index == host and moment > oldest) >= LIMIT
