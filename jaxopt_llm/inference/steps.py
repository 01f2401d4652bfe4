"""Choice of a run's checkpoint."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxopt_llm.checkpoint.native import step_directories
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.run_weights import AVERAGE, describe_average, find_trained_tree
from jaxopt_llm.core.errors import CheckpointError, InputError
from jaxopt_llm.inference.flags import Step

Result = TypeVar("Result")


def use_checkpoint(directory: Path, step: Step, use: Callable[[Checkpoints, int], Result]) -> Result:
    """Return `use(checkpoints, step)` for a verified checkpoint of a run.

    Raises:
        InputError: the run has no checkpoint of this step, or `best` compares nothing.
        CheckpointError: the run has no usable checkpoint, or that of the step is damaged.
    """
    with Checkpoints(directory / "checkpoints") as checkpoints:
        while True:
            found = checkpoints.latest_verified_step() if step is None else _find_verified(directory, step)
            if found is None:
                raise CheckpointError(f"--checkpoint {directory}: the run has no checkpoint yet; train it first")
            try:
                return use(checkpoints, found)
            except CheckpointError:
                if isinstance(step, int) or (directory / "checkpoints" / str(found)).exists():
                    raise  # otherwise the run is in progress, wrote a newer checkpoint and deleted this one


def choose_trained_tree(directory: Path, step: int) -> str:
    """Return the tree of a checkpoint that holds the trained parameters to use, and say so if it is their average."""
    name = find_trained_tree(directory / "checkpoints" / str(step))
    if name == AVERAGE:
        print(describe_average(directory, step), file=sys.stderr)
    return name


def _find_verified(directory: Path, step: Step) -> int | None:
    """Return the step of the checkpoint that `step` names; None: the run has no checkpoint yet."""
    paths = step_directories.find_checkpoints(directory / "checkpoints")
    if not paths:
        return None
    choices = f"choose one of {', '.join(map(str, paths))}"
    if step == "best":
        if not (best := step_directories.rank_by_loss(step_directories.read_losses(paths))):
            raise InputError(
                f"--step best: no checkpoint of {directory} was saved at an evaluated step, so none has a held-out "
                f"loss; {choices}"
            )
        step = best[0]
    if step not in paths:
        raise InputError(f"--step {step}: {directory} has no checkpoint of this step; {choices}, or best")
    if damage := step_directories.find_damage(paths[step]):
        raise CheckpointError(f"checkpoint {paths[step]} is damaged: {damage}; name another one with --step: {choices}")
    return step
