"""Supervisor of one process of a run: it starts the program again after faults."""

import os
import selectors
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxopt_llm.supervision.child import Child, describe_code
from jaxopt_llm.supervision.journal import Journal, last_start, newest_checkpoint
from jaxopt_llm.supervision.policy import FINAL, STOPPED, Patience
from jaxopt_llm.supervision.signals import Signals

_LOOK_SECONDS = 0.5  # between two looks whether the run is back


class Supervisor:
    """Supervisor of a program, which continues a run from its last checkpoint each time that it is started."""

    def __init__(self, command: Sequence[str], directory: Path, process: int, patience: Patience) -> None:
        self._command, self._directory = command, directory
        self._journal = Journal(directory, process)
        self._patience = patience
        self._signals = Signals()

    def run(self) -> int:
        """Run the program until it ends for good, and return the exit code."""
        fault_at: float | None = None
        while True:
            code, what = self._run_once(fault_at)
            fault_at = time.monotonic()
            if self._signals.stopped or code == 0:
                return code
            self._patience = self._patience.after_fault(newest_checkpoint(self._directory))
            ends = code in FINAL or self._patience.exhausted
            self._journal.write_fault(code, what, 0 if ends else self._patience.restarts)
            if ends:
                if code not in FINAL:
                    self._say(
                        f"{describe_code(code)}; no new checkpoint after {self._patience.limit} restarts: this is the end"
                    )
                return code
            self._say(f"{describe_code(code)}; restart {self._patience.restarts} in {self._patience.pause_seconds:g} s")
            if self._pause(self._patience.pause_seconds):
                return STOPPED

    def _run_once(self, fault_at: float | None) -> tuple[int, str]:
        """Run the program once. Return its exit code and the last line of its standard error.

        fault_at: time of the fault before this start.
        """
        before = last_start(self._directory)
        child = Child(self._command, os.environ)
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.reader, selectors.EVENT_READ)
            selector.register(child.stderr, selectors.EVENT_READ)
            while (code := child.poll()) is None:
                for key, _ in selector.select(None if fault_at is None else _LOOK_SECONDS):
                    if key.fd != child.stderr:
                        for signum in self._signals.read():
                            child.send(signum)
                    elif not child.pass_on():
                        selector.unregister(child.stderr)
                if fault_at is not None and last_start(self._directory) not in ({}, before):
                    self._journal.write_recovery(time.monotonic() - fault_at)
                    fault_at = None
        return code, child.close()

    def _pause(self, seconds: float) -> bool:
        """Wait, and return whether a stop was requested."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.reader, selectors.EVENT_READ)
            while not self._signals.stopped and (left := deadline - time.monotonic()) > 0:
                selector.select(left)
                self._signals.read()
        return self._signals.stopped

    def _say(self, text: str) -> None:
        print(f"supervise: {text}", file=sys.stderr, flush=True)
