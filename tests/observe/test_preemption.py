"""Effects of signals, tested within this process."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jaxopt_llm.observe import preemption
from jaxopt_llm.observe.preemption import Preemption

BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("sent", BOTH, ids=lambda sent: sent.name)
def test_the_first_signal_is_recorded(sent: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in BOTH}
    with Preemption() as signals:
        assert signal.getsignal(sent) is not before[sent]
        assert not signals.requested()
        signal.raise_signal(sent)
        assert signals.requested()
    assert {each: signal.getsignal(each) for each in BOTH} == before


def test_signals_at_the_same_time_are_one_request() -> None:
    with Preemption() as signals:
        for _ in range(5):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.02)
        assert signals.requested()


# The main thread waits in C for a lock that is never released, as for a device that never answers: no handler runs.
STUCK = """
import ctypes, threading, time
from jaxopt_llm.observe import preemption

def tell(signals):
    while not signals.requested():
        time.sleep(0.01)
    print("requested", flush=True)

preemption.TOGETHER_SECONDS = 0.1
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
with preemption.Preemption() as signals:
    threading.Thread(target=tell, args=(signals,), daemon=True).start()
    libc.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("sent", BOTH, ids=lambda sent: sent.name)
def test_a_later_signal_ends_a_process_that_is_stuck(sent: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for told in ("stuck", "requested"):
            assert process.stdout.readline().strip() == told
            process.send_signal(sent)
        for _ in range(100):
            if process.poll() is None:
                time.sleep(0.2)
                process.send_signal(sent)
        process.kill()
        assert process.returncode == -sent


def test_signals_of_others_are_not_requests() -> None:
    before = signal.signal(signal.SIGUSR2, lambda signum, frame: None)
    try:
        with Preemption() as signals:
            signal.raise_signal(signal.SIGUSR2)
            time.sleep(0.1)
            assert not signals.requested()
    finally:
        signal.signal(signal.SIGUSR2, before)


def start_sleeping() -> int:
    """Fork a process that sleeps, and wait until it does. Return its id."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"!")
        time.sleep(60)
        os._exit(1)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return child


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_signal_to_a_forked_process_is_no_request() -> None:
    """Check also that a forked process that lives on does not keep the context from its end."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Preemption() as signals:
            child, living = start_sleeping(), start_sleeping()
            os.kill(child, signal.SIGTERM)
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
            time.sleep(0.1)
            assert not signals.requested()
        os.kill(living, signal.SIGKILL)
        os.waitpid(living, 0)
        assert preemption._entered is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stop_that_came_too_late_is_passed_on() -> None:
    received = list[int]()
    before = signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
    try:
        with Preemption() as signals:
            signal.raise_signal(signal.SIGTERM)
            signals.requested()
        assert not received
        signals.pass_on()
        assert received == [signal.SIGTERM]
        with Preemption() as signals:
            pass
        signals.pass_on()
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
