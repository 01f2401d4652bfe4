"""One host as its supervisor sees it: the signals to the supervisor, the program, and connections to wait for."""

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxopt_llm.core.errors import Preempted
from jaxopt_llm.supervision.child import Child
from jaxopt_llm.supervision.signals import STOPS, Signals

# A frozen program is ended after so many looks at it, LOOK_SECONDS apart or more. If one program is frozen, the others
# notice it first; if all are, nobody else does. Looks are counted, because the supervisor may be frozen meanwhile, too.
FROZEN_LOOKS, LOOK_SECONDS = 180, 0.5


@dataclass(frozen=True)
class End:
    """End of the program on a host.

    Attributes:
        code: exit code as a shell counts it; None if the host itself was lost.
        what: last line of the program's standard error.
    """

    index: int
    host: str
    code: int | None
    what: str


class Host:
    """This host: a supervisor that waits for everything at one place, so that it needs no threads."""

    def __init__(self, index: int) -> None:
        self.index, self.name = index, socket.gethostname()
        self._signals = Signals()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals.reader, selectors.EVENT_READ)
        self._child: Child | None = None
        self._read_to_end = False
        self._stopped_by = set[int]()  # signals by which the leader has stopped the program
        self._frozen_looks, self._looked_at = 0, 0.0

    @property
    def stopped(self) -> bool:
        """True after a request to stop."""
        return self._signals.stopped

    @property
    def running(self) -> bool:
        return self._child is not None

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start the program. variables: changes of the environment."""
        self._child, self._read_to_end = Child(command, {**os.environ, **variables}), False
        self._stopped_by = set()
        self._selector.register(self._child.stderr, selectors.EVENT_READ)

    def send(self, signum: int) -> None:
        """Send a signal of the leader to the program, if it runs."""
        if self._child is not None:
            self._child.send(signum)
            self._stopped_by |= {signum} & {*STOPS}

    def poll(self) -> End | None:
        """Return the end of the program, once, or None.

        A program may die of the signal by which the leader stops it, because it does not handle signals in the first
        moments of its start. It then counts as stopped.
        """
        if self._child is None:
            return None
        if (code := self._child.poll()) is None:
            self._end_frozen(self._child)
            return None
        code = Preempted.exit_code if code - 128 in self._stopped_by else code
        if not self._read_to_end:
            self._selector.unregister(self._child.stderr)
        what, self._child = self._child.close(), None
        return End(self.index, self.name, code, what)

    def _end_frozen(self, child: Child) -> None:
        """Kill the program if it has been frozen for long."""
        now = time.monotonic()
        if now < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = now
        self._frozen_looks = self._frozen_looks + 1 if child.is_frozen() else 0
        if self._frozen_looks == FROZEN_LOOKS:
            self.say("the program is frozen, as by SIGSTOP: it is killed")
            child.send(signal.SIGKILL)

    def listen(self, connection: socket.socket, name: Any) -> None:
        """Let `wait` also wait for a connection."""
        self._selector.register(connection, selectors.EVENT_READ, name)

    def forget(self, connection: socket.socket) -> None:
        """Close a connection that `wait` waited for."""
        self._selector.unregister(connection)
        connection.close()

    def wait(self, seconds: float) -> list[Any]:
        """Wait for a connection, a signal or the program, and return the names of the connections to read.

        Signals and errors are passed on.
        """
        ready = []
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                ready.append(key.data)
            elif key.fileobj is self._signals.reader:
                for signum in self._signals.read():
                    if self._child is not None:
                        self._child.send(signum)
            elif self._child is not None and not self._child.pass_on():
                self._selector.unregister(key.fileobj)
                self._read_to_end = True
        return ready

    def say(self, text: str) -> None:
        print(f"supervise: {text}", file=sys.stderr, flush=True)
