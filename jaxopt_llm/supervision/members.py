"""The supervisors of the other hosts, as the leader sees them."""

import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxopt_llm.distributed.peer import Peer
from jaxopt_llm.supervision.host import End, Host
from jaxopt_llm.supervision.leader_address import (
    FILE,
    PULSE_SECONDS,
    SEND_SECONDS,
    SILENCE_SECONDS,
    LeaderAddress,
    find_leader,
)

_HELLO_SECONDS = 5.0  # time that a new connection has for its first message
_LISTENER = "listener"


class Members:
    """Connections from the supervisors of other hosts, and what they have reported.

    Args:
        listener: where they arrive; None for a job of one host.
    """

    def __init__(
        self, host: Host, listener: socket.socket | None = None, published: LeaderAddress | None = None
    ) -> None:
        self._host, self._listener, self._published = host, listener, published
        self._peers: dict[int, Peer] = {}
        self._names: dict[int, str] = {}
        self._since: dict[int, float] = {}
        self._unknown: dict[Peer, float] = {}  # connections that have not said who they are, and since when
        self._ends: list[End] = []
        self._pulse = 0.0
        if listener is not None:
            host.listen(listener, _LISTENER)

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
        return self._published is not None and find_leader(directory) not in (None, self._published)

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
                self._greet(ready)
            else:
                self._receive(ready)
        now = time.monotonic()
        for peer in [each for each, since in self._unknown.items() if now > since + _HELLO_SECONDS]:
            self._reject(peer)
        for index in [each for each, peer in self._peers.items() if now > peer.last_heard + SILENCE_SECONDS]:
            self._lose(index, f"has not answered for {SILENCE_SECONDS:g} s")
        if now > self._pulse + PULSE_SECONDS:
            self._pulse = now
            for peer in self._peers.values():
                peer.send()

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        connection.settimeout(SEND_SECONDS)
        peer = Peer(connection)
        self._unknown[peer] = time.monotonic()
        self._host.listen(connection, peer)

    def _greet(self, peer: Peer) -> None:
        """Read who has connected, and admit it as a member if it knows the token."""
        messages = _read(peer)
        if messages == []:
            return
        hello = messages[0] if messages else {}
        index = hello.get("join")
        assert self._published is not None
        if not isinstance(index, int) or index == self._host.index or not self._published.admits(hello.get("token")):
            self._reject(peer)
            return
        if index in self._peers:
            self._lose(index, "has started again")
        del self._unknown[peer]
        self._peers[index], self._since[index] = peer, time.monotonic()
        self._names[index] = str(hello.get("host"))

    def _reject(self, peer: Peer) -> None:
        del self._unknown[peer]
        self._host.forget(peer.connection)

    def _receive(self, peer: Peer) -> None:
        index = next((each for each, known in self._peers.items() if known is peer), None)
        if index is None:  # it was lost by what was read before
            return
        messages = _read(peer)
        if messages is None:
            self._lose(index, "has lost its supervisor")
        for message in messages or ():
            if "ended" in message:
                self._ends.append(End(index, self._names[index], int(message["ended"]), str(message["what"])))

    def _lose(self, index: int, symptom: str) -> None:
        peer = self._peers.pop(index)
        self._host.forget(peer.connection)
        self._ends.append(End(index, self._names[index], None, f"host {index} {symptom}"))


def _read(peer: Peer) -> list[dict[str, Any]] | None:
    """Return the messages that have come; None at the end of the connection."""
    try:
        return peer.receive()
    except TimeoutError:
        return []
    except ValueError:
        return None
