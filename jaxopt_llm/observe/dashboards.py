"""The records of metrics.jsonl once more, for TensorBoard and Weights & Biases."""

import hashlib
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxopt_llm.errors import InputError
from jaxopt_llm.observe.metrics import LoggingConfig


class Dashboards:
    """Writes every number of a record under its name and step. A context manager.

    What an interrupted run wrote after the step it is resumed from is no longer shown.
    """

    def __init__(self, config: LoggingConfig, directory: Path, resume_step: int, settings: dict[str, Any]) -> None:
        """settings: the run's configuration. Raises InputError where a package is missing."""
        self._board = self._run = None
        if config.tensorboard:
            board = _package("tensorboardX", "logging.tensorboard=True", "--logging.tensorboard False")
            self._board = board.SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step + 1)
        if config.wandb_project:
            wandb = _package("wandb", f"logging.wandb_project={config.wandb_project}", "an empty project")
            # Of the directory, so that a resume continues it.
            whole = directory.resolve()
            identity = f"{whole.name}-{hashlib.sha256(str(whole).encode()).hexdigest()[:8]}"
            self._run = wandb.init(
                project=config.wandb_project,
                id=identity,
                name=whole.name,
                dir=directory,
                config=settings,
                resume="allow",
            )

    def write(self, record: dict[str, Any]) -> None:
        # None stands for what is not finite.
        numbers = {name: value for name, value in record.items() if name != "step" and value is not None}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, record["step"])
            self._board.flush()
        if self._run is not None:
            self._run.log(numbers, step=record["step"])

    def __enter__(self) -> "Dashboards":
        return self

    def __exit__(self, *error: object) -> None:
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish()


def _package(name: str, asked: str, instead: str) -> ModuleType:
    """Imported here alone: a training run must start quickly, and without what it does not use."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"{asked} wants the package {name} ({error}): pip install {name}, or {instead}") from error
