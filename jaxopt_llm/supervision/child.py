"""The supervised program: it has its own process group, its errors are passed on, and it dies with its supervisor."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxopt_llm.core.errors import InputError

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
