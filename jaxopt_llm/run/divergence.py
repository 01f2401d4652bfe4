"""Steps that change nothing: which were skipped, and when a run has diverged."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax

from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import TrainingDiverged
from jaxopt_llm.core.metric import read_value
from jaxopt_llm.observe.meter import LossWindow
from jaxopt_llm.step.step import Metrics, is_of_step

_NOT_RECORDED = {"skipped", "skipped_in_a_row", "overflow"}


@dataclass
class FinishedStep:
    """The step that ran last.

    Attributes:
        step: its number.
        summary: entries for its checkpoint; None until its metrics have been read, which waits for the device.
        window: losses of the steps since the record before this step.
    """

    step: int
    metrics: Metrics
    summary: dict[str, Any] | None = None
    window: LossWindow = dataclasses.field(default_factory=LossWindow)

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
    """Return what is left of a run that has diverged, and what may prevent it."""
    return (
        f"{config.run.directory} keeps the earlier checkpoints; try a lower --optimizer.learning-rate or a larger "
        f"{config.schedule.warmup_flag}"
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
        TrainingDiverged: training.skip_limit steps in a row were skipped, or overflows reduced the loss scale below
            precision.min_loss_scale.
    """
    if made_update(metrics):
        return ""
    numbers = f"loss {float(metrics['loss'])}, gradient norm {float(metrics['grad_norm'])}"
    remedy = describe_remedy(config)
    if int(metrics["overflow"]):
        scale = float(metrics["loss_scale"])
        numbers += f", loss scale now {scale:g}"
        if scale < config.precision.min_loss_scale:
            raise TrainingDiverged(
                f"step {step}: {numbers}, below precision.min_loss_scale={config.precision.min_loss_scale:g}: "
                f"no loss scale prevents the overflows; {remedy}, or --precision.compute-dtype bfloat16"
            )
    elif (in_a_row := int(metrics["skipped_in_a_row"])) >= config.training.skip_limit:
        skipped = f"{in_a_row} steps in a row were skipped; " if in_a_row > 1 else ""
        raise TrainingDiverged(f"step {step}: {numbers}; {skipped}{remedy}")
    return numbers


def to_json_number(value: Any) -> Any:
    """Return a scalar as a number, or a vector as a list of numbers, with None for values that are not finite."""
    if value.ndim:
        return [to_json_number(element) for element in jax.device_get(value)]
    return float(value) if math.isfinite(value) else None
