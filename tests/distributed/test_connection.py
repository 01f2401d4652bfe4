"""JAX's coordination service at the end of a job: it outlives the connection of every process."""

from commands import start_python
from gates import finish
from ports import free_address

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
