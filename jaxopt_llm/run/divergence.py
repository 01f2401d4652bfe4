"""Steps that change nothing: which were skipped, how a run answers to spikes of the loss, and when it has diverged."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import TrainingDiverged
from jaxopt_llm.core.metric import read_value
from jaxopt_llm.observe.meter import LossWindow
from jaxopt_llm.step.step import Metrics, is_of_step

SKIP_LIMIT = 10  # skipped steps in a row, or rollbacks to one checkpoint, that end a run; overflows do not count
_NOT_RECORDED = {"skipped", "skipped_in_a_row", "overflow"}
SKIPPED_BATCHES = "skipped_batches"  # the entry of a checkpoint's record


@dataclass(frozen=True)
class FinishedStep:
    """A step whose metrics have been read.

    Attributes:
        window: losses of the steps since the last record before this step, this one included.
    """

    step: int
    metrics: Metrics
    window: LossWindow

    @property
    def updated(self) -> bool:
        """True if the step updated the parameters."""
        return made_update(self.metrics)

    @property
    def of_model(self) -> Metrics:
        """Metrics of the model."""
        return {name: metric for name, metric in self.metrics.items() if not is_of_step(name)}

    def read_scalars(self) -> dict[str, Any]:
        """Return the metrics of the step, except those that a record does not hold as they are."""
        return {
            name: to_json_number(read_value(metric))
            for name, metric in self.metrics.items()
            if name not in _NOT_RECORDED
        }


def made_update(metrics: Metrics) -> bool:
    """Return whether a step updated the parameters: it was not skipped, and its gradients did not overflow."""
    return not int(metrics["skipped_in_a_row"]) and not int(metrics["overflow"])


def describe_remedy(config: Config) -> str:
    """Return the end of a message about a run that has diverged: where its checkpoints are, and a remedy."""
    return (
        f"{config.run.directory} keeps the earlier checkpoints; try a lower --optimizer.learning-rate or a larger "
        "--schedule.warmup-steps"
    )


def check_end(finished: FinishedStep, config: Config) -> None:
    """Raise TrainingDiverged if no step since the last record before the end of a run updated the parameters.

    A last step that is the only one, and whose gradients overflowed, is normal with a dynamic loss scale.
    """
    window, skipped = finished.window, int(finished.metrics["skipped"])
    alone = window.steps == 1 and int(finished.metrics["overflow"]) and skipped < finished.step
    if not window.updates and not alone:
        raise TrainingDiverged(
            f"step {finished.step}: the run has ended, and none of the steps since the last record ({window.steps}) "
            f"updated the parameters, which the checkpoint holds as they were before; {describe_remedy(config)}"
        )


def check_skips(step: int, metrics: Metrics, config: Config) -> str:
    """Return the numbers of a skipped step as text; "" if the step was not skipped.

    Raises:
        TrainingDiverged: SKIP_LIMIT steps in a row were skipped, or one whose updates in the backward cannot be
            skipped, or overflows reduced the loss scale below 1.
    """
    if made_update(metrics):
        return ""
    numbers = f"loss {float(metrics['loss'])}, gradient norm {float(metrics['grad_norm'])}"
    remedy = describe_remedy(config)
    if int(metrics["overflow"]):
        scale = float(metrics["loss_scale"])
        numbers += f", loss scale now {scale:g}"
        if scale < 1:
            raise TrainingDiverged(
                f"step {step}: {numbers}: no loss scale prevents the overflows; {remedy}, or --precision.compute-dtype "
                "bfloat16"
            )
    elif (in_a_row := int(metrics["skipped_in_a_row"])) >= (1 if config.optimizer.in_backward else SKIP_LIMIT):
        skipped = f"{in_a_row} steps in a row were skipped; " if in_a_row > 1 else ""
        raise TrainingDiverged(f"step {step}: {numbers}; {skipped}{remedy}")
    return numbers


def to_json_number(value: Any) -> Any:
    """Return a scalar as a number, or a vector as a list of numbers, with None for values that are not finite."""
    if value.ndim:
        return [to_json_number(element) for element in jax.device_get(value)]
    return float(value) if math.isfinite(value) else None


def is_spike(metrics: Metrics) -> bool:
    """Return whether a step was skipped although its numbers are finite: they were outliers."""
    finite = np.isfinite(float(metrics["loss"])) and np.isfinite(float(metrics["grad_norm"]))
    return bool(finite) and int(metrics["skipped_in_a_row"]) > 0 and not int(metrics["overflow"])


@dataclass(frozen=True)
class SkippedBatches:
    """Batches that a run leaves out: those before a spike, from the checkpoint to which the run went back.

    Attributes:
        ranges: of each range, its first batch and the one after its last. Batch 0 is the first of all.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> "SkippedBatches":
        """Return the batches left out before a checkpoint."""
        return SkippedBatches(tuple((first, end) for first, end in record.get(SKIPPED_BATCHES, ())))

    def to_record(self) -> dict[str, Any]:
        """Return the entry of a checkpoint."""
        return {SKIPPED_BATCHES: [list(each) for each in self.ranges]} if self.ranges else {}

    @property
    def count(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def batch_after(self, step: int) -> int:
        """Return the batch of the step after `step`. The ranges all begin at or before it."""
        return step + self.count

    def leave_out(self, start: int, end: int) -> "SkippedBatches":
        """Leave out also the batches of the steps after `start`, up to `end`."""
        return SkippedBatches((*self.ranges, (self.batch_after(start), self.batch_after(end))))


@dataclass(frozen=True)
class Return:
    """Return of a run to a checkpoint after a spike.

    Attributes:
        spike: the step with the spike.
        step: the step of the checkpoint.
        left_out: the batches to leave out from now on.
    """

    spike: int
    step: int
    left_out: SkippedBatches

    def __str__(self) -> str:
        first, end = self.left_out.ranges[-1]
        return f"a spike: back to step {self.step}, without batches {first} to {end - 1}"


class Spikes:
    """Spikes of the loss, to which a run answers if `training.on_spike` is rollback.

    Attributes:
        left_out: the batches that the run leaves out.
    """

    def __init__(self, config: Config, checkpoints: Checkpoints, left_out: SkippedBatches) -> None:
        self.left_out = left_out
        self._config, self._checkpoints = config, checkpoints
        self._spike: int | None = None  # the step of a spike, to which the run has not answered

    def note(self, step: int, metrics: Metrics) -> None:
        """Note a step that was skipped."""
        if self._spike is None and self._config.training.on_spike == "rollback" and is_spike(metrics):
            self._spike = step

    def find_return(self) -> Return | None:
        """Return the answer to a spike; None if there was none, or if there is no checkpoint.

        Raises:
            TrainingDiverged: SKIP_LIMIT ranges of batches were left out since the last checkpoint.
        """
        spike, self._spike = self._spike, None
        start = self._checkpoints.latest_verified_step() if spike is not None else None
        if spike is None or start is None:
            return None
        saved = SkippedBatches.from_record(self._checkpoints.read_record(start))
        left_out = self.left_out.leave_out(start, spike)
        if len(left_out.ranges) - len(saved.ranges) > SKIP_LIMIT:
            remedy = describe_remedy(self._config)
            raise TrainingDiverged(f"step {spike}: a spike after {SKIP_LIMIT} others returns to step {start}; {remedy}")
        return Return(spike, start, left_out)
