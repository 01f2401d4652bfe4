"""The activity of a process: the phase of each thread, the seconds in each phase, and Python stacks while it hangs."""

import collections
import contextlib
import dataclasses
import faulthandler
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from jaxopt_llm.core.pulse import Pulse, repeat

Phase = Literal["prepare", "compile", "step", "evaluate", "save", "restore", "data"]
PHASES: tuple[Phase, ...] = get_args(Phase)
KEPT = 100  # durations of a phase, for its median
LOOK_SECONDS = 1.0  # between two looks at a value that a call changes
SLOW = 1.3  # times the median, from which a process is slow
IN_STEP = ("data", "step")  # phases of every step
WRITE_SECONDS = 5  # after this time the stacks go to standard error: perhaps the disk hangs


@dataclass(frozen=True)
class PhaseProgress:
    """Progress of a thread through the phases.

    Attributes:
        step: step that it works on.
        marks: number of phases and waits that it has begun so far. Of threads that do the same work in all processes,
            the one with the smallest number is behind.
        waiting: it waits for a device or for other processes.
        beats: changes with progress inside the phase.
    """

    step: int
    phase: Phase
    marks: int
    waiting: bool = False
    beats: int = 0


@dataclass(frozen=True)
class Totals:
    """Seconds that a thread has spent so far. The current phase is not included.

    Attributes:
        step: step that it works on.
        phases: seconds in each phase that it has been in.
        waited: seconds within each phase in which it waited for a device or for other processes.
    """

    step: int = 0
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    waited: dict[str, float] = dataclasses.field(default_factory=dict)


class Activity(Pulse):
    """Record of what one thread does. That thread calls the methods; any thread may read the attributes.

    A call takes about a microsecond, and does not wait for a device.

    Attributes:
        progress: None before the first phase and after the last one.
        ended: last durations of each phase, in seconds.
        totals: see Totals.
    """

    def __init__(self) -> None:
        self.progress: PhaseProgress | None = None
        self.ended: dict[Phase, collections.deque[float]] = {phase: collections.deque(maxlen=KEPT) for phase in PHASES}
        self.totals = Totals()
        self._began, self._marks, self._step = 0.0, 0, 0

    def forget(self) -> None:
        """Forget the durations of the phases: another run begins."""
        for seconds in self.ended.values():
            seconds.clear()

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """End the current phase and begin another one. step: None for the current step."""
        self.leave()
        self._step = self._step if step is None else step
        self._began, self._marks = time.perf_counter(), self._marks + 1
        self.progress = PhaseProgress(self._step, phase, self._marks)

    def leave(self) -> None:
        """End the current phase."""
        if self.progress is None:
            return
        seconds, phase = time.perf_counter() - self._began, self.progress.phase
        self.progress = None
        self.ended[phase].append(seconds)
        before = self.totals.phases
        self.totals = replace(self.totals, step=self._step, phases=before | {phase: before.get(phase, 0.0) + seconds})

    def beat(self) -> None:
        """Note progress inside a phase that takes long, in which processes advance at different rates."""
        if self.progress is not None:
            self.progress = replace(self.progress, beats=self.progress.beats + 1)

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Note that the thread waits for a device or for other processes. Without a phase, nothing is noted."""
        if self.progress is None or self.progress.waiting:
            yield
            return
        self._marks += 1
        phase, began = self.progress.phase, time.perf_counter()
        self.progress = replace(self.progress, marks=self._marks, waiting=True)
        try:
            yield
        finally:
            self.progress = replace(self.progress, waiting=False)
            waited, seconds = self.totals.waited, time.perf_counter() - began
            self.totals = replace(self.totals, waited=waited | {phase: waited.get(phase, 0.0) + seconds})

    @contextlib.contextmanager
    def wait_for_lock(self) -> Iterator[None]:
        """Note that the thread waits for a lock. It is no mark, because other processes may find the lock free."""
        if self.progress is None or self.progress.waiting:
            yield
            return
        self.progress = replace(self.progress, waiting=True)
        try:
            yield
        finally:
            self.progress = replace(self.progress, waiting=False)

    @contextlib.contextmanager
    def follow(self, measure: Callable[[], object]) -> Iterator[None]:
        """Note progress whenever a value changes. Meanwhile the thread must not use this object."""
        before = measure()

        def look() -> None:
            nonlocal before
            if (now := measure()) != before:
                self.beat()
                before = now

        with repeat(look, LOOK_SECONDS, "follow"):
            yield


# ---- Seconds of each process per step.


@dataclass(frozen=True)
class PerStep:
    """Mean seconds per step, by process and phase. waited: the part spent waiting for devices or processes."""

    phases: list[dict[str, float]]
    waited: list[dict[str, float]]

    def by_field(self) -> dict[str, list[float]]:
        """Return the fields of a record: lists over the processes, for the phases in which they were."""
        found = [phase for phase in PHASES if any(each.get(phase) for each in self.phases)]
        fields = {str(phase): [each.get(phase, 0.0) for each in self.phases] for phase in found}
        fields["waited"] = [sum(each.values()) for each in self.waited]
        return {f"process_seconds/{name}": values for name, values in fields.items()}


class Pace:
    """Difference between the totals of the processes now and at an earlier time, per step."""

    def __init__(self) -> None:
        self._before: Sequence[Totals] | None = None

    def advance(self, now: Sequence[Totals], steps: int = 1) -> PerStep | None:
        """Return the seconds per step since the last result, and begin again.

        Args:
            steps: steps that each process must have done since then; before, the result is None. The first result is
                None too.
        """
        # Until each process has ended a step, `step` may leap: from 0 to the step from which a run continues.
        if self._before is None or not all("step" in each.phases for each in self._before):
            self._before = now
        pairs = list(zip(self._before, now, strict=True))
        if min(after.step - before.step for before, after in pairs) < steps:
            return None
        self._before = now

        def subtract(kind: str) -> list[dict[str, float]]:
            return [
                {
                    phase: (seconds - getattr(before, kind).get(phase, 0.0)) / (after.step - before.step)
                    for phase, seconds in getattr(after, kind).items()
                }
                for before, after in pairs
            ]

        return PerStep(subtract("phases"), subtract("waited"))


def find_slowest(seconds: PerStep) -> tuple[int, float, float] | None:
    """Return the process that slows the others down, its seconds and the median of all; None if there is none.

    In a synchronous step all processes take equally long: the ones that are ready wait for the slowest. So the time of
    a process is the time in which it does not wait, plus the shortest wait of all processes: the work of the devices,
    which no process can avoid. A device that computes slowly is not seen, because its process waits like all others.
    """

    def add(by_phase: dict[str, float]) -> float:
        return sum(by_phase.get(phase, 0.0) for phase in IN_STEP)

    waits = [add(each) for each in seconds.waited]
    own = [add(each) - wait + min(waits) for each, wait in zip(seconds.phases, waits, strict=True)]
    slowest, median = max(range(len(own)), key=own.__getitem__), statistics.median(own)
    return (slowest, own[slowest], median) if own[slowest] > SLOW * median else None


# ---- Stacks.


def stacks_path(directory: Path, process: int) -> Path:
    """Return the file of a process, in the run directory."""
    return directory / f"stacks.{process}.{socket.gethostname()}.txt"


def write_stacks(path: Path, reason: str) -> None:
    """Append the Python stacks of all threads to a file, or print them if it cannot be written in time."""
    written = threading.Event()

    def write() -> None:
        try:
            with path.open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {reason}\n")
                file.flush()
                faulthandler.dump_traceback(file)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            return  # the stacks are printed instead
        written.set()

    thread = threading.Thread(target=write, name="stacks", daemon=True)
    thread.start()
    thread.join(WRITE_SECONDS)
    if not written.is_set():
        print(f"{path} could not be written; the stacks of this process:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
