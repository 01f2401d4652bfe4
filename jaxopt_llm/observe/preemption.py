"""Signals that request a stop: the first one stops the run after its step, a later one ends the process."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from jaxopt_llm.core.stop_signals import SIGNALS

# After the first signal, further ones are part of the same request for this time: SLURM and systemd signal the program
# itself, and its supervisor passes the same signal on.
TOGETHER_SECONDS = 0.25
_MESSAGE = b"\nstopping after this step; press Ctrl-C again to stop at once\n"


class Preemption:
    """Record of a signal that requests a stop. A context manager for the main thread.

    After TOGETHER_SECONDS, the next signal ends the process by the default action. On exit the old handlers are
    restored. SIGHUP is handled unless it is ignored, as nohup does.

    Python runs a handler only between two bytecodes of the main thread, which may wait for a device for long, or for
    ever. But Python writes the signal's number into a socket at once. A thread reads it there. So a second signal ends
    the process also then, unless the main thread holds the interpreter's lock.
    """

    def __init__(self) -> None:
        self._received: int | None = None  # the first signal
        self._before: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        return self._received is not None

    def pass_on(self) -> None:
        """Send this process the signal that it received, after the end of the context. Without one, do nothing.

        A stop that came when the run was about to end is for the rest of the program.
        """
        if self._received is not None:
            signal.raise_signal(self._received)

    def __enter__(self) -> "Preemption":
        global _entered
        # A shell starts background jobs with SIGINT ignored, but a signal that is sent to them is meant for them.
        caught = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {each: signal.signal(each, self._request) for each in caught}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._outer, _entered = _entered, self
        self._thread = threading.Thread(target=self._watch, args=(_find_set_action(),), name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        global _entered
        _entered = self._outer
        self._writer.shutdown(socket.SHUT_RDWR)  # a forked process may have it open, too
        self._thread.join()
        self._restore(self._fd_before)

    def leave_in_child(self) -> None:
        """Leave a process that was forked from this one: a signal to it is no request to this process."""
        self._restore(-1)

    def _restore(self, wakeup_fd: int) -> None:
        """Restore the handlers, and then the socket of whoever reads the signals' numbers."""
        for each, handler in self._before.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(wakeup_fd)
        self._writer.close()
        self._reader.close()

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self._received = self._received or signum

    def _watch(self, set_action: Callable[[int, None], object]) -> None:
        """Wait for the first signal, and some time after it let the next one end the process."""
        requests = list[int]()
        while not requests:
            received = self._reader.recv(64)
            if not received:
                return
            requests = [each for each in received if each in self._before]
        self._received = self._received or requests[0]
        if os.isatty(2):
            os.write(2, _MESSAGE)
        end = time.monotonic() + TOGETHER_SECONDS
        while (seconds := end - time.monotonic()) > 0:
            self._reader.settimeout(seconds)
            with contextlib.suppress(TimeoutError):
                if not self._reader.recv(64):
                    return
        for each in self._before:
            set_action(each, None)  # SIG_DFL is 0


def _find_set_action() -> Callable[[int, None], object]:
    """Return C's `signal`: Python's may be called only by the main thread."""
    found = ctypes.CDLL(None).signal
    found.argtypes, found.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_action: Callable[[int, None], object] = found
    return set_action


_entered: Preemption | None = None


def _leave_in_child() -> None:
    if _entered is not None:
        _entered.leave_in_child()


os.register_at_fork(after_in_child=_leave_in_child)
