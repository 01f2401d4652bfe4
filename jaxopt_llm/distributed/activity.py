"""Position of a thread in a run: the phase that it is in, and the seconds that it spent in each phase."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from jaxopt_llm.core.pulse import Pulse, repeat

Phase = Literal["prepare", "compile", "step", "evaluate", "save", "restore", "data"]
PHASES: tuple[Phase, ...] = get_args(Phase)
KEPT = 100  # durations of a phase, for its median
LOOK_SECONDS = 1.0  # between two looks at a value that a call changes


@dataclass(frozen=True)
class Position:
    """Position of a thread.

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
        waited: seconds of these in which it waited for a device or for other processes.
    """

    step: int = 0
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    waited: dict[str, float] = dataclasses.field(default_factory=dict)


class Activity(Pulse):
    """Record of what one thread does. That thread calls the methods; any thread may read the attributes.

    A call takes about a microsecond, and does not wait for a device.

    Attributes:
        position: None before the first phase and after the last one.
        ended: last durations of each phase, in seconds.
        totals: see Totals.
    """

    def __init__(self) -> None:
        self.position: Position | None = None
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
        self.position = Position(self._step, phase, self._marks)

    def leave(self) -> None:
        """End the current phase."""
        if self.position is None:
            return
        seconds, phase = time.perf_counter() - self._began, self.position.phase
        self.position = None
        self.ended[phase].append(seconds)
        before = self.totals.phases
        self.totals = replace(self.totals, step=self._step, phases=before | {phase: before.get(phase, 0.0) + seconds})

    def beat(self) -> None:
        """Note progress inside a phase that takes long, in which processes advance at different rates."""
        if self.position is not None:
            self.position = replace(self.position, beats=self.position.beats + 1)

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Note that the thread waits for a device or for other processes. Without a phase, nothing is noted."""
        if self.position is None or self.position.waiting:
            yield
            return
        self._marks += 1
        phase, began = self.position.phase, time.perf_counter()
        self.position = replace(self.position, marks=self._marks, waiting=True)
        try:
            yield
        finally:
            self.position = replace(self.position, waiting=False)
            waited, seconds = self.totals.waited, time.perf_counter() - began
            self.totals = replace(self.totals, waited=waited | {phase: waited.get(phase, 0.0) + seconds})

    @contextlib.contextmanager
    def wait_for_lock(self) -> Iterator[None]:
        """Note that the thread waits for a lock. It is no mark, because other processes may find the lock free."""
        if self.position is None or self.position.waiting:
            yield
            return
        self.position = replace(self.position, waiting=True)
        try:
            yield
        finally:
            self.position = replace(self.position, waiting=False)

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
