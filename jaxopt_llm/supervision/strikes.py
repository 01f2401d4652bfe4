"""Faults that hosts have caused: one that causes too many is used only if no other host can take its place."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

from jaxopt_llm.core.errors import ProcessLost, StateCorrupted
from jaxopt_llm.supervision.host import End
from jaxopt_llm.supervision.journal import last_event

LIMIT = 3  # faults within MEMORY_SECONDS after which a host is avoided; wrong bits are as many at once
MEMORY_SECONDS = 86400.0


class Strikes:
    """Faults by host, of the last day."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._times: dict[int, list[float]] = {}

    def add(self, cause: End, chosen: Sequence[int]) -> list[int]:
        """Count a fault against the host that caused it. Return the hosts that are avoided from now on.

        A lost host counts nothing: it is not there. A device that computes wrongly is named in events.jsonl by the
        process that noticed it; if several hosts are named, none is known to be the wrong one.

        Args:
            chosen: hosts of the round, in the order of its processes.
        """
        if cause.code in (None, ProcessLost.exit_code):
            return []
        host, faults = cause.index, 1
        if cause.code == StateCorrupted.exit_code:
            named = {int(rank) for rank in re.findall(r"of process (\d+)", last_event(self._directory, "corruption"))}
            if len(named) != 1 or not (rank := named.pop()) < len(chosen):
                return []
            host, faults = chosen[rank], LIMIT
        before = self.avoids(host)
        self._times.setdefault(host, []).extend([time.monotonic()] * faults)
        return [host] if self.avoids(host) and not before else []

    def avoids(self, host: int) -> bool:
        """Return whether a host has caused so many faults that others are preferred to it."""
        oldest = time.monotonic() - MEMORY_SECONDS
        return sum(moment > oldest for moment in self._times.get(host, ())) >= LIMIT
