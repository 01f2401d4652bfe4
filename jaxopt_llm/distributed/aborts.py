"""Delay of aborts, so that the news of another process's death comes first.

If a process dies in a collective, native code of another one may end that with `abort()`, such as Gloo's, which then
receives data of the wrong collective. The news of the death arrives at about the same time, and would end it with an
exit code and one line. So the thread that aborts sleeps first, while the other threads go on.
"""

import ctypes
import signal


def delay_aborts() -> None:
    """Let a thread that aborts this process sleep for 6 seconds first.

    The handler is libc's `sleep` itself, whose argument is then the number of the signal: SIGABRT is 6. Python code
    cannot run there. When the handler returns, `abort()` goes on, so that an abort never becomes a hang.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
