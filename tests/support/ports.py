"""Free ports that no other program takes before a command listens on them."""

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO

_PORTS = range(20_000, 32_000)  # Linux assigns ephemeral ports from 32,768 on
_held: list[IO[str]] = []  # locks, held until this process ends


def free_address() -> str:
    """Return 127.0.0.1:port. No other test process gets this port while this process lives."""
    folder = Path(tempfile.gettempdir()) / f"jaxopt_llm-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    first = os.getpid() * 97 + len(_held)
    for number in range(len(_PORTS)):
        port = _PORTS[(first + number) % len(_PORTS)]
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            lock.close()
            continue
        _held.append(lock)
        return f"127.0.0.1:{port}"
    raise RuntimeError(f"no port of {_PORTS} is free")
