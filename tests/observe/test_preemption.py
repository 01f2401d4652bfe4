"""Effects of signals, tested within this process."""

import signal
import subprocess
import sys
import time

import pytest

from jaxopt_llm.observe.preemption import Preemption

BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("sent", BOTH, ids=lambda sent: sent.name)
def test_the_first_signal_is_recorded_and_the_second_ends_the_process(sent: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in BOTH}
    with Preemption() as preemption:
        assert signal.getsignal(sent) is not before[sent]
        assert not preemption.requested()
        signal.raise_signal(sent)
        assert preemption.requested()
        assert [signal.getsignal(each) for each in BOTH] == [signal.SIG_DFL] * 2
    assert {each: signal.getsignal(each) for each in BOTH} == before


# The main thread waits in C for a lock that is never released, as for a device that never answers: no handler runs.
STUCK = """
import ctypes, threading, time
from jaxopt_llm.observe.preemption import Preemption

def tell(preemption):
    while not preemption.requested():
        time.sleep(0.01)
    print("requested", flush=True)

libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
with Preemption() as preemption:
    threading.Thread(target=tell, args=(preemption,), daemon=True).start()
    libc.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("sent", BOTH, ids=lambda sent: sent.name)
def test_the_second_signal_ends_a_process_that_is_stuck(sent: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for told in ("stuck", "requested"):
            assert process.stdout.readline().strip() == told
            process.send_signal(sent)
        assert process.wait(30) == -sent


def test_signals_of_others_are_not_requests() -> None:
    before = signal.signal(signal.SIGUSR2, lambda signum, frame: None)
    try:
        with Preemption() as preemption:
            signal.raise_signal(signal.SIGUSR2)
            time.sleep(0.1)
            assert not preemption.requested()
    finally:
        signal.signal(signal.SIGUSR2, before)
