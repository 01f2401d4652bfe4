"""Handling of SIGTERM and SIGINT: the first signal stops the run after its step, the second ends the process."""

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Record of a signal that requests a stop. A context manager for the main thread.

    On exit it restores the old handlers. Enter it after jax.distributed.initialize, which installs its own handler of
    SIGTERM.
    """

    def __init__(self) -> None:
        self._requested = False

    def requested(self) -> bool:
        return self._requested

    def __enter__(self) -> "Preemption":
        self._before = {each: signal.signal(each, self._request) for each in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self._requested = True
        # The default action ends the process even while Python waits for a device. A Python handler would not run then.
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if os.isatty(2):
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")  # print() is not reentrant
