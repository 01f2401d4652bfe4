"""Loop over the steps of a run: it reads batches ahead, records metrics one step late, and writes checkpoints.

It knows no model: what it trains is a `Workload` (workload.py).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator
from typing import Any

import jax

from jaxopt_llm.checkpoint.native.identity import write_identity
from jaxopt_llm.config import Config, ProfileConfig
from jaxopt_llm.core.errors import InputError, Preempted, TrainingDiverged
from jaxopt_llm.distributed.launchers import hold_start
from jaxopt_llm.observe.dashboards import Dashboards
from jaxopt_llm.observe.meter import LossWindow, Meter, MetricsWindow
from jaxopt_llm.observe.metrics import MetricsLog
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.observe.profile import Profiler
from jaxopt_llm.training.divergence import (
    FinishedStep,
    check_end,
    check_skips,
    describe_remedy,
    made_update,
    to_json_number,
)
from jaxopt_llm.training.local_steps import ends_round
from jaxopt_llm.training.patience import Patience
from jaxopt_llm.training.records import Records
from jaxopt_llm.training.replicas import ReplicaCheck
from jaxopt_llm.training.setup import set_aside_log
from jaxopt_llm.training.skipped_batches import SkippedBatches, is_spike
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step import Metrics
from jaxopt_llm.training.workload import Workload


class Loop:
    """Loop over the steps of a run. As a context manager it closes files and threads.

    Metrics are read one step late, when the device already runs the next step, so that the device never waits for
    Python. They are read immediately only before an evaluation or a checkpoint, which waits for the device anyway.

    Attributes:
        current: the step that was started last.
    """

    def __init__(self, workload: Workload, records: Records, preemption: Preemption) -> None:
        """Take over what a run prepared."""
        self.current = 0
        self._workload = workload
        self._config: Config = workload.config
        self._checkpoints, self._progress, self._events = records.checkpoints, records.progress, records.events
        self._watchdog, self._preemption, self._main = records.watchdog, preemption, workload.processes.main
        self._memory = records.memory
        self._meter = Meter(workload.unit, workload.units_per_step, workload.utilisation)
        self._scope, self._record_scope = contextlib.ExitStack(), contextlib.ExitStack()
        if self._memory is not None:
            self._scope.callback(self._memory.wait)
        self._batches: Generator[tuple[Any, float], None, None] | None = None
        self._log: MetricsLog | None = None
        self._samples: MetricsLog | None = None
        self._recorders: list[Callable[[dict[str, Any]], None]] = []
        self._finished: FinishedStep | None = None
        self._window, self._metrics = LossWindow(), MetricsWindow()
        self._postponed = False  # a checkpoint was due after a skipped step
        self._replicas = ReplicaCheck(self._config.run.check_replicas, self._note_corruption)
        self._left_out, self._patience, self._end = SkippedBatches(), Patience(), ""
        self._spike: int | None = None  # the step of a spike, to which the run has not answered
        self._started = False

    def __enter__(self) -> "Loop":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._started or not isinstance(error, Preempted):
            self._events.write_end(self.current, error, self._end)
        if self._batches is not None:
            self._batches.close()
        self._scope.close()
        # After an error, a record that cannot be written must not hide it.
        with contextlib.suppress(OSError) if error else contextlib.nullcontext():
            self._record_scope.close()

    def restore(self, start: int) -> None:
        """Load the state of step `start` onto the devices: from its checkpoint, or for step 0 from initial values."""
        self._main.enter("restore", start)
        from_memory = self._memory is not None and self._memory.step == start
        if self._memory is not None and from_memory:
            self._state, record = self._memory.load(), self._memory.record
            self._progress.say(f"step {start} is in the memory of the hosts")
        else:
            self._state = self._workload.restore(self._checkpoints, start, self._progress.say)
            record = self._checkpoints.read_record(start) if start else {}
        self._patience = Patience.from_record(record)
        if start:
            self._window = LossWindow(**record.get("window", {}))
            self._metrics = MetricsWindow.from_record(record)
            self._left_out = SkippedBatches.from_record(record)
            self._progress.say(f"continues from step {start}")

    def hold(self, start: int) -> None:
        """Wait until the supervisor lets the steps begin, or until a stop is requested."""
        self.current = start
        self._main.leave()  # no progress is expected
        hold_start(self._preemption.requested, self._progress.say)
        self._main.enter("restore")

    def start(self, start: int) -> None:
        """Open the records of the run and the iterator of batches, which starts to read at the first step.

        Raises:
            Preempted: a stop of any process was requested. The run has no record of this start then.
        """
        config, directory, processes = self._config, self._workload.directory, self._workload.processes
        # Not by a collective: on CPUs the first one fails if a process comes to it 30 s later than another one.
        if any(processes.channel("start").exchange("stop" if self._preemption.requested() else "")):
            raise Preempted(start)
        self._vote = processes.vote()
        self._started = True
        if self._memory is not None:
            self._memory.discard_after(start)
        if processes.first:
            if not start:
                set_aside_log(directory / "metrics.jsonl")
                set_aside_log(directory / "samples.jsonl")
                set_aside_log(directory / "events.jsonl")
            if self._checkpoints.identity is not None:
                write_identity(directory, self._checkpoints.identity)
            self._workload.write_files()
            self._open_records(start)
        self._events.write(start, "resume" if start else "start")
        profile = config.profile if processes.first else ProfileConfig()
        self._profiler = self._scope.enter_context(Profiler(profile, directory))
        self._begin_after(start)

    def _open_records(self, start: int) -> None:
        """Open the records of the run, without those after step `start`."""
        config, directory, say = self._config, self._workload.directory, self._progress.say
        self._record_scope.close()
        self._log = MetricsLog(directory / "metrics.jsonl", start, say)
        self._record_scope.callback(self._log.close)
        if config.evaluation.samples:
            self._samples = MetricsLog(directory / "samples.jsonl", start, say)
            self._record_scope.callback(self._samples.close)
        dashboards = Dashboards(config.logging, directory, start, dataclasses.asdict(config), say)
        self._record_scope.enter_context(dashboards)
        self._recorders = [self._log.write, dashboards.write, self._progress.show]

    def _begin_after(self, step: int) -> None:
        """Go on after `step`, and measure the speed from there."""
        self._read_after(step)
        self._meter.restart(step)
        self._progress.start_training(step)

    def _read_after(self, step: int) -> None:
        """Read the batches of the steps after `step`."""
        if self._batches is not None:
            self._batches.close()
        first = self._left_out.batch_after(step)
        self._batches = self._workload.read_batches(first, self._preemption.requested)
        self.current = step

    def step(self, step: int) -> None:
        """Run a step on the next batch, and record the previous step.

        Raises:
            InputError, Preempted: there is no next batch. The checkpoint of the previous step has been written.
        """
        assert self._batches is not None
        self.current = step
        self._main.enter("data", step)
        self._profiler.before_step(step)
        try:
            batch, waited = next(self._batches)
        except InputError:
            self._save_before_exit()
            raise
        except Preempted:
            self._save_before_exit()
            raise Preempted(step - 1) from None  # its step counted batches
        self._meter.add_wait(waited)
        self._main.enter("step")
        run = self._run_round_end if ends_round(self._config, step) else self._workload.step
        self._state, metrics = self._replicas.step(step, run, self._state, batch)
        self._profiler.after_step(step, metrics)
        self._progress.advance(step)
        if self._finished and self._finished.summary is None:
            self._record_step(self._finished)
        self._finished = FinishedStep(step, metrics)

    def _run_round_end(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Run the last step of a round of local steps, and the outer step."""
        state, metrics = self._workload.step(state, batch)
        return self._workload.average_groups(state), metrics

    def poll(self, step: int) -> tuple[bool, bool]:
        """Return whether any process received a request to stop, and whether a checkpoint is due after a step.

        Raises:
            InputError: the data has changed on the disk.
        """
        self._workload.check_data(wait=False)
        stop, failed = self._vote.cast(self._preemption.requested(), self._checkpoints.last_save_failed)
        return stop, self._checkpoints.is_due(step, failed) or self._postponed

    def record(self, evaluates: bool) -> None:
        """Read and record the metrics of the step that ran last.

        Args:
            evaluates: also measure the held-out loss.
        """
        assert self._finished is not None
        self._record_step(self._finished, self._state if evaluates else None)

    def ends_early(self, step: int) -> bool:
        """Return whether `evaluation.patience` ends the run after a step that was evaluated. If so, say it."""
        self._end = self._patience.describe_end(self._config.evaluation.patience)
        if self._end:
            self._progress.say(f"{self._progress.name_step(step)}  the run ends: {self._end}")
        return bool(self._end)

    def save(self, due: bool, exits: bool, last: bool) -> None:
        """Write the checkpoint of the step that ran last.

        After a skipped step the checkpoint is postponed to the next step: its parameters may be the reason why the loss
        was not finite, and must not replace older ones.

        Args:
            due: a checkpoint is due.
            exits: the run stops here and waits until the checkpoint is complete.
            last: this is the last step of the run.

        Raises:
            TrainingDiverged: the run ends, and no step since the last record updated the parameters.
            StateCorrupted: copies of the state differ.
            InputError: the data has changed on the disk.
        """
        assert self._finished is not None and self._finished.summary is not None
        step, updated = self._finished.step, made_update(self._finished.metrics)
        self._postponed = due and not updated
        saves = last or (exits and updated) or (due and not self._postponed)
        if saves:
            self._workload.check_data(wait=True)
            self._replicas.compare(step, self._state)
        if last or (exits and updated):
            trees = self._workload.to_checkpoint(self._state)
            self._checkpoints.save_last(step, trees, self._make_summary(), self._sync_logs)
            if self._memory is not None:
                self._memory.discard_after(-1)
            if last:
                check_end(self._finished, self._config)
        elif saves:
            trees = self._workload.to_checkpoint(self._state)
            self._checkpoints.save(step, trees, self._make_summary(), self._sync_logs)
            self._meter.restart(step)

    def _make_summary(self) -> dict[str, Any]:
        """Return the entries of a checkpoint of the step that ran last, whose metrics have been recorded."""
        assert self._finished is not None and self._finished.summary is not None
        return self._finished.summary | self._metrics.to_record()

    def replicate(self, step: int) -> None:
        """Copy the state after the step into the memory of the hosts, if that is due. A skipped step has no copy."""
        assert self._finished is not None
        if self._memory is None or step % self._config.checkpoint.replicate_every:
            return
        if self._finished.summary is None:
            self._record_step(self._finished)
        if made_update(self._finished.metrics):
            self._replicas.compare(step, self._state)
            self._memory.save(step, self._state, self._make_summary())

    def roll_back(self) -> int | None:
        """Answer to a spike: go back to the last checkpoint, and leave out the batches up to the spike.

        Returns:
            The step from which the run goes on; None if there was no spike, or if there is no checkpoint.

        Raises:
            TrainingDiverged: training.skip_limit ranges of batches were left out since the last checkpoint.
        """
        spike, self._spike = self._spike, None
        start = self._checkpoints.latest_verified_step() if spike is not None else None
        if spike is None or start is None:
            return None
        saved = SkippedBatches.from_record(self._checkpoints.read_record(start))
        left_out = self._left_out.leave_out(start, spike)
        if len(left_out.ranges) - len(saved.ranges) > self._config.training.skip_limit:
            limit = f"training.skip_limit={self._config.training.skip_limit}"
            remedy = describe_remedy(self._config)
            raise TrainingDiverged(f"step {spike}: a spike after {limit} returns to step {start}; {remedy}")
        first, end = left_out.ranges[-1]
        detail = f"a spike: back to step {start}, without batches {first} to {end - 1}"
        self._progress.say(f"{self._progress.name_step(spike)}  {detail}")
        self._events.write(spike, "rollback", detail)
        if self._memory is not None:
            self._memory.discard_after(start)
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()  # the devices cannot hold the state twice
        self.restore(start)
        self._left_out = left_out
        self._finished, self._postponed = None, False
        if self._workload.processes.first:
            self._open_records(start)
        self._progress.advance(start)
        self._begin_after(start)
        return start

    def _note_corruption(self, step: int, detail: str, processes: list[int]) -> None:
        self._events.write(step, "corruption", detail, processes=processes)

    def _sync_logs(self) -> None:
        for log in (self._log, self._samples):
            if log is not None:
                log.sync()

    def release_state(self) -> TrainState:
        """Return the state, which the loop must not use any more."""
        return self._state

    def _save_before_exit(self) -> None:
        """Write the checkpoint of the step that ran last."""
        if self._finished is None or self._workload.processes.count > 1:  # others already run the next step
            return
        if self._finished.summary is None:
            self.record(evaluates=False)
        self.save(due=False, exits=True, last=False)

    def _record_step(self, finished: FinishedStep, measured: TrainState | None = None) -> None:
        """Read the metrics of a step, which waits for it, and record them if they are due.

        Args:
            measured: the state after the step, if its held-out loss is due.

        Raises:
            TrainingDiverged: `check_skips` raises it, or the held-out loss is not finite.
        """
        config, step, metrics = self._config, finished.step, finished.metrics
        with self._main.wait():
            jax.block_until_ready(metrics)
        if skipped := check_skips(step, metrics, config):
            self._progress.say(f"{self._progress.name_step(step)}  skipped: {skipped}")
            self._events.write(step, "skipped", skipped)
            if self._spike is None and config.training.on_spike == "rollback" and is_spike(metrics):
                self._spike = step
        window = finished.window = self._window.add(loss := float(metrics["loss"]), made_update(metrics))
        if math.isfinite(loss):
            self._metrics.add(finished.of_model)
        due = measured is not None or step % config.logging.every == 0
        self._window = LossWindow() if due else window
        units = {self._workload.unit: step * self._workload.units_per_step}
        finished.summary = units | {"window": dataclasses.asdict(self._window)} | self._left_out.to_record()
        finished.summary |= self._patience.to_record()
        if not due:
            if self._progress.shows_steps:
                self._progress.show_step({"step": step} | finished.read_scalars() | self._meter.read_speed(step))
            return
        of_window = dict.fromkeys(finished.of_model) | {
            name: to_json_number(value) for name, value in self._metrics.read().items()
        }
        self._metrics = MetricsWindow()
        counts = {"loss": window.mean, "skipped": int(metrics["skipped"])}
        values = finished.read_scalars() | of_window | counts
        entry = self._meter.make_record(step, values) | self._watchdog.take_seconds()
        if measured is not None:
            self._main.enter("evaluate")
            losses = self._workload.evaluate(measured)
            entry |= {name: value if math.isfinite(value) else None for name, value in losses.items()}
            finished.summary |= {name: value for name, value in losses.items() if name == "eval_loss"}
            if not math.isfinite(loss := losses.get("eval_loss", 0.0)):
                raise TrainingDiverged(f"step {step}: held-out loss {loss}; {describe_remedy(config)}")
            if losses:
                self._patience = self._patience.add(step, loss)
                finished.summary |= self._patience.to_record()
            self._write_samples(step, measured)
            self._main.enter("step")
            self._meter.restart(step)
        for write in self._recorders:
            write(entry)

    def _write_samples(self, step: int, state: TrainState) -> None:
        for sample in self._workload.sample(state):
            if self._samples is not None:
                self._samples.write({"step": step, **sample})
