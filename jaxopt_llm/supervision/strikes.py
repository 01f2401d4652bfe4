"""Faults counted per host. A host with too many of them is used only if no other can take its place.

They are lines of the run's journal, so that they outlive the supervisor that leads.
"""

import time
from collections.abc import Collection, Sequence
from pathlib import Path

from jaxopt_llm.core.errors import ProcessLost, StateCorrupted
from jaxopt_llm.supervision.host import End
from jaxopt_llm.supervision.journal import Journal, find_corrupted, read_strikes
from jaxopt_llm.supervision.policy import FINAL, STOPPED

LIMIT = 3  # strikes within MEMORY_SECONDS from which on a host is avoided; wrong bits are as many at once
MEMORY_SECONDS = 86400.0


class Strikes:
    """Strikes of the hosts of a job."""

    def __init__(self, directory: Path, journal: Journal) -> None:
        self._directory, self._journal = directory, journal
        self._strikes = read_strikes(directory)

    def add(self, cause: End, chosen: Sequence[int], killed: Collection[int]) -> int | None:
        """Count the fault that ended a round against the host that caused it. Return the host if it is avoided now.

        Nothing counts if it is not known which host caused the fault: a host or its program was lost; a program was
        stopped, or ended for a reason that is the same on all hosts; several programs had to be killed; or several
        devices may have computed wrongly.

        Args:
            chosen: hosts of the round, in the order of its processes.
            killed: hosts on which the leader had to kill the program.
        """
        host, count = cause.index, 1
        if cause.code in (None, ProcessLost.exit_code, STOPPED, *FINAL) or (host in killed and len(killed) > 1):
            return None
        if cause.code == StateCorrupted.exit_code:
            ranks = find_corrupted(self._directory)
            if len(ranks) != 1 or ranks[0] >= len(chosen):
                return None
            host, count = chosen[ranks[0]], LIMIT
        before = self.avoids(host)
        self._strikes.append((time.time(), host, count))
        self._journal.write_strikes(host, count)
        return host if self.avoids(host) and not before else None

    def avoids(self, host: int) -> bool:
        """Return whether a host has so many strikes that others are preferred to it."""
        oldest = time.time() - MEMORY_SECONDS
        return sum(count for moment, index, count in self._strikes if index == host and moment > oldest) >= LIMIT
