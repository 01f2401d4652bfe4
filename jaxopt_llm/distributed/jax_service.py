"""JAX's coordination service in a process of its own. Run as a script, without this package and without most of JAX.

    python jax_service.py HOST:PORT PROCESSES TIMEOUT_SECONDS

It prints "ready" when it listens. It runs until standard input ends, which is when process 0 ends, and a short time
longer.
"""

import os
import sys
import time

from jaxlib import _jax  # the rest of JAX takes a second to import

GRACE_SECONDS = 10  # in which the other processes notice the death of process 0, and end


def serve(address: str, processes: int, timeout_seconds: int) -> None:
    """Run the service.

    Args:
        timeout_seconds: time for processes to connect and to disconnect. One without a heartbeat for twice as long is
            lost to JAX, which then aborts the others: the watch of each process must notice it first.
    """
    _service = _jax.get_distributed_runtime_service(
        address, processes, heartbeat_timeout=2 * timeout_seconds, shutdown_timeout=timeout_seconds
    )
    print("ready", flush=True)
    sys.stdin.read()
    time.sleep(GRACE_SECONDS)
    os._exit(0)  # a service that is deleted waits for its processes to disconnect


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
