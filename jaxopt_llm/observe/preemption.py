"""SIGTERM and SIGINT: the first asks the run to stop after its step, the second ends the process."""

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Whether a signal has asked the run to stop. A context manager, for the main thread; leaving it restores.

    Enter it after jax.distributed.initialize, which takes SIGTERM for itself.
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
        # The system's own action ends the process even while Python waits for a device, where no handler would run.
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if os.isatty(2):
            os.write(2, b"\nstopping after this step; once more to stop at once\n")  # print() is not reentrant
