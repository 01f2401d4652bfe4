"""Losses, metrics and speed of a run between two records."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxopt_llm.core.metric import Max, Mean, Metric, Sum

KINDS: dict[str, type[Metric]] = {kind.__name__: kind for kind in (Mean, Sum, Max)}
# The fields of a record that are no metrics of a step. `fit` counts rows, and `train` tokens.
OF_RECORD = ("step", "rows", "rows_per_second", "tokens_per_second", "step_seconds", "data_seconds", "peak_bytes")
LONGEST = 256  # steps whose metrics wait on the devices until they are read


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


class MetricsWindow:
    """Metrics of the model over the steps since the last record whose loss was finite.

    A plain metric has the mean over these steps, as the loss; the others are combined as they say. The metrics stay on
    the devices until they are needed. A checkpoint holds them, as it holds the losses.
    """

    def __init__(self) -> None:
        self._joined: dict[str, Metric] = {}  # NumPy arrays, float64
        self._waiting: list[Mapping[str, Any]] = []

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step: scalars or vectors on the devices, or `Metric`s of them."""
        self._waiting.append(metrics)
        if len(self._waiting) == LONGEST:
            self._read()

    def _read(self) -> dict[str, Metric]:
        steps, self._waiting = jax.device_get(self._waiting), []
        for name in dict.fromkeys(name for each in steps for name in each):
            found = [each[name] for each in steps if name in each]  # the steps of several losses have different ones
            parts = [each if isinstance(each, Metric) else Mean(each, 1.0) for each in found]
            before = self._joined.get(name)
            # A resumed run may have another loss.
            if type(before) is type(parts[0]) and np.shape(before.value) == np.shape(parts[0].value):
                parts.insert(0, before)
            self._joined[name] = jax.tree.map(lambda *values: np.stack(values, dtype=np.float64), *parts).join()
        return self._joined

    def read(self) -> dict[str, Any]:
        """Return the value of each metric as NumPy arrays."""
        return {name: metric.value for name, metric in self._read().items()}

    def to_record(self) -> dict[str, Any]:
        """Return the entry of a checkpoint."""
        return {
            "metrics": {
                name: {"kind": type(metric).__name__}
                | {field: np.asarray(value).tolist() for field, value in vars(metric).items()}
                for name, metric in self._read().items()
            }
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "MetricsWindow":
        window = cls()
        for name, each in record.get("metrics", {}).items():
            fields = {field: np.asarray(value) for field, value in each.items() if field != "kind"}
            window._joined[name] = KINDS[each["kind"]](**fields)
        return window


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
