"""The records of metrics.jsonl once more, for TensorBoard and Weights & Biases."""

import contextlib
import hashlib
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxopt_llm.errors import InputError
from jaxopt_llm.observe.metrics import LoggingConfig


class Dashboards:
    """Writes every number of a record under its name and step, those of a list each under its place in it, as in
    expert_load/7. A context manager.

    What an interrupted run wrote after the step it is resumed from TensorBoard no longer shows; Weights & Biases, which
    forgets nothing, shows it and what comes in its place.
    """

    def __init__(
        self,
        config: LoggingConfig,
        directory: Path,
        resume_step: int,
        settings: dict[str, Any],
        say: Callable[[str], None],
    ) -> None:
        """settings: the run's configuration. say: told, in a line, what could not be written. Raises InputError where a
        package is missing."""
        self._board = _Board(directory / "tensorboard", resume_step + 1, say) if config.tensorboard else None
        self._run = None
        if config.wandb_project:
            wandb = _package("wandb", f"logging.wandb_project={config.wandb_project}", "an empty project")
            # Of the directory, so that a resume continues it.
            whole = directory.resolve()
            identity = f"{whole.name}-{hashlib.sha256(str(whole).encode()).hexdigest()[:8]}"
            try:
                self._run = wandb.init(
                    project=config.wandb_project,
                    id=identity,
                    name=whole.name,
                    dir=directory,
                    config=settings,
                    resume="allow",
                )
            except wandb.Error as error:
                raise InputError(
                    f"logging.wandb_project={config.wandb_project}: {error}; WANDB_MODE=offline needs no server"
                ) from error
            # By our own step: what is logged at an earlier one of its steps than the last is ignored.
            self._run.define_metric("*", step_metric="step")

    def write(self, record: dict[str, Any]) -> None:
        numbers: dict[str, Any] = {}
        for name, value in record.items():
            each = (
                {f"{name}/{i}": number for i, number in enumerate(value)} if isinstance(value, list) else {name: value}
            )
            numbers |= each
        # None stands for what is not finite.
        numbers = {name: value for name, value in numbers.items() if name != "step" and value is not None}
        if self._board is not None:
            self._board.write(record["step"], numbers)
        if self._run is not None:
            self._run.log({"step": record["step"], **numbers})

    def __enter__(self) -> "Dashboards":
        return self

    def __exit__(self, *error: object) -> None:
        if self._run is not None:
            self._run.finish()


class _Board:
    """TensorBoard's files. Not tensorboardX's SummaryWriter: a full disk ends its thread, and the run then waits for it
    for ever."""

    def __init__(self, folder: Path, step: int, say: Callable[[str], None]) -> None:
        """step: the first that will be written."""
        with _without("torch"):  # which tensorboardX imports where it is installed, for seconds, and does without
            self._package = _package("tensorboardX", "logging.tensorboard=True", "--logging.tensorboard False")
        self._folder, self._say = folder, say
        folder.mkdir(exist_ok=True)
        self._begin(step)

    def _begin(self, step: int) -> None:
        """A new file: what others hold of this step and later ones is no longer shown."""
        event, writer = importlib.import_module("tensorboardX.proto.event_pb2"), self._package.event_file_writer
        self._writer = writer.EventsWriter(str(self._folder / "events"), filename_suffix=f".{step}")
        start = event.SessionLog(status=event.SessionLog.START)
        self._writer.write_event(event.Event(wall_time=time.time(), step=step, session_log=start))
        self._writer.flush()
        self._event = event.Event

    def write(self, step: int, numbers: dict[str, float]) -> None:
        try:
            if self._writer is None:
                self._begin(step)
            for name, value in numbers.items():
                summary = self._package.summary.scalar(name, value)
                self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
            self._writer.flush()
        except OSError as error:
            self._say(f"{self._folder} could not be written at step {step} ({error}): metrics.jsonl has its record")
            self._writer = None  # the file may end in half an event: the next begins another


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """As if a package were not installed, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _package(name: str, asked: str, instead: str) -> ModuleType:
    """Imported here alone: a training run must start quickly, and without what it does not use."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"{asked} wants the package {name} ({error}): pip install {name}, or {instead}") from error
