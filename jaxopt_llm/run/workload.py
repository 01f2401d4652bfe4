"""Workload: what a loop trains, a model and its data, as the loop sees them."""

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.native.identity import Identity
from jaxopt_llm.config import Config
from jaxopt_llm.core import tree
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.step.state import TrainState
from jaxopt_llm.step.step import Metrics


class Workload(Protocol):
    """A model and its data.

    Attributes:
        unit: what a batch consists of, for the records: "tokens" or "rows".
        units_per_step: their number in a batch, over all devices.
        utilisation: see Meter.
    """

    @property
    def config(self) -> Config: ...

    @property
    def directory(self) -> Path: ...

    @property
    def processes(self) -> Processes: ...

    @property
    def unit(self) -> str: ...

    @property
    def units_per_step(self) -> int: ...

    @property
    def utilisation(self) -> dict[str, float]: ...

    def restore(self, checkpoints: Checkpoints, start: int, say: Callable[[str], None]) -> TrainState:
        """Return the state of step `start`: from its checkpoint, or for step 0 the initial one."""

    def read_batches(self, start: int, stopping: Callable[[], bool]) -> Generator[tuple[Any, float], None, None]:
        """Yield (batch, seconds waited for it) for the steps after `start`; see loader.read_ahead."""

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Run a step on a batch as it was read. The state is donated."""

    def average_groups(self, state: TrainState) -> TrainState:
        """Run an outer step (local_steps.py). The state is donated. Called only with local steps."""

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Return the held-out loss as `eval_loss`, and other numbers to record; nothing without held-out data."""

    def sample(self, state: TrainState) -> list[dict[str, str]]:
        """Return records of samples to write at an evaluation."""

    def check_data(self, wait: bool) -> None:
        """Raise InputError if data on the disk has changed since it was prepared.

        Args:
            wait: wait until all data has been checked.
        """

    def explain_oom(self, describe_action: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """Replace XLA's out-of-memory error by one that names the largest arrays and what saves memory.

        Args:
            describe_action: returns what was being done; called only after a failure.
        """

    def keep(self, state: TrainState, identity: Identity | None) -> None:
        """Take over the state at the end of the loop.

        Args:
            identity: that of the run.
        """

    def to_checkpoint(self, state: TrainState) -> dict[str, tree.Tree]:
        """Return the trees of the state's checkpoint."""

    def write_files(self) -> None:
        """Write the files that identify the run, before it has a checkpoint."""
