"""Address of the leader of a job's supervisors: a file in the run directory, by which they find each other.

The file has the address of the leader, and a token that the others must know: only those who can read the directory can
join.
"""

import hmac
import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed.peer import Peer

FILE = "supervisors"
SILENCE_SECONDS = 60.0  # after which a host counts as lost
PULSE_SECONDS = 5.0  # between two signs of life
CONNECT_SECONDS = 5.0
SEND_SECONDS = 5.0


@dataclass(frozen=True)
class LeaderAddress:
    """Address at which the leader listens to the other supervisors."""

    host: str
    port: int
    token: str

    def admits(self, token: object) -> bool:
        return isinstance(token, str) and hmac.compare_digest(token.encode(), self.token.encode())


def publish_leader(directory: Path, host: str) -> tuple[socket.socket, LeaderAddress]:
    """Listen on an address of this host, and write it into the run directory.

    Raises:
        InputError: the address is not one of this host.
    """
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=128)
    except OSError as error:
        problem = f"supervise: this host cannot listen on its address {host} ({error})"
        raise InputError(f"{problem}; set --distributed.coordinator to an address of process 0") from error
    published = LeaderAddress(host, listener.getsockname()[1], secrets.token_hex(16))
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f"{FILE}.{os.getpid()}"
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(published), file)
    temporary.replace(directory / FILE)
    return listener, published


def find_leader(directory: Path) -> LeaderAddress | None:
    """Return the leader's address in the run directory, at which perhaps nobody listens any more; None: it has none."""
    try:
        return LeaderAddress(**json_files.parse((directory / FILE).read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # not written yet, or only in part
        return None


def join_leader(published: LeaderAddress, index: int) -> Peer | None:
    """Return a connection to the leader; None: nobody listens there."""
    try:
        connection = socket.create_connection((published.host, published.port), timeout=CONNECT_SECONDS)
    except OSError:
        return None
    if connection.getsockname() == connection.getpeername():  # TCP has connected the port with itself: nobody listens
        connection.close()
        return None
    connection.settimeout(SEND_SECONDS)
    peer = Peer(connection)
    peer.send({"join": index, "host": socket.gethostname(), "token": published.token})
    return peer
