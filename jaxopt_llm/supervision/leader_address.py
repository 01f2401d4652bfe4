"""Address of the leader of a job's supervisors: a file in the run directory, by which they find each other.

The file has the address of the leader, and a token that it draws when it begins to lead. A supervisor and the leader
prove to each other that they know the token (signed_peer.py), so only those who can read the file can join or lead.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed.acceptor import HELLO_SECONDS
from jaxopt_llm.distributed.handshake import Hello, printable
from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.distributed.peer import Peer
from jaxopt_llm.supervision.signed_peer import SignedPeer

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

    @property
    def program_token(self) -> str:
        """Token of the programs of the job. All supervisors derive it, so that it is never sent."""
        return hmac.new(self.token.encode(), b"programs", "sha256").hexdigest()


@dataclass(frozen=True)
class Membership:
    """Place among the supervisors of a job.

    Attributes:
        program_token: token of the programs of the job.
        messages: those that the leader has sent already.
    """

    leader: SignedPeer
    program_token: str
    messages: list[dict[str, Any]]


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


def join_leader(published: LeaderAddress, job: Job) -> Membership | None:
    """Join the supervisors of a job; None: its leader does not listen there.

    Raises:
        TimeoutError: perhaps it does, but it does not answer now.
        InputError: it refuses this host.
    """
    try:
        connection = socket.create_connection((published.host, published.port), timeout=CONNECT_SECONDS)
    except OSError:
        return None
    with contextlib.ExitStack() as unless_joined:
        unless_joined.enter_context(connection)
        if connection.getsockname() == connection.getpeername():  # TCP has connected the port with itself
            return None
        deadline = time.monotonic() + HELLO_SECONDS
        try:
            (greeting,) = _check_open(Peer(connection).receive_some(deadline))
            leader = SignedPeer(connection, published.token.encode(), str(greeting["nonce"]))
            leader.send(asdict(Hello(job.index, job.processes, socket.gethostname(), {}, leader.nonce)))
            answer, *messages = _check_open(leader.receive_some(deadline))
        except (ValueError, KeyError):  # another program has got the port of a leader that has ended
            return None
        if "end" in answer:
            raise InputError(f"supervise: {printable(answer['end'])}")
        connection.settimeout(SEND_SECONDS)
        unless_joined.pop_all()
        return Membership(leader, published.program_token, messages)


def _check_open(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if messages is None:
        raise TimeoutError("the connection was closed")
    return messages
