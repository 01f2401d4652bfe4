"""The supervisors of the other hosts, as the leader sees them."""

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxopt_llm.distributed.acceptor import ERROR_PAUSE_SECONDS, HELLO_SECONDS, MAX_WAITING
from jaxopt_llm.distributed.handshake import Hello, printable, read_hello
from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.supervision.host import End, Host
from jaxopt_llm.supervision.leader_address import (
    FILE,
    PULSE_SECONDS,
    SEND_SECONDS,
    SILENCE_SECONDS,
    LeaderAddress,
    find_leader,
)
from jaxopt_llm.supervision.signed_peer import SignedPeer

_LISTENER = "listener"


class Members:
    """Connections from the supervisors of other hosts, and what they have reported.

    Args:
        listener: where they arrive; None for a job of one host.
    """

    def __init__(
        self, host: Host, job: Job, listener: socket.socket | None = None, published: LeaderAddress | None = None
    ) -> None:
        self._host, self._job, self._listener, self._published = host, job, listener, published
        self._peers: dict[int, SignedPeer] = {}
        self._names: dict[int, str] = {}
        self._since: dict[int, float] = {}
        self._unknown: dict[SignedPeer, float] = {}  # connections that have not said who they are, and since when
        self._refusals: set[str] = set()  # those that were printed: a supervisor that is refused may come again
        self._ends: list[End] = []
        self._pulse = 0.0
        if listener is not None:
            host.listen(listener, _LISTENER)

    @property
    def program_token(self) -> str:
        """Token of the job's programs; "" for a job of one host."""
        return "" if self._published is None else self._published.program_token

    def indices(self) -> Sequence[int]:
        """Return the indices of the hosts that are there, without the leader's."""
        return list(self._peers)

    def seconds_here(self, index: int) -> float:
        return time.monotonic() - self._since[index]

    def address(self, index: int) -> str:
        """Return the address of a host, or of the leader."""
        if index == self._host.index:
            assert self._published is not None
            return self._published.host
        address: str = self._peers[index].connection.getpeername()[0]
        return address

    def send(self, index: int, message: dict[str, Any]) -> None:
        """Send a message to a host, if it is there."""
        if index in self._peers:
            self._peers[index].send(message)

    def give_up(self, index: int) -> None:
        """Count a host as lost. Its supervisor can join again when its program has ended."""
        if index in self._peers:
            self._lose(index, "has a program that cannot be killed")

    def dismiss(self, code: int) -> None:
        """Let all supervisors end with a code, and wait a moment until they have read it.

        A connection that is closed while messages in it are unread is reset, and what was sent before is lost.
        """
        for peer in self._peers.values():
            peer.send({"exit": code})
        deadline = time.monotonic() + SEND_SECONDS
        while self._peers and time.monotonic() < deadline:
            self.serve(0.2)

    def superseded(self, directory: Path) -> bool:
        """Return whether another supervisor has become the leader."""
        try:
            return self._published is not None and find_leader(directory) not in (None, self._published)
        except OSError:  # for example, no more files may be open: the next look shows it
            return False

    def close(self, directory: Path) -> None:
        """Withdraw the address. Supervisors that are still there look for another leader."""
        if self._published is not None and not self.superseded(directory):
            (directory / FILE).unlink(missing_ok=True)
        for peer in (*self._peers.values(), *self._unknown):
            self._host.forget(peer.connection)
        if self._listener is not None:
            self._host.forget(self._listener)

    def take_ends(self) -> list[End]:
        """Return the ends of programs, and the losses of hosts, since the last call."""
        ends, self._ends = self._ends, []
        return ends

    def serve(self, seconds: float) -> None:
        """Wait for messages, signals or the end of the leader's own program, and handle them."""
        for ready in self._host.wait(seconds):
            if ready == _LISTENER:
                self._accept()
            elif ready in self._unknown:
                self._meet(ready)
            else:
                self._receive(ready)
        now = time.monotonic()
        for peer in [each for each, since in self._unknown.items() if now > since + HELLO_SECONDS]:
            self._reject(peer)
        for index in [each for each, peer in self._peers.items() if now > peer.last_heard + SILENCE_SECONDS]:
            self._lose(index, f"has not answered for {SILENCE_SECONDS:g} s")
        if now > self._pulse + PULSE_SECONDS:
            self._pulse = now
            for peer in self._peers.values():
                peer.send()

    def _accept(self) -> None:
        """Accept a connection. If too many are unknown, the oldest gives way: a supervisor says at once who it is."""
        assert self._listener is not None and self._published is not None
        if len(self._unknown) == MAX_WAITING:
            self._reject(next(iter(self._unknown)))
        try:
            connection, _ = self._listener.accept()
        except OSError:  # for example, no more files may be open
            if self._unknown:
                self._reject(next(iter(self._unknown)))
            time.sleep(ERROR_PAUSE_SECONDS)
            return
        connection.settimeout(SEND_SECONDS)
        peer = SignedPeer(connection, self._published.token.encode())
        peer.greet()
        self._unknown[peer] = time.monotonic()
        self._host.listen(connection, peer)

    def _meet(self, peer: SignedPeer) -> None:
        """Read who has connected, and admit it as a member if it is a supervisor of another host of the job."""
        messages = _read(peer)
        if messages == []:
            return
        if messages is None:
            self._reject(peer)
            return
        try:
            hello = read_hello(messages[0])
        except ValueError as error:
            self._refuse(peer, f"a supervisor ({error}); correct --distributed.process-id of its host")
            return
        peer.their_nonce = hello.nonce
        who = f"host {hello.index} ({printable(hello.host)})"
        if hello.index >= self._job.processes:
            count = f"the job has {self._job.processes} host(s)"
            problem = f"{who}: {count}; correct --distributed.process-id there, or --distributed.processes everywhere"
            peer.send({"end": f"the leader refuses {problem}"})
            self._refuse(peer, problem)
        elif hello.index == self._host.index:  # without an answer: it tries again, as this one may end soon
            self._refuse(peer, f"{who}: the leader has this index, too; change --distributed.process-id of one of them")
        else:
            self._admit(peer, hello)

    def _admit(self, peer: SignedPeer, hello: Hello) -> None:
        index = hello.index
        if index in self._peers:
            self._lose(index, "has started again")
        del self._unknown[peer]
        self._peers[index], self._since[index] = peer, time.monotonic()
        self._names[index] = printable(hello.host)
        peer.send({"welcome": index})

    def _refuse(self, peer: SignedPeer, problem: str) -> None:
        """Close the connection of a supervisor that knows the token, and print why, once."""
        self._reject(peer)
        if problem not in self._refusals:
            self._refusals.add(problem)
            self._host.say(f"refuses {problem}")

    def _reject(self, peer: SignedPeer) -> None:
        del self._unknown[peer]
        self._host.forget(peer.connection)

    def _receive(self, peer: SignedPeer) -> None:
        index = next((each for each, known in self._peers.items() if known is peer), None)
        if index is None:  # it was lost by what was read before
            return
        messages = _read(peer)
        if messages is None:
            self._lose(index, "has lost its supervisor")
        for message in messages or ():
            if "ended" in message:
                self._ends.append(End(index, self._names[index], int(message["ended"]), printable(message["what"])))

    def _lose(self, index: int, symptom: str) -> None:
        peer = self._peers.pop(index)
        self._host.forget(peer.connection)
        self._ends.append(End(index, self._names[index], None, f"host {index} {symptom}"))


def _read(peer: SignedPeer) -> list[dict[str, Any]] | None:
    """Return the messages that have come; None at the end of the connection."""
    try:
        return peer.receive()
    except TimeoutError:
        return []
    except ValueError:
        return None
