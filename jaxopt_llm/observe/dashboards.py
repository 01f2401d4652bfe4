"""Records of a run in files and for other programs: logs, TensorBoard, Weights & Biases, and a profile of some steps.

A log has one JSON object on each line: metrics.jsonl the records, and events.jsonl the history.

A record has the numbers of a logged step. An event is a start, a save, a skipped step or an end, with its time.
"""

import contextlib
import errno
import hashlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import jax

from jaxopt_llm.config import LoggingConfig, ProfileConfig
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import CommandError, InputError, Preempted, one_line
from jaxopt_llm.core.files import replace_durably

Say = Callable[[str], None]  # receives one line for each record that could not be written


def append_whole(file: BinaryIO, lines: bytes) -> None:
    """Append lines to an unbuffered file, completely or not at all.

    Raises:
        OSError: the lines could not be written, for example because the disk is full.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(lines) < len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(size)  # remove an incomplete line
        raise


class MetricsLog:
    """Log that appends records to a file. Floats read back to the same bits.

    One other thread may call `sync`, also after `close`; a `write` does not wait for its fsync.
    """

    def __init__(self, path: Path, resume_step: int, say: Say) -> None:
        """Open the file, and remove the records after `resume_step` from it.

        An interrupted run may have logged steps after its last checkpoint. These steps will run again.

        Raises:
            InputError: the file has a line that is not a record.
        """
        if path.exists():
            try:
                # A line without a newline was cut short when its writer died.
                whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
                lines = [line for line in whole if json_files.parse(line)["step"] <= resume_step]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path} has a line that is not a record ({error}); fix or move the file") from error
            replace_durably(path, "".join(lines))
        self._path, self._say = path, say
        self._file = path.open("ab", buffering=0)
        self._pending = b""
        self._unsynced = False  # a sync failed: the kernel does not write these pages again
        self._lock = threading.Lock()  # of the file and of the records that wait
        self._syncing = threading.Lock()  # taken before the other one

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. If the disk is full, the record waits and is written together with the next one."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            with self._lock:
                self._pending += line
                self._append()
        except OSError as error:
            self._say(f"{self._path} could not be written ({error}); the next record will write it again")

    def _append(self) -> None:
        append_whole(self._file, self._pending)
        self._pending = b""

    def sync(self) -> None:
        """Wait until the records are on disk: no checkpoint may be newer than its records.

        Raises:
            OSError: a record could not be written; the next call writes it again.
            ValueError: the log is closed, and `close` could not bring all records to the disk.
        """
        with self._syncing:
            with self._lock:
                if self._file.closed and not self._pending and not self._unsynced:
                    return
                self._append_and_repair()
            self._sync_file()

    def _append_and_repair(self) -> None:
        """Write the pending records, and after a sync that failed the whole file again."""
        self._append()
        if self._unsynced:
            replace_durably(self._path, self._path.read_text())
            self._file.close()
            self._file = self._path.open("ab", buffering=0)

    def _sync_file(self) -> None:
        self._unsynced = True
        os.fsync(self._file.fileno())
        self._unsynced = False

    def close(self) -> None:
        """Bring the records to the disk and close the file.

        Raises:
            OSError: a record could still not be written.
        """
        with self._syncing, self._lock:
            try:
                self._append_and_repair()
                self._sync_file()
            finally:
                self._file.close()


class EventLog:
    """Log of events, one JSON object for each. A resume keeps all earlier events.

    An event that cannot be written is reported and lost: the history is not worth a run. Any thread may write.
    """

    def __init__(self, directory: Path, say: Say, writes: bool = True) -> None:
        """Name the file in the run directory, which need not exist before the first event.

        writes: whether this process writes the events of the job.
        """
        self._path, self._say, self._writes = directory / "events.jsonl", say, writes
        self._lock = threading.Lock()

    def write(self, step: int, event: str, detail: str = "", **more: Any) -> None:
        """Append an event. more: further fields."""
        if not self._writes:
            return
        fields = more if not detail else {"detail": detail, **more}
        entry = {"time": round(time.time(), 3), "step": step, "event": event, **fields}
        line = (json.dumps(entry) + "\n").encode()
        try:
            with self._lock, self._path.open("a+b", buffering=0) as file:
                append_whole(file, b"\n" * _ends_within_a_line(file) + line)
        except OSError as error:
            self._say(f"{self._path} could not be written ({error}); the event {event} of step {step} is lost")

    def write_save(self, step: int, failure: str) -> None:
        """Append the end of a save. failure: why it failed, or ""."""
        self.write(step, "checkpoint_failed" if failure else "checkpoint", failure)

    def write_end(self, step: int, error: BaseException | None, reason: str = "") -> None:
        """Append the end of the process: the end of the run, a requested stop, or a fault.

        reason: why the run ends before its last step.
        """
        if error is None:
            self.write(step, "end", reason)
        elif isinstance(error, Preempted):
            self.write(step, "stop", one_line(error))
        else:
            kind = "" if isinstance(error, CommandError) else f"{type(error).__name__}: "
            self.write(step, "fault", kind + one_line(error))


def _ends_within_a_line(file: BinaryIO) -> bool:
    """Return whether the last line was cut short when the machine died."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


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
