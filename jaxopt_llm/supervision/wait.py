"""Wait of an elastic job for hosts that are missing, during which the hosts that are there prepare to go on alone."""

import time
from dataclasses import dataclass, field

# A host that comes back within this time has lost no more than its supervisor, as a rule, so the others do not prepare.
PATIENCE = 0.1  # of the limit
LEAST_PATIENCE_SECONDS = 10.0


@dataclass
class Wait:
    """Wait for missing hosts.

    Attributes:
        limit: seconds after which the job goes on without them; infinite: never.
        prepares: the programs of the hosts that are there may start before the limit, and hold.
    """

    limit: float
    prepares: bool
    _since: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float:
        return max(0.0, self._since + self.limit - time.monotonic())

    def lets_begin(self) -> bool:
        """Return whether a round without the missing hosts may begin, to train or to prepare."""
        waited = time.monotonic() - self._since
        return waited >= self.limit or (self.prepares and waited >= max(PATIENCE * self.limit, LEAST_PATIENCE_SECONDS))
