"""Losses and speed of a run between two records."""

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import jax


@dataclass(frozen=True)
class LossWindow:
    """Losses of the steps since the last record. A checkpoint holds it, so that a resumed run records the same means.

    Attributes:
        steps: number of steps.
        updates: number of steps that updated the parameters.
        finite: number of steps whose loss was finite.
        total: sum of these losses.
    """

    steps: int = 0
    updates: int = 0
    finite: int = 0
    total: float = 0.0

    def add(self, loss: float, updated: bool) -> "LossWindow":
        """Return the window with one more step."""
        window = replace(self, steps=self.steps + 1, updates=self.updates + updated)
        return replace(window, finite=self.finite + 1, total=self.total + loss) if math.isfinite(loss) else window

    @property
    def mean(self) -> float | None:
        """Mean of the finite losses; None without any."""
        return self.total / self.finite if self.finite else None


class Meter:
    """Maker of the records of a run."""

    def __init__(self, unit: str, units_per_step: int, utilisation: dict[str, float]) -> None:
        """Start the clock at step 0.

        Args:
            unit: what a batch consists of: "tokens" or "rows".
            units_per_step: their number in the whole batch.
            utilisation: for each utilisation field of a record, the share of the devices' peak at one unit per second.
                See model/flops.py.
        """
        self._unit, self._units, self._utilisation = unit, units_per_step, utilisation
        self.restart(0)

    def restart(self, step: int) -> None:
        """Restart the clock after this step, so that an evaluation or a save before it does not count."""
        self._first, self._clock, self._waited = step, time.perf_counter(), 0.0

    def skip(self, steps: int) -> None:
        """Leave out steps that the run does not take: its number of the step jumps."""
        self._first += steps

    def add_wait(self, seconds: float) -> None:
        """Add time in which the run waited for a batch."""
        self._waited += seconds

    def read_speed(self, step: int) -> dict[str, float]:
        """Return the speed up to a step that has just ended, for a record."""
        return {f"{self._unit}_per_second": self._units / self._measure_step(step)}

    def _measure_step(self, step: int) -> float:
        """Return the seconds of each step since the clock was restarted."""
        return (time.perf_counter() - self._clock) / (step - self._first)

    def make_record(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Return the record of a step that has just ended, and restart the clock."""
        seconds = self._measure_step(step)
        per_second = self._units / seconds
        record = {
            "step": step,
            **values,
            self._unit: step * self._units,
            f"{self._unit}_per_second": per_second,
            "step_seconds": seconds,
            "data_seconds": self._waited / (step - self._first),
            **{name: share * per_second for name, share in self._utilisation.items()},
        }
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        if peak is not None:
            record["peak_bytes"] = peak
        self.restart(step)
        return record
