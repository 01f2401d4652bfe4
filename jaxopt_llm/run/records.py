"""Records of a run: what its steps, evaluations and checkpoints leave on the screen, in logs and in dashboards."""

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.native.host_memory import HostMemory
from jaxopt_llm.checkpoint.native.identity import identify_run
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import TrainingDiverged
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.distributed.watchdog import Watchdog
from jaxopt_llm.observe.dashboards import Dashboards, EventLog, MetricsLog
from jaxopt_llm.observe.meter import LossWindow, Meter, MetricsWindow
from jaxopt_llm.observe.progress import ProgressLine
from jaxopt_llm.run.divergence import FinishedStep, Spikes, check_skips, describe_remedy, made_update, to_json_number
from jaxopt_llm.run.workload import Workload
from jaxopt_llm.step.state import TrainState
from jaxopt_llm.step.step import Metrics


@dataclass(frozen=True)
class Patience:
    """Held-out losses of a run so far. A checkpoint holds it, so that a resumed run ends at the same step.

    Attributes:
        lowest: the lowest held-out loss; None before the first evaluation.
        step: its step.
        evaluations: number of evaluations since then, none of which was lower.
    """

    lowest: float | None = None
    step: int = 0
    evaluations: int = 0

    def add(self, step: int, loss: float) -> "Patience":
        """Return the record after one more evaluation."""
        if self.lowest is None or loss < self.lowest:
            return Patience(loss, step)
        return dataclasses.replace(self, evaluations=self.evaluations + 1)

    def describe_end(self, limit: int) -> str:
        """Return why the run ends with `evaluation.patience` of `limit`; "" if it goes on."""
        if not 0 < limit <= self.evaluations:
            return ""
        return (
            f"no held-out loss in {self.evaluations} evaluations is lower than that of step {self.step}, "
            f"{self.lowest:.4f} (evaluation.patience={limit})"
        )

    def to_record(self) -> dict[str, Any]:
        """Return the entry of a checkpoint."""
        return {"patience": dataclasses.asdict(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Patience":
        return cls(**record.get("patience", {}))


@dataclass(frozen=True)
class Records:
    """Writers of a run.

    Attributes:
        start: step from which the run continues: the newest with an intact checkpoint, or a later one whose state is
            in the memory of the hosts; 0 if there is none.
        record: the values that were saved with that state; empty at step 0.
        end: why the run has ended, and what to set to train longer; empty if it goes on.
        memory: the state in the memory of the hosts; None without `checkpoint.replicate_every`.
    """

    progress: ProgressLine
    events: EventLog
    checkpoints: Checkpoints
    watchdog: Watchdog
    start: int
    record: Mapping[str, Any]
    end: str
    memory: HostMemory | None


@contextlib.contextmanager
def open_records(
    config: Config,
    processes: Processes,
    watchdog: Watchdog,
    state: TrainState,
    shown: Sequence[str] = (),
    corpus: str | None = None,
) -> Iterator[Records]:
    """Open the writers of the run in `run.directory`. At the end, wait until the last checkpoint is on disk.

    Args:
        watchdog: the watchdog of the run, which has begun.
        state: the state as ShapeDtypeStructs with shardings.
        shown: metrics that the progress line shows besides those that every run has.
        corpus: SHA-256 of the corpus; None if it is not known.

    Raises:
        CheckpointError: no checkpoint is intact, or the newest intact one is of another run.
    """
    directory = Path(config.run.directory)
    progress = ProgressLine(config.training.steps, processes.first, shown)
    events = EventLog(directory, progress.say, writes=processes.first)

    def note_save(step: int, failure: str) -> None:
        events.write_save(step, failure)
        if not failure:
            processes.note_checkpoint(step)

    identity = identify_run(directory, config, processes, corpus)
    checkpoints = Checkpoints(
        directory / "checkpoints",
        config.checkpoint,
        progress.say,
        processes,
        note_save,
        identity=identity,
    )
    with progress, checkpoints:
        watchdog.name_slow(progress.say)
        processes.main.enter("restore", 0)
        start = checkpoints.latest_verified_step() or 0
        processes.note_checkpoint(start)
        memory = None
        if config.checkpoint.replicate_every:
            of_user = Path(config.checkpoint.replicate_directory) / f"jaxopt_llm-{os.getuid()}"
            memory = HostMemory(of_user / identity.run, state, processes)
            start = memory.find(start) or start
        progress.advance(start)
        record: Mapping[str, Any] = {}
        if start:
            in_memory = memory is not None and memory.step == start
            record = memory.record if memory is not None and in_memory else checkpoints.read_record(start)
        end = describe_end(config, start, Patience.from_record(record)) if start else ""
        yield Records(progress, events, checkpoints, watchdog, start, record, end, memory)


def describe_end(config: Config, step: int, patience: Patience) -> str:
    """Return why a run has ended at a step, and what to set to train longer; empty if it goes on."""
    if step >= config.training.steps:
        longer = "train longer with a larger training.steps or training.epochs"
        return f"{config.run.directory} is finished at step {step}; {longer}"
    if reason := patience.describe_end(config.evaluation.patience):
        return (
            f"{config.run.directory} has ended at step {step}: {reason}; train longer with a larger "
            "evaluation.patience, or with 0"
        )
    return ""


def set_aside_logs(directory: Path) -> None:
    """Rename the logs of a run that left no checkpoint to continue from."""
    for name in ("metrics", "samples", "events", "rollouts"):
        if (log := directory / f"{name}.jsonl").exists():
            candidates = (log.with_name(f"{name}.{index}.jsonl") for index in itertools.count(1))
            log.rename(next(path for path in candidates if not path.exists()))


@dataclass(frozen=True)
class Logs:
    """Logs of a run that the first process writes. The other processes have none.

    Attributes:
        writers: functions that write a record.
        samples: samples.jsonl; None if there are no samples.
        files: the logs that a checkpoint must not be newer than.
    """

    writers: Sequence[Callable[[dict[str, Any]], None]] = ()
    samples: MetricsLog | None = None
    files: Sequence[MetricsLog] = ()

    def sync(self) -> None:
        """Wait until all records are on disk; see MetricsLog.sync."""
        for file in self.files:
            file.sync()


@contextlib.contextmanager
def open_logs(workload: Workload, progress: ProgressLine, step: int) -> Iterator[Logs]:
    """Open the logs of a run without the records after a step. At the end, bring all records to the disk.

    Raises:
        InputError: a file has a line that is not a record.
        OSError: a record could not be written. If the run ends by another error, that error is raised instead.
    """
    if not workload.processes.first:
        yield Logs()
        return
    config, directory, say = workload.config, workload.directory, progress.say
    scope = contextlib.ExitStack()
    try:
        names = ["metrics", *(["samples"] if config.evaluation.samples else [])]
        files = []
        for name in names:
            files.append(MetricsLog(directory / f"{name}.jsonl", step, say))
            scope.callback(files[-1].close)
        dashboards = Dashboards(config.logging, directory, step, dataclasses.asdict(config), say)
        scope.enter_context(dashboards)
        writers = [files[0].write, dashboards.write, progress.show]
        yield Logs(writers, files[1] if len(files) > 1 else None, files)
    except BaseException:
        with contextlib.suppress(OSError):
            scope.close()
        raise
    scope.close()


class Recorder:
    """Reader of the metrics of the steps, which measures the held-out loss and writes the records.

    Metrics are read one step late, when the device already runs the next step, so that the device never waits for
    Python. They are read immediately only before an evaluation or a checkpoint, which waits for the device anyway.

    Attributes:
        end: why the run ends before `training.steps`; "" if it does not.
    """

    def __init__(
        self, workload: Workload, records: Records, logs: Logs, spikes: Spikes, start: int, record: Mapping[str, Any]
    ) -> None:
        """Continue the records after step `start`, with the values that were saved with its state."""
        self._workload, self._config, self._main = workload, workload.config, workload.processes.main
        self._progress, self._events, self._watchdog = records.progress, records.events, records.watchdog
        self._logs, self._spikes = logs, spikes
        self._losses, self._metrics = LossWindow(**record.get("window", {})), MetricsWindow.from_record(record)
        self._patience = Patience.from_record(record)
        self._held_out: dict[str, float] = {}  # the held-out loss of the step that was read last
        self._unread: tuple[int, Metrics] | None = None
        self._last: FinishedStep | None = None
        self._meter = Meter(workload.unit, workload.units_per_step, workload.utilisation)
        self._meter.restart(start)
        self._progress.start_training(start)
        self.end = ""

    @property
    def last(self) -> FinishedStep:
        """The step that was read last."""
        assert self._last is not None, "no step has been read"
        return self._last

    @property
    def has_steps(self) -> bool:
        return self._last is not None or self._unread is not None

    def add(self, step: int, metrics: Metrics, waited: float) -> None:
        """Take the metrics of a step that has been started, and read the metrics of the step before.

        waited: seconds in which the run waited for its batch.
        """
        self._meter.add_wait(waited)
        self._progress.advance(step)
        self.read()
        self._unread = step, metrics

    def read(self, measured: TrainState | None = None) -> None:
        """Read the metrics of the step that was started last, and record them if they are due.

        It waits for the step. If the metrics have been read before, it does nothing.

        Args:
            measured: the state after the step, if its held-out loss is due.

        Raises:
            TrainingDiverged: `check_skips` raises it, or the held-out loss is not finite.
        """
        if self._unread is None:
            return
        (step, metrics), self._unread = self._unread, None
        with self._main.wait():
            jax.block_until_ready(metrics)
        if skipped := check_skips(step, metrics, self._config):
            self._progress.say(f"{self._progress.name_step(step)}  skipped: {skipped}")
            self._events.write(step, "skipped", skipped)
            self._spikes.note(step, metrics)
        loss = float(metrics["loss"])
        last = self._last = FinishedStep(step, metrics, self._losses.add(loss, made_update(metrics)))
        if math.isfinite(loss):
            self._metrics.add(last.of_model)
        due = measured is not None or step % self._config.logging.every == 0
        self._losses, self._held_out = LossWindow() if due else last.window, {}
        if due:
            self._record(last, measured)
        elif self._progress.shows_steps:
            self._progress.show_step({"step": step} | last.read_scalars() | self._meter.read_speed(step))

    def _record(self, last: FinishedStep, measured: TrainState | None) -> None:
        """Write the record of a step, with the held-out loss of the state after it, if one is given."""
        of_window = dict.fromkeys(last.of_model) | {
            name: to_json_number(value) for name, value in self._metrics.read().items()
        }
        self._metrics = MetricsWindow()
        counts = {"loss": last.window.mean, "skipped": int(last.metrics["skipped"])}
        entry = self._meter.make_record(last.step, last.read_scalars() | of_window | counts)
        entry |= self._watchdog.take_seconds()
        try:
            if measured is not None:
                entry |= self._measure(last.step, measured)
        finally:  # a step whose evaluation fails has a record, too
            for write in self._logs.writers:
                write(entry)

    def _measure(self, step: int, state: TrainState) -> dict[str, float | None]:
        """Return the held-out losses for a record, and write the samples."""
        self._main.enter("evaluate")
        losses = self._workload.measure(state)
        self._held_out = {name: value for name, value in losses.items() if name == "eval_loss"}
        if not math.isfinite(loss := losses.get("eval_loss", 0.0)):
            raise TrainingDiverged(f"step {step}: held-out loss {loss}; {describe_remedy(self._config)}")
        if losses:
            self._patience = self._patience.add(step, loss)
        for sample in self._workload.sample(state):
            if self._logs.samples is not None:
                self._logs.samples.write({"step": step, **sample})
        self._main.enter("step")
        self._meter.restart(step)
        return {name: value if math.isfinite(value) else None for name, value in losses.items()}

    def ends_early(self) -> bool:
        """Return whether `evaluation.patience` ends the run after an evaluation. If so, say it."""
        self.end = self._patience.describe_end(self._config.evaluation.patience)
        if self.end:
            self._progress.say(f"{self._progress.name_step(self.last.step)}  the run ends: {self.end}")
        return bool(self.end)

    def make_summary(self) -> dict[str, Any]:
        """Return the entries of a checkpoint of the step that was read last."""
        return {
            self._workload.unit: self.last.step * self._workload.units_per_step,
            "window": dataclasses.asdict(self._losses),
            **self._spikes.left_out.to_record(),
            **self._patience.to_record(),
            **self._held_out,
            **self._metrics.to_record(),
        }

    def sync(self) -> None:
        """Wait until all records are on disk."""
        self._logs.sync()

    def restart_clock(self) -> None:
        """Measure the speed from the step that was read last, so that the time of a save does not count."""
        self._meter.restart(self.last.step)
