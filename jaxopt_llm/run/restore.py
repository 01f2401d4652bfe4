"""Restore of a training state from a checkpoint, on any mesh."""

from collections.abc import Callable

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.core.errors import CheckpointError
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint
from jaxopt_llm.step.local_steps import (
    abstract_groups,
    begin_groups,
    count_groups,
    merge_groups,
    repeat_specs,
    resize_groups,
)
from jaxopt_llm.step.state import GROUP_FIELDS, StateSpecs, TrainState, checkpoint_specs, resume_state


def load_state(
    checkpoints: Checkpoints,
    step: int,
    specs: StateSpecs,
    placement: Placement,
    read_frozen: Callable[[], Params] | None = None,
) -> TrainState:
    """Return the state of a checkpoint.

    The groups of local steps (local_steps.py) may be others than those of the checkpoint. If the checkpoint has another
    number of groups, they are resized. If it has none, all groups begin with its state. If only the checkpoint has
    groups, they are merged.

    Args:
        read_frozen: returns the frozen parameters, if the checkpoint does not hold them.

    Raises:
        CheckpointError: it cannot be read, or is of another model, optimizer or precision.
    """
    arrays = checkpoints.read_record(step)["arrays"]
    saved_groups = count_groups(arrays)
    if specs.one_group is not None and not saved_groups:
        return begin_groups(load_state(checkpoints, step, specs.one_group, placement, read_frozen), specs, placement)
    saved_specs = checkpoint_specs(specs)
    saved = abstract_checkpoint(saved_specs, placement)
    resizes = bool(specs.groups) and saved_groups != placement.size("data")
    merges = saved_groups > 0 and not specs.groups
    unread: set[str] = set()
    if resizes:
        saved["groups"] = abstract_groups(specs.groups, saved_groups, placement)
    elif merges:
        unread = {"masters", "moments"}  # those of the outer step
        saved = {name: each for name, each in saved.items() if name not in GROUP_FIELDS}
        saved["groups"] = abstract_groups(repeat_specs(saved_specs, saved_groups), saved_groups, placement)
    if others := sorted(arrays.keys() - saved.keys() - unread):
        raise CheckpointError(
            f"checkpoint {checkpoints.directory / str(step)} also holds {', '.join(others)}, which is not trained "
            "here: it is of another optimizer, precision or training.ema_decay; use the settings that wrote it"
        )
    restored = checkpoints.restore(step, **saved)
    if read_frozen is not None:
        restored["frozen"] = read_frozen()
    if resizes:
        restored["groups"] = resize_groups(restored["groups"], specs.groups, placement)
    elif merges:
        restored |= merge_groups(restored.pop("groups"), saved_specs, placement)
    return resume_state(specs, step, placement, **restored)
