"""Watchdog: it ends a job that makes no progress, and names the process that the others wait for.

All processes run the same phases in the same order. Each one counts them, and sends the count with its heartbeat to
process 0. The process with the smallest count is behind: the others wait for it, in a collective or for a message. The
job hangs if that count does not change for the limit of the phase in which it stands, and the process does not note any
progress inside the phase either.
"""

import dataclasses
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxopt_llm.config import Config
from jaxopt_llm.distributed.activity import Pace, Phase, PhaseProgress, Totals, find_slowest, stacks_path
from jaxopt_llm.distributed.process_group import Processes

PERIOD = 1.0  # seconds between two looks at the processes
WINDOW_STEPS = 50  # over which the processes are compared
NAMED = 8  # most processes that a message names


@dataclass(frozen=True)
class Report:
    """Message about a process, which it sends with its heartbeat.

    Attributes:
        host: its name.
        main, save: progress of the main thread and of the background save; None if it is in no phase.
        limits: seconds without progress after which the job ends, for each of the two.
        totals: see Totals.
    """

    host: str
    main: PhaseProgress | None
    save: PhaseProgress | None
    limits: dict[str, float]
    totals: Totals

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> "Report":
        """Return the report from its JSON."""
        main, save = (message[name] and PhaseProgress(**message[name]) for name in ("main", "save"))
        return cls(message["host"], main, save, message["limits"], Totals(**message["totals"]))


class Watchdog:
    """Thread that watches the processes of a run. A context manager around the run.

    Process 0 judges for all. A process that has joined the job by `jax.distributed.initialize` sees only itself.
    """

    def __init__(self, config: Config, processes: Processes) -> None:
        """Prepare the thread. config: settings of the run; its directory receives the stacks."""
        self._config: Config = config
        self._processes = processes
        self._say: Callable[[str], None] | None = None
        self._directory = Path(config.run.directory)
        self._stopped = threading.Event()
        self._clocks = {"save": _Clock(), "main": _Clock()}
        self._recorded, self._paced = Pace(), Pace()
        self._slowest = self._saving = -1  # process that was said to be slow; step that is being saved
        self._save_began, self._save_said = 0.0, False

    def __enter__(self) -> "Watchdog":
        self._processes.main.forget()
        self._processes.main.enter("prepare", 0)
        stacks = stacks_path(self._directory, self._processes.index)
        self._processes.publish(lambda: dataclasses.asdict(self._report()), stacks)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self._processes.main.leave()

    def name_slow(self, say: Callable[[str], None]) -> None:
        """Name from now on what is slow. say: receives one line for each save and each process that is slow."""
        self._say = say

    def take_seconds(self) -> dict[str, list[float]]:
        """Return the seconds of each process per step since the last call, by field of a record.

        Only process 0 of several has them, once all processes have reported a step.
        """
        reports = self._collect()
        if self._processes.count == 1 or len(reports) < self._processes.count:
            return {}
        seconds = self._recorded.advance([reports[index].totals for index in sorted(reports)])
        return seconds.by_field() if seconds else {}

    def _report(self) -> Report:
        main, save = self._processes.main, self._processes.saving
        threads = {"main": main.progress, "save": save.progress}
        limits = {
            name: find_limit(self._config, progress.phase, activity.ended[progress.phase])
            for (name, progress), activity in zip(threads.items(), (main, save), strict=True)
            if progress is not None
        }
        return Report(socket.gethostname(), threads["main"], threads["save"], limits, main.totals)

    def _collect(self) -> dict[int, Report]:
        """Return the last report of each process by index, as far as this process has them."""
        received = {index: Report.parse(message) for index, message in self._processes.received().items()}
        return {self._processes.index: self._report()} | received

    def _run(self) -> None:
        judges = self._processes.judges
        while not self._stopped.wait(PERIOD):
            reports = self._collect()
            if judges and len(reports) >= self._processes.reporting:
                self._judge(reports)
            if self._processes.first and self._say is not None:
                self._find_slow_save(reports[0], self._say)
                if len(reports) == self._processes.count > 1:
                    self._find_slow_process([reports[index].totals for index in sorted(reports)], self._say)

    def _judge(self, reports: Mapping[int, Report]) -> None:
        """End the job if the processes that are behind have made no progress for their limit."""
        settings = self._config.watchdog
        if not settings.factor or (self._processes.count == 1 and not settings.single_process):
            return
        for kind, clock in self._clocks.items():
            threads = {index: at for index, each in reports.items() if (at := getattr(each, kind))}
            behind = find_behind(threads)
            seconds = clock.measure([(threads[index].marks, threads[index].beats) for index in behind])
            if behind and seconds > (limit := max(reports[index].limits[kind] for index in behind)):
                self._processes.end_hung(self._describe(behind, reports, threads, seconds, limit))

    def _describe(
        self,
        behind: Sequence[int],
        reports: Mapping[int, Report],
        threads: Mapping[int, PhaseProgress],
        seconds: float,
        limit: float,
    ) -> str:
        count, at = self._processes.count, threads[behind[0]]
        named = ", ".join(f"process {index} ({reports[index].host})" for index in behind[:NAMED])
        named += f" and {len(behind) - NAMED} more" if len(behind) > NAMED else ""
        doing = "waits for a device or a collective in" if at.waiting else "is in"
        return (
            f"{named} of {count} makes no progress: it {doing} phase {at.phase} of step {at.step} for {seconds:.0f} s, "
            f"over its limit of {limit:g} s (watchdog.factor={self._config.watchdog.factor:g}); "
            f"the Python stacks are in {self._directory}/stacks.*.txt, or on standard error"
        )

    def _find_slow_save(self, report: Report, say: Callable[[str], None]) -> None:
        step = report.save.step if report.save else -1
        if step != self._saving:
            self._saving, self._save_began, self._save_said = step, time.monotonic(), False
        seconds = time.monotonic() - self._save_began
        if step >= 0 and seconds > self._config.watchdog.floor_seconds and not self._save_said:
            self._save_said = True
            say(
                f"the save of step {step} is slow: it has taken {seconds:.0f} s so far; the run goes on, and ends "
                f"after {report.limits['save']:g} s without progress of the save"
            )

    def _find_slow_process(self, totals: Sequence[Totals], say: Callable[[str], None]) -> None:
        seconds = self._paced.advance(totals, WINDOW_STEPS)
        if seconds is None:
            return
        found = find_slowest(seconds)
        if found and found[0] != self._slowest:
            index, own, median = found
            say(
                f"process {index} is slow: in the last {WINDOW_STEPS} steps or more it took {own:.3g} s per step "
                f"without waiting for others, the median of the processes is {median:.3g} s"
            )
        self._slowest = found[0] if found else -1


class _Clock:
    """Seconds for which a value has not changed."""

    def __init__(self) -> None:
        self._value: object = None
        self._since = time.monotonic()

    def measure(self, value: object) -> float:
        now = time.monotonic()
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since


def find_limit(config: Config, phase: Phase, ended: Iterable[float]) -> float:
    """Return the seconds without progress after which a job ends. ended: durations of the phase so far."""
    settings, seconds = config.watchdog, tuple(ended)
    compiles = phase in ("step", "evaluate") and not seconds
    is_long = compiles or phase in ("prepare", "compile", "restore", "save")
    floor = settings.long_floor_seconds if is_long else settings.floor_seconds
    return max(floor, settings.factor * statistics.median(seconds)) if seconds else floor


def find_behind(threads: Mapping[int, PhaseProgress]) -> list[int]:
    """Return the processes that the others wait for: the ones with the fewest marks that do not wait themselves.

    If all processes with the fewest marks wait, for a device or in a collective that does not return, return them all.
    """
    fewest = min((progress.marks for progress in threads.values()), default=0)
    last = [index for index, progress in sorted(threads.items()) if progress.marks == fewest]
    return [index for index in last if not threads[index].waiting] or last
