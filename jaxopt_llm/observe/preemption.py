"""Signals that request a stop: the first one stops the run after its step, the second ends the process."""

import os
import signal
from types import FrameType

from jaxopt_llm.core.errors import Preempted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
    """

    def __init__(self) -> None:
        self._requested = False

    def requested(self) -> bool:
        return self._requested

    def __enter__(self) -> "Preemption":
        # A shell starts background jobs with SIGINT ignored, but a signal that is sent to them is meant for them.
        caught = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {each: signal.signal(each, self._request) for each in caught}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self._requested = True
        # The default action ends the process even while Python waits for a device. A Python handler would not run then.
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        if os.isatty(2):
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")  # print() is not reentrant
