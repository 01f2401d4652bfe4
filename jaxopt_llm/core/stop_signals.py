"""Signals that end a process at once: while it imports, reads its input or prepares, there is nothing to save.

This file imports nothing that takes time, so that a command can call it before its other imports.
"""

import _thread
import os
import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
EXIT_CODE = 75  # of a process that a signal has stopped
_MESSAGE = b"preempted without a save; run again to continue\n"

_process = 0  # the process that the signals end, and not one that it forks
_listens = False
_ending = _thread.allocate_lock()  # a handler and a thread may both notice a signal


def end_at_signals() -> None:
    """Let a signal end this process with the exit code of a stop, except while a `Preemption` is entered.

    Only the main thread may call it. A signal that was ignored when the process started, as nohup ignores SIGHUP, stays
    ignored. A signal for which the program has its own handler keeps it.
    """
    global _process
    _process = os.getpid()
    for each in SIGNALS:
        if signal.getsignal(each) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(each, _handle)


def listen() -> None:
    """Start a thread that ends the process at these signals also while the main thread waits in native code.

    Python runs a handler only between two bytecodes of the main thread, which may compile for minutes, or wait for
    another process. Call it after `end_at_signals`.
    """
    import socket  # not needed by the earliest calls of `end_at_signals`
    import threading

    global _listens
    if _listens:
        return
    _listens = True
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a signal to a forked process is not for us

    def wait() -> None:
        while writer.fileno() >= 0:  # always; this function holds the socket, which would close otherwise
            if any(signal.getsignal(number) is _handle for number in reader.recv(64)):
                _end()

    threading.Thread(target=wait, name="stop signals", daemon=True).start()


def _handle(signum: int, frame: FrameType | None) -> None:
    if os.getpid() == _process:
        _end()
    else:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _end() -> None:
    if _ending.acquire(blocking=False):
        try:
            os.write(2, _MESSAGE)  # print() is not reentrant
        finally:
            os._exit(EXIT_CODE)  # also if the terminal is gone
