"""Writers of a run while it trains: its progress line, its events and its checkpoints."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.native.host_memory import HostMemory
from jaxopt_llm.checkpoint.native.identity import identify_run
from jaxopt_llm.config import Config
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.distributed.watchdog import Watchdog
from jaxopt_llm.observe.logs import EventLog
from jaxopt_llm.observe.progress import ProgressLine
from jaxopt_llm.training.patience import Patience
from jaxopt_llm.training.state import TrainState


@dataclass(frozen=True)
class Records:
    """Writers of a run.

    Attributes:
        start: step from which the run continues: that of the newest intact checkpoint, or a later one of which the
            memory of the hosts holds the state; 0 if there is none.
        end: why the run has ended, and what to set to train longer; empty if it goes on.
        memory: the state in the memory of the hosts; None without `checkpoint.replicate_every`.
    """

    progress: ProgressLine
    events: EventLog
    checkpoints: Checkpoints
    watchdog: Watchdog
    start: int
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
        watchdog: that of the run, which has begun.
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
        end = ""
        if start:
            held = memory is not None and memory.step == start
            record = memory.record if memory is not None and held else checkpoints.read_record(start)
            end = describe_end(config, start, Patience.from_record(record))
        yield Records(progress, events, checkpoints, watchdog, start, end, memory)


def describe_end(config: Config, step: int, patience: Patience) -> str:
    """Return why a run has ended at a step, and what to set to train longer; empty if it goes on."""
    if step >= config.training.steps:
        return f"{config.run.directory} is finished at step {step}; train longer with a larger training.steps"
    if reason := patience.describe_end(config.evaluation.patience):
        return (
            f"{config.run.directory} has ended at step {step}: {reason}; train longer with a larger "
            "evaluation.patience, or with 0"
        )
    return ""
