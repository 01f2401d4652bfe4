"""Aborts of native code: they wait for the news of a death."""

import signal
import subprocess
import sys
import time

# An abort without the GIL, as by a thread of Gloo.
PROGRAM = """
import ctypes, os, sys, threading, time
from jaxopt_llm.distributed import connection
connection.delay_aborts()
def end():
    time.sleep(float(sys.argv[1]))
    os._exit(5)
threading.Thread(target=end, daemon=True).start()
ctypes.CDLL(None).abort()
"""


def run(after: float) -> tuple[int, float]:
    """Return the exit code, and the seconds, of a program that aborts and that another thread ends later."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(after)])
    return done.returncode, time.monotonic() - began


def test_a_thread_that_ends_the_process_wins_against_one_that_aborts() -> None:
    assert run(after=0.5)[0] == 5


def test_an_abort_goes_on_after_six_seconds() -> None:
    code, seconds = run(after=60)
    assert code == -signal.SIGABRT and 6 <= seconds < 30
