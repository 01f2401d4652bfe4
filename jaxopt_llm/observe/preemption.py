"""Signals that request a stop: the first one stops the run after its step, the second ends the process."""

import ctypes
import os
import signal
import socket
import threading
from types import FrameType

from jaxopt_llm.core.errors import Preempted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MESSAGE = b"\nstopping after this step; press Ctrl-C again to stop at once\n"


def end_at_signals() -> None:
    """Let a signal end this process with the exit code of a stop, until a `Preemption` is entered.

    It is for the imports and the checks before a run, when there is nothing to save. A signal that was ignored when the
    process started, as nohup ignores SIGHUP, stays ignored.
    """
    for each in SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, _end)


def _end(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"preempted before the first step; run again to start\n")  # print() is not reentrant
    os._exit(Preempted.exit_code)


class Preemption:
    """Record of a signal that requests a stop. A context manager for the main thread.

    On exit it restores the old handlers. SIGHUP is handled unless it is ignored, as nohup does.

    Python runs a handler only between two bytecodes of the main thread, which may wait for a device for long, or for
    ever. But it writes the signal's number into a socket at once. A thread reads it, so that a second signal ends the
    process even then.
    """

    def __init__(self) -> None:
        self._requested = False

    def requested(self) -> bool:
        return self._requested

    def __enter__(self) -> "Preemption":
        # A shell starts background jobs with SIGINT ignored, but a signal that is sent to them is meant for them.
        caught = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {each: signal.signal(each, self._request) for each in caught}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._fd_before)
        self._writer.close()
        self._thread.join()
        self._reader.close()
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self._requested = True
        # By the default action, the next signal ends the process at once.
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)

    def _watch(self) -> None:
        """Wait for the first signal, and let the next one end the process."""
        while received := self._reader.recv(64):
            if self._before.keys().isdisjoint(received):
                continue  # a signal of somebody else
            for each in self._before:
                _restore_default_action(each)
            self._requested = True
            if os.isatty(2):
                os.write(2, _MESSAGE)
            return


def _restore_default_action(signum: int) -> None:
    """Set the default action of a signal. Only the main thread may call `signal.signal`."""
    set_action = ctypes.CDLL(None).signal
    set_action.argtypes, set_action.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_action(signum, None)  # SIG_DFL is 0
