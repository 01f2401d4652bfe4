"""Connection of a process to JAX's coordination service, through which the processes of a job find each other.

JAX aborts every process that loses the service. If the service ran in process 0, as JAX places it, a death of process 0
would abort all others before they could say why. It therefore has a process of its own (jax_service.py), which outlives
process 0 for as long as the others need to notice the death and to end with an exit code.
"""

import contextlib
import ctypes
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax._src.distributed import global_state  # neither it nor the client has a public name
from jaxlib import _jax

from jaxopt_llm.core.errors import ProcessMissing
from jaxopt_llm.distributed.launchers import Job

_SERVICE = Path(__file__).with_name("jax_service.py")


@contextlib.contextmanager
def run_service(job: Job, address: str, timeout_seconds: int) -> Iterator[None]:
    """Run the service beside process 0. Other processes do nothing.

    Args:
        address: host:port on which it listens.

    Raises:
        ProcessMissing: it did not start. The port is a free one, which another program may have taken since.
    """
    if job.index:
        yield
        return
    # -P: the folder of the script is no place to import modules from.
    program = [sys.executable, "-P", str(_SERVICE), address, str(job.processes), str(timeout_seconds)]
    with tempfile.TemporaryFile() as log:
        # A session of its own: Ctrl-C in the terminal is for process 0.
        child = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        assert child.stdout is not None
        try:
            if child.stdout.readline() != "ready\n":
                log.seek(0)
                reason = (log.read().decode(errors="replace").strip().splitlines() or ["it ended"])[-1]
                raise ProcessMissing(
                    f"distributed.coordinator={job.coordinator}: JAX's coordination service did not start on {address} "
                    f"({reason}); run again"
                )
            yield
        finally:
            child.kill()
            child.wait()


def connect(job: Job, address: str, timeout_seconds: int) -> None:
    """Connect this process to the service. Must run before JAX uses a backend."""
    jax.config.update("jax_enable_preemption_service", False)  # it would replace our SIGTERM handler
    # On CPUs two programs would run at the same time, and Gloo would mix up their messages.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    client = _jax.get_distributed_runtime_client(
        address,
        job.index,
        init_timeout=timeout_seconds,
        heartbeat_timeout=2 * timeout_seconds,  # JAX would abort, so the watch must come first
        shutdown_timeout=timeout_seconds,
        use_compression=True,
    )
    client.connect()
    global_state.client, global_state.coordinator_address = client, address
    global_state.process_id, global_state.num_processes = job.index, job.processes


def delay_aborts() -> None:
    """Let a thread that aborts this process sleep for 6 seconds first.

    If a process dies in a collective, native code of another one may call `abort()`: Gloo's does if it receives data of
    the wrong collective. The news of the death arrives at about the same time, and ends that process with an exit code
    and one line. So the thread that aborts sleeps first, while the other threads go on.

    The handler is libc's `sleep` itself, whose argument is then the number of the signal: SIGABRT is 6. Python code
    cannot run there. When the handler returns, `abort()` goes on, so that an abort never becomes a hang.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
