"""Checkpoints of a planned run: the size of one, and the time between two."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from jaxopt_llm.config import Config
from jaxopt_llm.planning.memory import GIB
from jaxopt_llm.training.state import StateSpecs, checkpoint_specs

LONG_SECONDS = 2 * 3600  # work that a crash may lose, at most, before a shorter interval is advised
ADVISED_SECONDS = 1800


@dataclass(frozen=True)
class CheckpointPlan:
    """Checkpoints of a run.

    Attributes:
        every: steps between two checkpoints; those of the run if it has fewer.
        seconds: time between two checkpoints, which is the most that a crash can lose.
        bytes: size of a checkpoint, before compression.
        advice: settings for an interval of about ADVISED_SECONDS; empty unless the interval exceeds LONG_SECONDS.
    """

    every: int
    seconds: float
    bytes: int
    advice: dict[str, Any]


def plan_checkpoints(config: Config, specs: StateSpecs, step_seconds: float) -> CheckpointPlan:
    """Return size and interval of the checkpoints of a run whose step takes `step_seconds`."""
    every = min(config.checkpoint.every, config.training.steps or config.checkpoint.every)
    arrays = jax.tree.leaves(checkpoint_specs(specs))
    seconds = every * step_seconds
    return CheckpointPlan(
        every=every,
        seconds=seconds,
        bytes=sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays),
        advice=_advise_interval(config, step_seconds) if seconds > LONG_SECONDS else {},
    )


def _advise_interval(config: Config, step_seconds: float) -> dict[str, Any]:
    """Return settings with a round number of steps between checkpoints, and other intervals that divide it."""
    every = max(int(float(f"{ADVISED_SECONDS / step_seconds:.1g}")), 1)
    settings = {"checkpoint.every": every}
    if config.checkpoint.keep_every % every:
        settings["checkpoint.keep_every"] = every * math.ceil(config.checkpoint.keep_every / every)
    if config.checkpoint.keep_best and every % max(config.evaluation.every, 1):
        settings["evaluation.every"] = every
    return settings


def format_checkpoints(plan: CheckpointPlan) -> list[str]:
    """Return the lines on size and interval, and the advice."""
    size = f"{plan.bytes / GIB:,.1f} GiB" if plan.bytes >= GIB else f"{plan.bytes / 2**20:,.1f} MiB"
    lines = [f"checkpoints: one every {plan.every:,} steps ({format_duration(plan.seconds)}), {size} each"]
    if plan.advice:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in plan.advice.items())
        duration = format_duration(plan.seconds * plan.advice["checkpoint.every"] / plan.every)
        lines.append(f"  a crash would lose up to {format_duration(plan.seconds)}; save every {duration} with {flags}")
    return lines


def format_duration(seconds: float) -> str:
    """Return a duration in the unit that fits: seconds, minutes, hours or days."""
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.2g} seconds"
