"""Signals to a command or a script that has nothing to save: exit code 75, one line, and no traceback."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, start_python
from gates import finish, line_with

LINE = "preempted without a save; run again to continue\n"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def by_name(sent: signal.Signals) -> str:
    return sent.name


@pytest.mark.parametrize("sent", SIGNALS, ids=by_name)
@pytest.mark.parametrize(
    "command",
    [
        ("-m", "jaxopt_llm.train"),
        ("-m", "jaxopt_llm", "train"),
        ("-c", "from jaxopt_llm.__main__ import main; main()", "train"),  # as jaxopt-llm does
        ("-m", "jaxopt_llm.supervise"),
        ("-m", "jaxopt_llm", "supervise"),
    ],
    ids=" ".join,
)
def test_a_signal_during_the_first_import_ends_as_a_stop(
    command: tuple[str, ...], sent: signal.Signals, tmp_path: Path
) -> None:
    """Replace a module of Python's library that every command imports early: it sends the signal to its process."""
    (tmp_path / "argparse.py").write_text(f"import os\nos.kill(os.getpid(), {int(sent)})\n")
    process = start_python(*command, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert finish(process, 75)[1] == LINE


# Its argument: what main does.
SCRIPT = """
import ctypes, os, signal, sys, time
import jax.numpy as jnp
import jaxopt_llm

def wait(seconds=1000):
    print("waits", flush=True)
    time.sleep(seconds)

def sleeps():
    wait()

def initializes():
    jaxopt_llm.initialize(lambda: {"w": jnp.ones(2)}, lambda weights, batch: wait(), jnp.ones(2))

def is_stuck():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    wait(0)
    signal.alarm(30)
    libc.pthread_mutex_lock(mutex)  # for ever, in native code, as a collective of a process that is gone

def forks():
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"!")  # Python loses a signal that comes in the middle of a fork
        time.sleep(30)
        os._exit(1)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    time.sleep(0.2)

def has_a_handler():
    wait()

if sys.argv[1] == "has_a_handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
jaxopt_llm.run_job(globals()[sys.argv[1]])
"""


@pytest.mark.parametrize("sent", SIGNALS, ids=by_name)
@pytest.mark.parametrize("place", ["sleeps", "initializes", "is_stuck"])
def test_a_signal_ends_a_script_outside_of_fit(place: str, sent: signal.Signals) -> None:
    process = start_python("-c", SCRIPT, place)
    line_with("waits", process)
    process.send_signal(sent)
    assert finish(process, 75)[1] == LINE


def test_a_handler_of_the_script_stays() -> None:
    process = start_python("-c", SCRIPT, "has_a_handler")
    line_with("waits", process)
    process.send_signal(signal.SIGTERM)
    assert finish(process, 7)[1] == ""


@pytest.mark.skipif(sys.platform != "linux", reason="Python warns of forks elsewhere")
def test_a_signal_to_a_process_that_the_script_forks_does_not_end_the_script() -> None:
    stderr = finish(start_python("-c", SCRIPT, "forks"), 0)[1]
    assert LINE not in stderr


def test_a_script_that_runs_in_a_thread_is_refused() -> None:
    program = "import threading, jaxopt_llm; threading.Thread(target=jaxopt_llm.run_job, args=(print,)).start()"
    assert "error: run_job: it is called in a thread" in finish(start_python("-c", program), 0)[1]


def test_a_signal_ends_a_process_whose_terminal_is_gone() -> None:
    program = "import os; from jaxopt_llm.core import stop_signals; stop_signals.end_at_signals(); os.close(2); "
    done = subprocess.run([sys.executable, "-c", f"{program}os.kill(os.getpid(), 15); os._exit(1)"], cwd=ROOT)
    assert done.returncode == 75
