"""Writers of a run while it trains: its progress line, its events and its checkpoints."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.native.identity import identify_run
from jaxopt_llm.config import Config
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.observe.events import EventLog
from jaxopt_llm.observe.progress import ProgressLine


@dataclass(frozen=True)
class Records:
    """Writers of a run.

    start: step of the newest intact checkpoint, from which the run continues; 0 if there is none.
    """

    progress: ProgressLine
    events: EventLog
    checkpoints: Checkpoints
    start: int


@contextlib.contextmanager
def open_records(
    config: Config, processes: Processes, shown: Sequence[str] = (), corpus: str | None = None
) -> Iterator[Records]:
    """Open the writers of the run in `run.directory`. At the end, wait until the last checkpoint is on disk.

    Args:
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
        directory / "checkpoints", config.checkpoint, progress.say, processes, note_save, identity
    )
    with progress, checkpoints:
        start = checkpoints.latest_verified_step() or 0
        processes.note_checkpoint(start)
        progress.advance(start)
        yield Records(progress, events, checkpoints, start)
