"""Checkpoints of a planned run: the size of one, and the time between two."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from jaxopt_llm.config import Config
from jaxopt_llm.planning.free_memory import choose_unit
from jaxopt_llm.step.state import StateSpecs, checkpoint_specs

LONG_SECONDS = 2 * 3600  # work that a crash may lose, at most, before a shorter interval is advised
ADVISED_SECONDS = 1800


@dataclass(frozen=True)
class CheckpointPlan:
    """Checkpoints of a run.

    Attributes:
        every: steps between two checkpoints; those of the run if it has fewer.
        seconds: time between two checkpoints, which is the most that a crash can lose.
        bytes: size of a checkpoint, before compression.
        frozen_bytes: the part of it that is frozen parameters; 0 if they stay in a pretrained folder.
        advice: settings for an interval of about ADVISED_SECONDS; empty unless the interval exceeds LONG_SECONDS.
    """

    every: int
    seconds: float
    bytes: int
    frozen_bytes: int
    advice: dict[str, Any]


def plan_checkpoints(config: Config, specs: StateSpecs, step_seconds: float) -> CheckpointPlan:
    """Return size and interval of the checkpoints of a run whose step takes `step_seconds`."""
    every = min(config.checkpoint.every, config.training.steps or config.checkpoint.every)
    sizes = {name: _count_bytes(tree) for name, tree in checkpoint_specs(specs).items()}
    seconds = every * step_seconds
    return CheckpointPlan(
        every=every,
        seconds=seconds,
        bytes=sum(sizes.values()),
        frozen_bytes=sizes.get("frozen", 0),
        advice=_advise_interval(config, step_seconds) if seconds > LONG_SECONDS else {},
    )


def _count_bytes(tree: Any) -> int:
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(tree))


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
    size = _format_size(plan.bytes)
    lines = [f"checkpoints: one every {plan.every:,} steps ({format_duration(plan.seconds)}), {size} each"]
    if plan.frozen_bytes:
        frozen = _format_size(plan.frozen_bytes)
        lines.append(f"  {frozen} of it are frozen parameters; with a folder as --model.pretrained they are not saved")
    if plan.advice:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in plan.advice.items())
        duration = format_duration(plan.seconds * plan.advice["checkpoint.every"] / plan.every)
        lines.append(f"  a crash would lose up to {format_duration(plan.seconds)}; save every {duration} with {flags}")
    return lines


def _format_size(size: int) -> str:
    name, unit = choose_unit(size)
    return f"{size / unit:,.1f} {name}"


def format_duration(seconds: float) -> str:
    """Return a duration in the unit that fits: seconds, minutes, hours or days."""
    for unit, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.2g} seconds"
