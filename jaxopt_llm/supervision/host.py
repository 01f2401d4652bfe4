"""One host, for its supervisor: signals to the supervisor, the program, and one place to wait for all of it.

The program has its own process group, its standard error is passed on, and it dies with its supervisor.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from jaxopt_llm.core.errors import InputError, Preempted
from jaxopt_llm.core.stop_signals import SIGNALS


class Signals:
    """Record of the signals that ask this process to stop. Also the end of a child wakes it.

    Attributes:
        reader: socket that can be read when a signal has come.
        stopped: whether a stop was ever requested.
    """

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self.stopped = False
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for each in (*SIGNALS, signal.SIGCHLD):
            if signal.getsignal(each) != signal.SIG_IGN or each == signal.SIGCHLD:  # nohup ignores SIGHUP
                signal.signal(each, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.stopped |= signum in SIGNALS

    def read(self) -> list[int]:
        """Return the requests to stop that have come since the last call."""
        try:
            return [number for number in self.reader.recv(4096) if number in SIGNALS]
        except BlockingIOError:
            return []


_TAIL_BYTES = 4096  # of standard error, for the last line
# Program that asks Linux to kill it when its parent dies (PR_SET_PDEATHSIG, which exec keeps), and becomes the command.
# Its parent may have died before it asked. A preexec_fn could do the same, but Python advises against it.
_DIES_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Child:
    """A running program.

    Its process group is its own, so that a terminal sends Ctrl-C to the supervisor only: a second signal would end the
    program without a checkpoint.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a program.

        Raises:
            InputError: the program cannot be started.
        """
        launcher = (sys.executable, "-I", "-S", "-c", _DIES_WITH_PARENT, str(os.getpid()))
        try:
            self._process = subprocess.Popen(
                [*launcher, *command], env=dict(environment), stderr=subprocess.PIPE, process_group=0
            )
        except OSError as error:
            raise InputError(f"supervise: {command[0]} cannot be started ({error})") from error
        assert self._process.stderr is not None
        self.stderr = self._process.stderr.fileno()
        os.set_blocking(self.stderr, False)
        self._tail = b""

    def send(self, signum: int) -> None:
        """Send a signal to the program and to the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, signum)

    def pass_on(self) -> bool:
        """Pass on what the program has written to standard error, and return whether more may come."""
        try:
            data = os.read(self.stderr, 65536)
        except BlockingIOError:
            return True
        with contextlib.suppress(OSError):  # nobody reads our standard error: the program goes on
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return bool(data)

    def is_frozen(self) -> bool:
        """Return whether the program is stopped by a signal such as SIGSTOP. Only Linux says so."""
        try:
            status = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def poll(self) -> int | None:
        """Return the exit code as a shell counts it, 128 + N after signal N, or None while the program runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def close(self) -> str:
        """Pass on the rest of standard error, and return its last line. Call it after the program has ended."""
        assert self._process.stderr is not None
        before = None
        while before != self._tail and self.pass_on():
            before = self._tail
        self._process.stderr.close()
        lines = self._tail.decode(errors="replace").split("\n")
        return next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "")


def describe_code(code: int) -> str:
    """Return the name of the signal that an exit code stands for, or the code."""
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return f"exit code {code}"


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
    """This host: a supervisor that waits for everything at one place, so that it needs no threads.

    Attributes:
        selector: the place. Connections in it have data, which `wait` returns.
    """

    def __init__(self, index: int) -> None:
        self.index, self.name = index, socket.gethostname()
        self._signals = Signals()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._signals.reader, selectors.EVENT_READ)
        self._child: Child | None = None
        self._read_to_end = False
        self._stopped_by = set[int]()  # signals that the leader has stopped the program with
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
        self.selector.register(self._child.stderr, selectors.EVENT_READ)

    def send(self, signum: int) -> None:
        """Send a signal of the leader to the program, if it runs."""
        if self._child is not None:
            self._child.send(signum)
            self._stopped_by |= {signum} & {*SIGNALS}

    def poll(self) -> End | None:
        """Return the end of the program, once, or None.

        A program may die of the leader's signal to stop, because it does not handle signals in the first
        moments of its start. It then counts as stopped.
        """
        if self._child is None:
            return None
        if (code := self._child.poll()) is None:
            self._end_frozen(self._child)
            return None
        code = Preempted.exit_code if code - 128 in self._stopped_by else code
        if not self._read_to_end:
            self.selector.unregister(self._child.stderr)
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
        self.selector.register(connection, selectors.EVENT_READ, name)

    def forget(self, connection: socket.socket) -> None:
        """Close a connection that `wait` waited for."""
        self.selector.unregister(connection)
        connection.close()

    def wait(self, seconds: float) -> list[Any]:
        """Wait for a connection, a signal or the program, and return the names of the connections to read.

        Signals and errors are passed on.
        """
        ready = []
        for key, _ in self.selector.select(seconds):
            if key.data is not None:
                ready.append(key.data)
            elif key.fileobj is self._signals.reader:
                for signum in self._signals.read():
                    if self._child is not None:
                        self._child.send(signum)
            elif self._child is not None and not self._child.pass_on():
                self.selector.unregister(key.fileobj)
                self._read_to_end = True
        return ready

    def say(self, text: str) -> None:
        print(f"supervise: {text}", file=sys.stderr, flush=True)
