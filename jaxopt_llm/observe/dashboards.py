"""Data for other programs: the records of a run for TensorBoard and Weights & Biases, and a profile of some steps."""

import contextlib
import hashlib
import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jaxopt_llm.config import LoggingConfig, ProfileConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.observe.logs import Say


def import_packages(config: LoggingConfig) -> None:
    """Import the packages of the dashboards that are configured. Raise InputError if one is missing.

    A run calls this before it reads its data, which can take hours.
    """
    if config.tensorboard:
        _import_tensorboard()
    if config.wandb_project:
        _import_wandb(config.wandb_project)


class Dashboards:
    """Writer of every number of a record under its name and step. A context manager.

    Numbers of a list are written with their index: expert_load/7.

    After a resume, TensorBoard no longer shows the records that the interrupted run wrote after the resumed step.
    Weights & Biases deletes nothing: it shows both the old records and their replacements.
    """

    def __init__(
        self, config: LoggingConfig, directory: Path, resume_step: int, settings: dict[str, Any], say: Say
    ) -> None:
        """Open the dashboards that are configured.

        Args:
            settings: the configuration of the run.

        Raises:
            InputError: `import_packages` raises it, or Weights & Biases reports an error.
        """
        self._board = _Board(directory / "tensorboard", resume_step + 1, say) if config.tensorboard else None
        self._run = _start_wandb(config.wandb_project, directory, settings) if config.wandb_project else None

    def write(self, record: dict[str, Any]) -> None:
        numbers: dict[str, Any] = {}
        for name, value in record.items():
            parts = {f"{name}/{i}": each for i, each in enumerate(value)} if isinstance(value, list) else {name: value}
            # None stands for a number that is not finite.
            numbers |= {part: each for part, each in parts.items() if part != "step" and each is not None}
        if self._board is not None:
            self._board.write(record["step"], numbers)
        if self._run is not None:
            self._run.log({"step": record["step"], **numbers})

    def __enter__(self) -> "Dashboards":
        return self

    def __exit__(self, *error: object) -> None:
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish()


def _start_wandb(project: str, directory: Path, settings: dict[str, Any]) -> Any:
    """Begin a run of Weights & Biases, or continue it after a resume."""
    wandb = _import_wandb(project)
    # The id depends on the directory only, so that a resume continues the same wandb run.
    path = directory.resolve()
    run_id = f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    try:
        run = wandb.init(project=project, id=run_id, name=path.name, dir=directory, config=settings, resume="allow")
    except wandb.Error as error:
        remedy = "set WANDB_MODE=offline to log without a server"
        raise InputError(f"logging.wandb_project={project}: {error}; {remedy}") from error
    # Use our own step: wandb ignores records whose wandb step is below the last one.
    run.define_metric("*", step_metric="step")
    return run


class _Board:
    """Writer of TensorBoard's files.

    It does not use the SummaryWriter of tensorboardX: a full disk ends the thread of the SummaryWriter, and the run
    then waits for that thread for ever.
    """

    def __init__(self, folder: Path, step: int, say: Say) -> None:
        """Begin a file. step: first step that will be written."""
        self._package = _import_tensorboard()
        self._folder, self._say = folder, say
        folder.mkdir(exist_ok=True)
        self._begin(step)

    def _begin(self, step: int) -> None:
        """Begin a new file. TensorBoard then hides what other files contain for this step and later ones."""
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
            self._say(f"{self._folder} could not be written at step {step} ({error}); metrics.jsonl has this record")
            self._writer = None  # the file may end in the middle of an event, so the next record begins a new file

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


@contextlib.contextmanager
def _hidden_package(name: str) -> Iterator[None]:
    """Make a package appear not to be installed, unless it is already imported."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _import_tensorboard() -> ModuleType:
    # tensorboardX imports torch if it is installed. This takes seconds, and tensorboardX does not need torch.
    with _hidden_package("torch"):
        return _import_package("tensorboardX", "logging.tensorboard=True", "--logging.tensorboard False")


def _import_wandb(project: str) -> ModuleType:
    return _import_package("wandb", f"logging.wandb_project={project}", '--logging.wandb-project ""')


def _import_package(name: str, setting: str, alternative: str) -> ModuleType:
    """Import a package only when it is used, so that other runs start quickly and do not need it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"{setting} requires {name} ({error}); run: pip install {name}, or set {alternative}"
        ) from error


class Profiler:
    """Profiler, for TensorBoard, XProf or Perfetto, of the steps start_step to start_step + steps - 1.

    A context manager: on exit it writes a profile that is still running.
    """

    def __init__(self, config: ProfileConfig, directory: Path) -> None:
        self._steps = range(config.start_step, config.start_step + config.steps) if config.start_step else range(0)
        self._directory = directory / "profile"
        self._running = False

    def before_step(self, step: int) -> None:
        """Start the profile if this is its first step. Call before every step."""
        if step in self._steps and not self._running:
            jax.profiler.start_trace(str(self._directory))
            self._running = True

    def after_step(self, step: int, results: object) -> None:
        """Wait for the results and write the profile if this is its last step. Call after every step."""
        if self._running and step + 1 not in self._steps:
            jax.block_until_ready(results)
            self.__exit__()

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *error: object) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
