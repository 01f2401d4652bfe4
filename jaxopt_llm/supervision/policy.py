"""When a supervisor restarts its program, and after what pause."""

from dataclasses import dataclass

from jaxopt_llm.core.errors import CheckpointError, InputError, Preempted, TrainingDiverged

# Done, or what a restart does not repair.
FINAL = frozenset((0, InputError.exit_code, TrainingDiverged.exit_code, CheckpointError.exit_code))
STOPPED = Preempted.exit_code
MAX_PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class Patience:
    """Restarts since the last new checkpoint.

    Attributes:
        limit: largest number of restarts without a new checkpoint.
        first_pause: seconds before the first of them; each further pause is twice as long.
    """

    limit: int
    first_pause: float
    checkpoint: int = 0
    restarts: int = 0

    def after_fault(self, checkpoint: int) -> "Patience":
        """Return the patience after a fault. checkpoint: step of the newest checkpoint."""
        is_new = checkpoint > self.checkpoint
        restarts = 1 if is_new else self.restarts + 1
        return Patience(self.limit, self.first_pause, max(checkpoint, self.checkpoint), restarts)

    @property
    def exhausted(self) -> bool:
        return self.restarts > self.limit

    @property
    def pause_seconds(self) -> float:
        return min(self.first_pause * 2.0 ** min(self.restarts - 1, 30), MAX_PAUSE_SECONDS)
