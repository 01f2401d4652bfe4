"""The loop over the steps of a run: in which order its parts act.

The loop knows no model: it trains a `Workload` (workload.py). Each part has one concern and its own state: `Steps` the
training state and the batches, `Recorder` (records.py) the metrics and the held-out loss, `Spikes` (divergence.py) the
answer to a spike of the loss, `Saver` the checkpoints, `Copies` the state in the memory of the hosts.
"""

import contextlib
import enum
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax

from jaxopt_llm.checkpoint.native.host_memory import HostMemory
from jaxopt_llm.checkpoint.native.identity import write_identity
from jaxopt_llm.config import Config, ProfileConfig
from jaxopt_llm.core.errors import InputError, Preempted
from jaxopt_llm.distributed.launchers import hold_start
from jaxopt_llm.observe.dashboards import EventLog, Profiler
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.run.divergence import Return, SkippedBatches, Spikes, check_end
from jaxopt_llm.run.records import Recorder, Records, open_logs, set_aside_logs
from jaxopt_llm.run.replicas import ReplicaCheck
from jaxopt_llm.run.workload import Workload
from jaxopt_llm.step.local_steps import ends_round
from jaxopt_llm.step.state import TrainState
from jaxopt_llm.step.step import Metrics

Poll = Callable[[], tuple[bool, bool]]  # -> (a stop was requested, the last save failed), on any process


def train_workload(workload: Workload, records: Records, preemption: Preemption) -> None:
    """Train from the step that the records say to `training.steps`.

    Raises:
        OutOfMemory: the memory of the devices does not suffice.
        Preempted: a signal to any process asked for a stop before the last step. It is raised after the current step
            and its checkpoint; a skipped step has no checkpoint.
    """
    start, events, stopped = records.start, records.events, False
    explain = workload.explain_oom(lambda: f"bringing the state of step {start} onto the devices")
    with _note_fault(events, lambda: start), explain:
        state = _restore(workload, records, start, records.memory)
    spikes = Spikes(workload.config, records.checkpoints, SkippedBatches.from_record(records.record))
    steps = Steps(workload, events, preemption, state, start, spikes.left_out)
    try:
        with contextlib.closing(steps), _note_fault(events, lambda: steps.current):
            stopped = not records.end and _wait_to_begin(workload, records, preemption)
            if not records.end and not stopped:
                _train(workload, records, preemption, steps, spikes)
        if stopped:
            raise Preempted(start)  # without an event: the run has no record of this start
    finally:
        workload.keep(steps.state, records.checkpoints.identity)


def _train(workload: Workload, records: Records, preemption: Preemption, steps: "Steps", spikes: Spikes) -> None:
    """Run the steps after `records.start`, and after a spike those after the checkpoint to which the run goes back."""
    config, checkpoints, start, record = workload.config, records.checkpoints, records.start, records.record
    copies, poll = Copies(records.memory, config), _make_poll(workload, records, preemption)
    copies.discard_after(start)
    _begin_records(workload, records)
    profile = config.profile if workload.processes.first else ProfileConfig()
    with (
        # Metrics are read one step late, and JAX reports a failed allocation only then.
        workload.explain_oom(lambda: f"in step {steps.current} or the one before"),
        contextlib.closing(copies),
        Profiler(profile, workload.directory) as profiler,
    ):
        while True:
            with open_logs(workload, records.progress, start) as logs:
                recorder = Recorder(workload, records, logs, spikes, start, record)
                saver = Saver(workload, records, steps, recorder, copies)
                back = run_steps(config, profiler, steps, recorder, poll, spikes, saver, copies)
                if back is None:
                    records.events.write_end(steps.current, None, recorder.end)
                    break
            _go_back(workload, records, steps, copies, back)
            start, record = back.step, checkpoints.read_record(back.step)
            spikes = Spikes(config, checkpoints, back.left_out)
    records.progress.end()
    path = checkpoints.directory / str(steps.current)
    records.progress.say(f"the checkpoint of step {steps.current} is {path}")


def run_steps(
    config: Config,
    profiler: Profiler,
    steps: "Steps",
    recorder: Recorder,
    poll: Poll,
    spikes: Spikes,
    saver: "Saver",
    copies: "Copies",
) -> Return | None:
    """Run the steps up to `training.steps`, or to the end that `evaluation.patience` sets.

    Returns:
        The checkpoint to which a spike sends the run back; None at the end of the run.

    Raises:
        InputError, Preempted: there is no next batch, or a stop was requested. The state of the last step is saved.
    """
    last = False
    while not last:
        profiler.before_step(steps.current + 1)
        with saver.saved_before_exit():
            batch, waited = steps.take_batch()
        with saver.saved_before_exit(agreed=True):
            batch, drawn = steps.draw(batch)
        metrics = steps.run(batch) | drawn
        step = steps.current
        profiler.after_step(step, metrics)
        recorder.add(step, metrics, waited)
        stop, failed = poll()
        due, last = saver.is_due(failed), step == config.training.steps
        evaluates = config.evaluation.every > 0 and (last or step % config.evaluation.every == 0)
        if evaluates or due or stop or last:
            with saver.saved_before_exit(agreed=config.draws):
                recorder.read(steps.state if evaluates else None)
        if back := spikes.find_return():
            return back
        last = last or (evaluates and recorder.ends_early())
        if last or stop or due:
            saver.save(Save.AT_END if last else Save.AT_STOP if stop else Save.WHILE_TRAINING)
        if stop and not last:
            raise Preempted(step)
        if not last:
            copies.copy(steps, recorder)
    return None


class Steps:
    """The training state of a run, and the batches of the next steps.

    Attributes:
        state: after step `current`.
        current: the step that was started last.
    """

    def __init__(
        self,
        workload: Workload,
        events: EventLog,
        preemption: Preemption,
        state: TrainState,
        start: int,
        left_out: SkippedBatches,
    ) -> None:
        """Continue after step `start` with its state. The first batch is read when it is taken."""
        self.state, self.current = state, start
        self._workload, self._events, self._preemption = workload, events, preemption
        self._main = workload.processes.main
        self._batches, self._replicas = self._read_after(start, left_out), self._make_check()

    def _read_after(self, step: int, left_out: SkippedBatches) -> Generator[tuple[Any, float], None, None]:
        return self._workload.read_batches(left_out.batch_after(step), self._preemption.requested)

    def _make_check(self) -> ReplicaCheck:
        def note(step: int, detail: str, processes: list[int]) -> None:
            self._events.write(step, "corruption", detail, processes=processes)

        return ReplicaCheck(self._workload.config.run.check_replicas, note)

    def close(self) -> None:
        """End the thread that reads batches."""
        self._batches.close()

    def go_back(self, back: Return, restore: Callable[[], TrainState]) -> None:
        """Continue after a checkpoint, without the batches up to a spike.

        restore: returns the state of the checkpoint. The devices cannot hold two states, so the present one is deleted.
        """
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()
        self.state = restore()
        self._batches.close()
        self._batches, self._replicas = self._read_after(back.step, back.left_out), self._make_check()
        self.current = back.step

    def take_batch(self) -> tuple[Any, float]:
        """Return the batch of the next step, which becomes `current`, and the seconds for which the run waited for it.

        Raises:
            InputError: the batch cannot be read.
            Preempted: a stop was requested while the run waited for it.
        """
        self.current += 1
        self._main.enter("data", self.current)
        try:
            return next(self._batches)
        except Preempted:
            raise Preempted(self.current - 1) from None  # its step counted batches

    def draw(self, batch: Any) -> tuple[Any, Metrics]:
        """Return what step `current` trains on, and metrics of it. Only rollouts need the state; see Workload.

        Raises:
            InputError: answers cannot be rewarded.
        """
        self._main.enter("step")  # the first answers wait for a compile, as the first step does
        return self._workload.draw(self.state, batch)

    def run(self, batch: Any) -> Metrics:
        """Start step `current` on what `draw` returned, and with it the outer step that ends a round of local steps.

        Raises:
            StateCorrupted: `run.check_replicas` has found a wrong bit.
        """
        ends = ends_round(self._workload.config, self.current)
        self.state, metrics = self._replicas.step(
            self.current, self._run_round_end if ends else self._workload.step, self.state, batch
        )
        return metrics

    def _run_round_end(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state, metrics = self._workload.step(state, batch)
        return self._workload.average_groups(state), metrics

    def check_copies(self) -> None:
        """Raise StateCorrupted if copies of the state on several devices differ; see ReplicaCheck.compare."""
        self._replicas.compare(self.current, self.state)


class Save(enum.Enum):
    """Occasion of a checkpoint."""

    WHILE_TRAINING = "while_training"
    """A checkpoint is due, and is written while the run goes on. After a skipped step it is postponed to the next step:
    the parameters may be the reason why the loss was not finite, and must not replace older ones."""
    AT_STOP = "at_stop"
    """The run stops before its last step, and waits for the checkpoint. A skipped step has none."""
    AT_END = "at_end"
    """The run ends, and waits for the checkpoint."""


class Saver:
    """Checkpoints that are due, and those at a stop and at the end."""

    def __init__(
        self, workload: Workload, records: Records, steps: Steps, recorder: Recorder, copies: "Copies"
    ) -> None:
        self._workload, self._checkpoints = workload, records.checkpoints
        self._steps, self._recorder, self._copies = steps, recorder, copies
        self._postponed = False  # a checkpoint was due after a skipped step

    def is_due(self, failed: bool) -> bool:
        """Return whether a checkpoint is due. failed: whether the last save failed on any process."""
        return self._checkpoints.is_due(self._steps.current, failed) or self._postponed

    def save(self, occasion: Save) -> None:
        """Write the checkpoint of the current step, whose metrics have been read.

        Raises:
            TrainingDiverged: the run ends, and no step since the last record updated the parameters.
            StateCorrupted: copies of the state differ.
            InputError: the data has changed on the disk.
        """
        last = self._recorder.last
        self._postponed = occasion is Save.WHILE_TRAINING and not last.updated
        if not last.updated and occasion is not Save.AT_END:
            return
        self._workload.check_data(wait=True)
        self._steps.check_copies()
        trees, record = self._workload.to_checkpoint(self._steps.state), self._recorder.make_summary()
        if occasion is Save.WHILE_TRAINING:
            self._checkpoints.save(last.step, trees, record, self._recorder.sync)
            self._recorder.restart_clock()
            return
        self._checkpoints.save_last(last.step, trees, record, self._recorder.sync)
        self._copies.discard_after(-1)
        if occasion is Save.AT_END:
            check_end(last, self._workload.config)

    @contextlib.contextmanager
    def saved_before_exit(self, agreed: bool = False) -> Iterator[None]:
        """Write the checkpoint of the last step if there is no next batch, or answers cannot be drawn or rewarded.

        agreed: whether such an error occurs in all processes. Otherwise, in a job of several, the others already run
            the next step.
        """
        try:
            yield
        except (InputError, Preempted):
            if self._recorder.has_steps and (agreed or self._workload.processes.count == 1):
                self._recorder.read()
                self.save(Save.AT_STOP)
            raise


class Copies:
    """Copies of the state in the memory of the hosts, after every `checkpoint.replicate_every` steps."""

    def __init__(self, memory: HostMemory | None, config: Config) -> None:
        """Take over the memory; None: there are no copies."""
        self._memory, self._every = memory, config.checkpoint.replicate_every

    def copy(self, steps: Steps, recorder: Recorder) -> None:
        """Copy the state after the current step, if that is due. A skipped step has no copy."""
        if self._memory is None or steps.current % self._every:
            return
        recorder.read()
        if recorder.last.updated:
            steps.check_copies()
            self._memory.save(steps.current, steps.state, recorder.make_summary())

    def discard_after(self, step: int) -> None:
        """Delete the copies of later steps."""
        if self._memory is not None:
            self._memory.discard_after(step)

    def close(self) -> None:
        """Wait until the last copy is whole."""
        if self._memory is not None:
            self._memory.wait()


@contextlib.contextmanager
def _note_fault(events: EventLog, read_step: Callable[[], int]) -> Iterator[None]:
    """Note an error, or a requested stop, in the history of the run."""
    try:
        yield
    except BaseException as error:
        events.write_end(read_step(), error)
        raise


def _restore(workload: Workload, records: Records, step: int, memory: HostMemory | None = None) -> TrainState:
    """Return the state of a step on the devices: from a checkpoint or the memory of the hosts, or the initial one."""
    say = records.progress.say
    workload.processes.main.enter("restore", step)
    if memory is not None and memory.step == step:
        state = memory.load()
        say(f"step {step} is in the memory of the hosts")
    else:
        state = workload.restore(records.checkpoints, step, say)
    if step:
        say(f"continues from step {step}")
    return state


def _wait_to_begin(workload: Workload, records: Records, preemption: Preemption) -> bool:
    """Wait until the supervisor lets the steps begin. Return whether a stop of any process was requested until then."""
    processes = workload.processes
    processes.main.leave()  # no progress is expected
    hold_start(preemption.requested, records.progress.say)
    processes.main.enter("restore")
    # Not by a collective: on CPUs the first one fails if a process comes to it 30 s later than another one.
    return any(processes.channel("start").exchange("stop" if preemption.requested() else ""))


def _begin_records(workload: Workload, records: Records) -> None:
    """Write what identifies the run, and the first event of this start."""
    if workload.processes.first:
        if not records.start:
            set_aside_logs(workload.directory)
        if records.checkpoints.identity is not None:
            write_identity(workload.directory, records.checkpoints.identity)
        workload.write_files()
    records.events.write(records.start, "resume" if records.start else "start")


def _make_poll(workload: Workload, records: Records, preemption: Preemption) -> Poll:
    """Return the function that asks all processes two questions after each step.

    It raises InputError if the data has changed on the disk.
    """
    vote = workload.processes.vote()

    def poll() -> tuple[bool, bool]:
        workload.check_data(wait=False)
        return vote.cast(preemption.requested(), records.checkpoints.last_save_failed)

    return poll


def _go_back(workload: Workload, records: Records, steps: Steps, copies: Copies, back: Return) -> None:
    """Return to a checkpoint after a spike, and say it."""
    records.progress.say(f"{records.progress.name_step(back.spike)}  {back}")
    records.events.write(back.spike, "rollback", str(back))
    copies.discard_after(back.step)
    steps.go_back(back, lambda: _restore(workload, records, back.step))
    records.progress.advance(back.step)
