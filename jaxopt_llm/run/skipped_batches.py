"""Batches that a run leaves out: those before a spike of the loss, from the checkpoint to which the run went back."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxopt_llm.step.step import Metrics

RECORD = "skipped_batches"  # the entry of a checkpoint's record


@dataclass(frozen=True)
class SkippedBatches:
    """Ranges of batches that are left out: the first one, and the one after the last. Batch 0 is the first of all."""

    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def from_record(record: dict[str, Any]) -> "SkippedBatches":
        """Return the batches left out before a checkpoint."""
        return SkippedBatches(tuple((first, end) for first, end in record.get(RECORD, ())))

    def to_record(self) -> dict[str, Any]:
        return {RECORD: [list(each) for each in self.ranges]} if self.ranges else {}

    @property
    def count(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def batch_after(self, step: int) -> int:
        """Return the batch of the step after `step`. The ranges all begin at or before it."""
        return step + self.count

    def leave_out(self, start: int, end: int) -> "SkippedBatches":
        """Leave out also the batches of the steps after `start`, up to `end`."""
        return SkippedBatches((*self.ranges, (self.batch_after(start), self.batch_after(end))))


def is_spike(metrics: Metrics) -> bool:
    """Return whether a step was skipped although its numbers are finite: they were outliers."""
    finite = np.isfinite(float(metrics["loss"])) and np.isfinite(float(metrics["grad_norm"]))
    return bool(finite) and int(metrics["skipped_in_a_row"]) > 0 and not int(metrics["overflow"])
