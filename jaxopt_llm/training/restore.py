"""Restore of a training state from a checkpoint, on any mesh."""

from collections.abc import Callable

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.core.errors import CheckpointError
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint
from jaxopt_llm.training.local_steps import abstract_groups, count_groups, resize_groups
from jaxopt_llm.training.saved_state import checkpoint_specs, resume_state
from jaxopt_llm.training.state import StateSpecs, TrainState


def load_state(
    checkpoints: Checkpoints,
    step: int,
    specs: StateSpecs,
    placement: Placement,
    read_frozen: Callable[[], Params] | None = None,
) -> TrainState:
    """Return the state of a checkpoint.

    Args:
        read_frozen: returns the frozen parameters, if the checkpoint does not hold them.

    Raises:
        CheckpointError: it cannot be read, or is of another model, optimizer or precision.
    """
    arrays, saved_specs = checkpoints.read_record(step)["arrays"], checkpoint_specs(specs)
    groups = count_groups(arrays)
    resizes = bool(specs.groups) and 0 < groups != placement.size("data")
    saved = abstract_checkpoint(saved_specs, placement)
    if resizes:
        saved["groups"] = abstract_groups(specs.groups, groups, placement)
    if others := sorted(arrays.keys() - saved.keys()):
        raise CheckpointError(
            f"checkpoint {checkpoints.directory / str(step)} also holds {', '.join(others)}, which is not trained "
            "here: it is of another optimizer, precision, training.ema_decay or training.local_steps; use the settings "
            "that wrote it"
        )
    restored = checkpoints.restore(step, **saved)
    if read_frozen is not None:
        restored["frozen"] = read_frozen()
    if resizes:
        restored["groups"] = resize_groups(restored["groups"], specs.groups, placement)
    return resume_state(specs, step, placement, **restored)
