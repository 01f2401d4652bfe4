"""The hosts of a job as its leader sees them, and the leader's address, where the supervisors find each other.

The address is a file in the run directory. It has host and port, and a token that the leader draws when it begins to
lead. A supervisor and the leader prove to each other that they know
the token (distributed/wire.py), so only those who can read the file can join or lead.
"""

import contextlib
import hmac
import json
import math
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed import wire
from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.distributed.wire import Arrival, Entrance, Hello, Peer, printable
from jaxopt_llm.supervision.host import End, Host
from jaxopt_llm.supervision.task import Place, Task

FILE = "supervisors"
SILENCE_SECONDS = 60.0  # after which a host counts as lost
PULSE_SECONDS = 5.0  # between two signs of life
CONNECT_SECONDS = 5.0


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
        messages: messages that the leader has sent already.
    """

    leader: Peer
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
    """Return the leader's address in the run directory, None if it has none. Perhaps nobody listens there any more."""
    try:
        return LeaderAddress(**json_files.parse((directory / FILE).read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # not written yet, or only in part
        return None


def join_leader(published: LeaderAddress, job: Job) -> Membership | None:
    """Join the supervisors of a job. Return None if its leader does not listen at the address.

    Raises:
        TimeoutError: the leader may listen there, but does not answer now.
        InputError: the leader refuses this host.
    """
    try:
        connection = wire.connect((published.host, published.port), CONNECT_SECONDS)
    except OSError:
        return None
    with contextlib.ExitStack() as unless_joined:
        unless_joined.enter_context(connection)
        leader = Peer(connection, published.token.encode())
        hello = Hello(job.index, job.processes, socket.gethostname(), {})
        try:
            answers = leader.introduce(hello, time.monotonic() + wire.HELLO_SECONDS)
        except ValueError:  # another program has got the port of a leader that has ended
            return None
        if answers is None:
            raise TimeoutError("the connection was closed")
        if "end" in answers[0]:
            raise InputError(f"supervise: {printable(answers[0]['end'])}")
        connection.settimeout(wire.SEND_SECONDS)
        unless_joined.pop_all()
        return Membership(leader, published.program_token, answers[1:])


@dataclass(frozen=True)
class _Member:
    """The supervisor of another host. since: time at which it came."""

    peer: Peer
    host: str
    since: float


def obey(message: dict[str, Any], host: Host, task: Task, program_token: str) -> None:
    """Start the program on this host, or send it a signal, as the leader says."""
    if "start" in message:
        place = Place.parse(message["start"])
        host.start(task.command(place), task.variables(place, program_token))
    elif "signal" in message:
        host.send(message["signal"])


class Members:
    """The hosts of a job: the leader's own one, and the others, whose supervisors are connected to it.

    Args:
        host: the leader's own one.
        listener: where the others arrive; None for a job of one host.
    """

    def __init__(
        self, host: Host, task: Task, listener: socket.socket | None = None, published: LeaderAddress | None = None
    ) -> None:
        self._host, self._task, self._published = host, task, published
        self._own_is_stuck = False  # the program on the leader's host cannot be killed
        self._members: dict[int, _Member] = {}
        self._refusals: set[str] = set()  # those that were printed: a supervisor that is refused may come again
        self._ends: list[End] = []
        self._pulse = 0.0
        self._entrance: Entrance | None = None
        if listener is not None and published is not None:
            self._entrance = Entrance(listener, published.token.encode(), host.selector)

    def indices(self) -> list[int]:
        """Return the indices of the hosts that can take part in a round."""
        own = () if self._own_is_stuck else (self._host.index,)
        return sorted((*own, *self._members))

    def seconds_here(self, index: int) -> float:
        return math.inf if index == self._host.index else time.monotonic() - self._members[index].since

    def address(self, index: int) -> str:
        """Return the address of a host."""
        if index == self._host.index:
            assert self._published is not None
            return self._published.host
        address: str = self._members[index].peer.connection.getpeername()[0]
        return address

    def send(self, index: int, message: dict[str, Any]) -> None:
        """Send a message to a host, if it is there."""
        if index == self._host.index:
            obey(message, self._host, self._task, "" if self._published is None else self._published.program_token)
        elif index in self._members:
            self._members[index].peer.send(message)

    def give_up(self, index: int) -> None:
        """Count a host as lost until its program has ended."""
        if index == self._host.index:
            self._own_is_stuck = True
            self._ends.append(End(index, self._host.name, None, "its program cannot be killed"))
        elif index in self._members:
            self._lose(index, "has a program that cannot be killed")

    def dismiss(self, code: int) -> None:
        """Let all supervisors end with a code, and wait a moment until they have read it.

        A connection that is closed while messages in it are unread is reset, and what was sent before is lost.
        """
        for member in self._members.values():
            member.peer.send({"exit": code})
        deadline = time.monotonic() + wire.SEND_SECONDS
        while self._members and time.monotonic() < deadline:
            self.serve(0.2)

    def superseded(self) -> bool:
        """Return whether another supervisor has become the leader."""
        try:
            return self._published is not None and find_leader(self._task.directory) not in (None, self._published)
        except OSError:  # for example, no more files may be open: the next look shows it
            return False

    def close(self) -> None:
        """Withdraw the address. Supervisors that are still there look for another leader."""
        if self._published is not None and not self.superseded():
            (self._task.directory / FILE).unlink(missing_ok=True)
        for member in self._members.values():
            self._host.forget(member.peer.connection)
        if self._entrance is not None:
            self._entrance.close()

    def take_ends(self) -> list[End]:
        """Return the ends of programs, and the losses of hosts, since the last call."""
        if (own := self._host.poll()) is not None:
            self._own_is_stuck = False
            self._ends.append(own)
        ends, self._ends = self._ends, []
        return ends

    def serve(self, seconds: float) -> None:
        """Wait for messages, signals or the end of the leader's own program, and handle them."""
        ready = self._host.wait(seconds)
        for index in [index for index, member in self._members.items() if member.peer in ready]:
            self._receive(index)
        if self._entrance is not None:
            for arrival in self._entrance.handle(ready):
                self._meet(arrival)
        now = time.monotonic()
        for index, member in [*self._members.items()]:
            if now > member.peer.last_heard + SILENCE_SECONDS:
                self._lose(index, f"has not answered for {SILENCE_SECONDS:g} s")
        if now > self._pulse + PULSE_SECONDS:
            self._pulse = now
            for member in self._members.values():
                member.peer.send()

    def _meet(self, arrival: Arrival) -> None:
        """Admit the supervisor of another host of the job as a member."""
        peer, hello = arrival
        index, who = hello.index, f"host {hello.index} ({printable(hello.host)})"
        if index >= self._task.job.processes:
            count = f"the job has {self._task.job.processes} host(s)"
            problem = f"{who}: {count}; correct --distributed.process-id there, or --distributed.processes everywhere"
            peer.send({"end": f"the leader refuses {problem}"})
            self._refuse(peer, problem)
        elif index == self._host.index:  # without an answer: it tries again, as this one may end soon
            self._refuse(peer, f"{who}: the leader has this index, too; change --distributed.process-id of one of them")
        else:
            if index in self._members:
                self._lose(index, "has started again")
            self._members[index] = _Member(peer, printable(hello.host), time.monotonic())
            peer.send({"welcome": index})

    def _refuse(self, peer: Peer, problem: str) -> None:
        """Close the connection of a supervisor that knows the token, and print why, once."""
        self._host.forget(peer.connection)
        if problem not in self._refusals:
            self._refusals.add(problem)
            self._host.say(f"refuses {problem}")

    def _receive(self, index: int) -> None:
        """Read the messages of a member, and handle them."""
        member = self._members[index]
        messages = member.peer.poll()
        if messages is None:
            self._lose(index, "has lost its supervisor")
        for message in messages or ():
            if "ended" in message:
                self._ends.append(End(index, member.host, int(message["ended"]), printable(message["what"])))

    def _lose(self, index: int, symptom: str) -> None:
        member = self._members.pop(index)
        self._host.forget(member.peer.connection)
        self._ends.append(End(index, member.host, None, f"host {index} {symptom}"))
