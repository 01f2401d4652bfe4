"""Garbage for the ports of a host: the program that chaos_faults.py runs there.

    python chaos_ports.py ADDRESS :PORT
    python chaos_ports.py ADDRESS PROCESS

Until it is killed, it sends garbage to a port, or to all TCP ports on which a process and its children listen. Those of
a supervisor and its program are the ports of the leader, of the rendezvous, of JAX's coordination service and of the
collectives. It looks for ports again and again, since a job that starts again has others. Connections are left open.
"""

import contextlib
import itertools
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LISTENS = "0A"  # a state in /proc/PID/net/tcp
MOST_CONNECTIONS = 200  # open at a time
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # with which gRPC begins
TEXTS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"[" * 100000 + b"\n",
    b'{"a":' * 100000 + b"\n",
    HTTP2 + os.urandom(1000),
    HTTP2 + struct.pack(">IBI", 0xFFFFFF04, 0, 0),  # a frame of SETTINGS that never comes
    bytes(64),
    b"\xff" * 64,
    b"",
]


def list_family(process: int) -> Iterator[int]:
    """Yield a process and all that descend from it."""
    yield process
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            yield from list_family(int(child))


def list_sockets(process: int) -> set[str]:
    """Return the inodes of the sockets that a process has open."""
    found = set[str]()
    with contextlib.suppress(OSError):  # it has ended
        for path in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                link = os.readlink(path)
                if link.startswith("socket:["):
                    found.add(link.removeprefix("socket:[").removesuffix("]"))
    return found


def find_ports(process: int) -> set[int]:
    """Return the TCP ports on which a process and its descendants listen."""
    found = set[int]()
    for each in list_family(process):
        inodes = list_sockets(each)
        for name in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):  # it has ended
                for line in Path(f"/proc/{each}/net/{name}").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == LISTENS and words[9] in inodes:
                        found.add(int(words[1].rpartition(":")[2], 16))
    return found


def main() -> None:
    address, target = sys.argv[1:]
    connections: list[socket.socket] = []
    told = set[int]()
    for number in itertools.count():
        ports = {int(target[1:])} if target.startswith(":") else find_ports(int(target))
        for port in sorted(ports - told):
            print(f"garbage for port {port} of {address}", flush=True)
        told |= ports
        for port, host in itertools.product(sorted(ports), {address, "127.0.0.1"}):
            with contextlib.suppress(OSError):  # nobody listens there, or any more
                connections.append(socket.create_connection((host, port), timeout=1))
                connections[-1].sendall(TEXTS[(number + port) % len(TEXTS)])
        while len(connections) > MOST_CONNECTIONS:
            connections.pop(0).close()
        time.sleep(0.2)


if __name__ == "__main__":
    main()
