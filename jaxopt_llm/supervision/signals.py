"""Signals to the supervisor, which it waits for together with its connections and its child."""

import signal
import socket
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
        for each in (*STOPS, signal.SIGCHLD):
            if signal.getsignal(each) != signal.SIG_IGN or each == signal.SIGCHLD:  # nohup ignores SIGHUP
                signal.signal(each, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.stopped |= signum in STOPS

    def read(self) -> list[int]:
        """Return the requests to stop that have come since the last call."""
        try:
            return [number for number in self.reader.recv(4096) if number in STOPS]
        except BlockingIOError:
            return []
