"""Start and end of JAX's coordination service, which outlives the connection of every process, and late aborts."""

import signal
import socket
import subprocess
import sys
import time

import pytest
from commands import start_python
from gates import finish
from ports import free_address

from jaxopt_llm.core.errors import ProcessMissing
from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.distributed.process_group import run_service

# JAX aborts a process whose service closes the connection while the process still leaves it.
PROGRAM = """
import socket, sys, time
import jax
from jax._src.distributed import global_state
from jaxopt_llm.config import DistributedConfig
from jaxopt_llm.distributed import process_group
from jaxopt_llm.distributed.launchers import Job

address, index = sys.argv[1:]
shutdown = jax.distributed.shutdown

def shut_down_and_look():
    host, port = global_state.coordinator_address.rsplit(":", 1)
    shutdown()
    if index == "1":
        time.sleep(1)  # in which process 0 goes on
        socket.create_connection((host, int(port)), timeout=5).close()

jax.distributed.shutdown = shut_down_and_look
with process_group.join_job(Job(address, 2, int(index)), DistributedConfig(), {}):
    pass
"""


def test_the_service_ends_after_all_processes_have_left() -> None:
    address = free_address()
    processes = [start_python("-c", PROGRAM, address, str(index)) for index in range(2)]
    for process in processes:
        finish(process)
        assert process.returncode == 0


def test_a_service_that_does_not_start_is_no_wrong_input() -> None:
    """Another program may have taken its port, so that a restart helps."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        expected = pytest.raises(ProcessMissing, match=f"JAX's coordination service did not start on {address}")
        with expected, run_service(Job(address, 2, 0), address, 5):
            pytest.fail("it runs on a port in use")


# An abort without the GIL, as by a thread of Gloo.
ABORTS = """
import ctypes, os, sys, threading, time
from jaxopt_llm.distributed import process_group
process_group.delay_aborts()
def end():
    time.sleep(float(sys.argv[1]))
    os._exit(5)
threading.Thread(target=end, daemon=True).start()
ctypes.CDLL(None).abort()
"""


def run_abort(after: float) -> tuple[int, float]:
    """Return the exit code, and the seconds, of a program that aborts and that another thread ends later."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", ABORTS, str(after)])
    return done.returncode, time.monotonic() - began


def test_a_thread_that_ends_the_process_wins_against_one_that_aborts() -> None:
    assert run_abort(after=0.5)[0] == 5


def test_an_abort_goes_on_after_six_seconds() -> None:
    code, seconds = run_abort(after=60)
    assert code == -signal.SIGABRT and 6 <= seconds < 30
