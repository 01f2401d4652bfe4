"""Seconds of each process per step, and the process that the others wait for."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jaxopt_llm.distributed.activity import PHASES, Totals

SLOW = 1.3  # times the median, from which a process is slow
IN_STEP = ("data", "step")  # phases of every step


@dataclass(frozen=True)
class PerStep:
    """Mean seconds per step, by process and phase. waited: seconds of these spent waiting for devices or processes."""

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

    In a synchronous step all processes take equally long, and those that are ready wait for the slowest. So the time of
    a process is what it does without waiting, plus the shortest wait of all: the work of the devices, which no process
    can avoid. A device that computes slowly is not seen, because its process waits like all others.
    """

    def add(by_phase: dict[str, float]) -> float:
        return sum(by_phase.get(phase, 0.0) for phase in IN_STEP)

    waits = [add(each) for each in seconds.waited]
    own = [add(each) - wait + min(waits) for each, wait in zip(seconds.phases, waits, strict=True)]
    slowest, median = max(range(len(own)), key=own.__getitem__), statistics.median(own)
    return (slowest, own[slowest], median) if own[slowest] > SLOW * median else None
