"""Decision after a fault: a restart after a pause, or the end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxopt_llm.core.errors import CheckpointError, InputError, Preempted, ProcessLost, TrainingDiverged
from jaxopt_llm.supervision.host import End

# Done, or what a restart does not repair.
FINAL = frozenset((0, InputError.exit_code, TrainingDiverged.exit_code, CheckpointError.exit_code))
STOPPED = Preempted.exit_code
MAX_PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class RestartBudget:
    """Restarts since the last new checkpoint.

    Attributes:
        limit: largest number of restarts without a new checkpoint.
        first_pause: seconds before the first of them; each further pause is twice as long.
    """

    limit: int
    first_pause: float
    checkpoint: int = 0
    restarts: int = 0

    def after_fault(self, checkpoint: int) -> "RestartBudget":
        """Return the budget after a fault. checkpoint: step of the newest checkpoint."""
        if checkpoint > self.checkpoint:
            return replace(self, checkpoint=checkpoint, restarts=1)
        return replace(self, restarts=self.restarts + 1)

    @property
    def exhausted(self) -> bool:
        return self.restarts > self.limit

    @property
    def pause_seconds(self) -> float:
        return min(self.first_pause * 2.0 ** min(self.restarts - 1, 30), MAX_PAUSE_SECONDS)


def find_cause(ends: Sequence[End]) -> End | None:
    """Return the end that caused the others, given in the order in which they were noticed; None: all are done.

    Exit code 5 says that another process was lost or is missing, so any other end comes before it.
    """
    faults = [end for end in ends if end.code != 0]
    return min(faults, key=lambda end: end.code == ProcessLost.exit_code, default=None)


def find_final_code(ends: Sequence[End]) -> int | None:
    """Return the exit code of the job if a restart would not help; None: restart it.

    2, 3 and 4 are final only if no host had an end of another kind than these and 5.
    """
    cause = find_cause(ends)
    if cause is None:
        return 0
    own = [end.code for end in ends if end.code != ProcessLost.exit_code]
    return cause.code if all(code in FINAL for code in own) and cause.code in FINAL else None
