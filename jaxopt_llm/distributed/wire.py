"""Messages between the processes of a job: one protocol for the programs (rendezvous.py) and their supervisors.

A connection carries lines. The first line of each end is its nonce. Each further line is a message in JSON, after a
proof that its sender knows the token of the job, a secret that all processes share: the sender signs its own role, the
number of the message, the nonce of the other end and the message (HMAC-SHA256, RFC 2104). So a message that is changed,
repeated, sent back, or sent on another connection is not accepted, and not even parsed. The token is never sent.
Messages are not encrypted. Without a token, the key is empty, and whoever reaches the port may speak.

An empty line is a sign of life. It is not signed.
"""

import contextlib
import hmac
import json
import re
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from jaxopt_llm.core import json_files

TOKEN_VARIABLE = "JAXOPT_LLM_TOKEN"
HELLO_SECONDS = 5.0  # time that a new connection has for its first message
SEND_SECONDS = 5.0  # after which an end that reads nothing is not waited for
MAX_WAITING = 256  # connections whose first message is waited for at the same time
_ERROR_PAUSE_SECONDS = 0.1  # after an error of accept, which may come back at once
_MAX_MESSAGE_BYTES = 2**20
_MAX_PROCESSES = 2**20
_LONGEST_TEXT = 1000  # characters of another process's text in a message to the user


def read_token(environment: Mapping[str, str]) -> bytes:
    """Return the token of the job; empty without one."""
    return environment.get(TOKEN_VARIABLE, "").strip().encode()


class NotTrustedError(ValueError):
    """The sender of a message does not know the token."""


@dataclass(frozen=True)
class Hello:
    """First message of a process, which says who it is.

    Attributes:
        processes: number of processes of its job.
        facts: values that must be equal in all processes, by name.
    """

    index: int
    processes: int
    host: str
    facts: dict[str, Any]

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> "Hello":
        """Return the hello in a message.

        Raises:
            ValueError: it is no hello, or its numbers are out of range.
        """
        kinds = {"index": int, "processes": int, "host": str, "facts": dict}
        if any(type(message.get(name)) is not kind for name, kind in kinds.items()):
            raise ValueError("not a hello")
        hello = cls(**{name: message[name] for name in kinds})
        if not 0 <= hello.index < hello.processes <= _MAX_PROCESSES:
            raise ValueError("an index or a number of processes out of range")
        return hello


class Peer:
    """The other end of a connection. Any thread may send; one thread receives.

    Attributes:
        last_heard: time of the last bytes that came, by `time.monotonic()`.
    """

    def __init__(self, connection: socket.socket, token: bytes, *, accepted: bool = False) -> None:
        """Send the nonce of this end. accepted: this end has accepted the connection."""
        self.connection, self.last_heard = connection, time.monotonic()
        self._token, self._accepted = token, accepted
        self._nonce, self._their_nonce = secrets.token_hex(16).encode(), b""
        self._sent, self._opened, self._received = 0, 0, b""
        self._sending = threading.Lock()
        self._write(b"jaxopt_llm " + self._nonce)

    def send(self, message: Mapping[str, Any] | None = None) -> None:
        """Send a message, or a sign of life. Connection errors are ignored here: the receiving side finds them."""
        with self._sending:
            if message is None:
                self._write(b"")
            else:
                text = json.dumps(message).encode()
                self._write(self._prove(self._accepted, self._their_nonce, self._sent, text) + b" " + text)
                self._sent += 1

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for some bytes, and return the messages that are complete, or None at the end of the connection.

        Raises:
            TimeoutError: no bytes came within the timeout of the connection.
            NotTrustedError: the other end does not know the token.
            ValueError: the bytes are not messages.
        """
        try:
            data = self.connection.recv(65536)
        except TimeoutError:
            raise
        except OSError:
            return None
        if not data:
            return None
        self.last_heard = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _MAX_MESSAGE_BYTES:
            raise ValueError("not a message")
        opened = [self._open(line) for line in lines if line]
        return [message for message in opened if message is not None]

    def poll(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come, as `receive` does; None also for bytes that are not messages."""
        try:
            return self.receive()
        except TimeoutError:
            return []
        except ValueError:
            return None

    def introduce(self, hello: Hello, deadline: float) -> list[dict[str, Any]] | None:
        """Say who this end is, and return the first messages of the other end; None if it closes the connection.

        Raises:
            TimeoutError: it has not answered at the deadline, a time of `time.monotonic()`.
            NotTrustedError, ValueError: as `receive`.
        """
        answers: list[dict[str, Any]] | None = []
        is_introduced = False
        while answers == []:
            self.connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            answers = self.receive()
            if self._their_nonce and not is_introduced:
                self.send(asdict(hello))
                is_introduced = True
        return answers

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(line + b"\n")

    def _open(self, line: bytes) -> dict[str, Any] | None:
        """Return the message in a line, or None for the nonce of the other end, which comes first."""
        if not self._their_nonce:
            if not (match := re.fullmatch(rb"jaxopt_llm ([0-9a-f]{32})", line)):
                raise ValueError("not a nonce")
            self._their_nonce = match[1]
            return None
        proof, _, text = line.partition(b" ")
        if not hmac.compare_digest(proof, self._prove(not self._accepted, self._nonce, self._opened, text)):
            raise NotTrustedError("a message of a process that does not know the token")
        self._opened += 1
        message = json_files.parse(text)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def _prove(self, by_acceptor: bool, nonce: bytes, number: int, text: bytes) -> bytes:
        signed = f"{'acceptor' if by_acceptor else 'caller'} {number} ".encode() + nonce + b" " + text
        return hmac.new(self._token, signed, "sha256").hexdigest().encode()


def connect(address: tuple[str, int], seconds: float) -> socket.socket:
    """Connect to a port.

    Raises:
        OSError: nothing listens there, or it does not accept the connection within these seconds.
    """
    connection = socket.create_connection(address, timeout=seconds)
    if connection.getsockname() == connection.getpeername():
        # If nothing listens on a port of the same host, TCP may give the connection that same port as its source: it
        # then answers itself. Reset it instead of closing it. After a close, nobody could listen on the port for a
        # minute.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        raise ConnectionRefusedError("nothing listens there")
    return connection


class Arrival(NamedTuple):
    """Process that has connected, and knows the token of the job."""

    peer: Peer
    hello: Hello


class Entrance:
    """Port at which the processes of a job arrive.

    A connection that sends nothing, or garbage, delays no other one and is closed without an answer. If too many of
    them wait, the oldest gives way: a process of the job says at once who it is.

    Attributes:
        rejected: number of connections so far from processes with another token.
    """

    def __init__(self, listener: socket.socket, token: bytes, selector: selectors.BaseSelector) -> None:
        """Wait for connections. selector: the one by which the owner of this object waits."""
        self._listener, self._token, self._selector = listener, token, selector
        self._unknown: dict[Peer, float] = {}  # in the order of their arrival, with the time at which they are closed
        self._arrived: list[Arrival] = []
        self.rejected = 0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, listener)

    def handle(self, ready: Iterable[Any]) -> list[Arrival]:
        """Return the processes that have arrived, whose connections stay in the selector with the peer as their data.

        ready: data of the connections that can be read. Those of others are ignored.
        """
        arrived = []
        for each in ready:
            if each is self._listener:
                self._accept()
            elif each in self._unknown and (arrival := self._meet(each)):
                arrived.append(arrival)
        for peer in [each for each, until in self._unknown.items() if time.monotonic() > until]:
            self._reject(peer)
        return arrived

    def wait(self, deadline: float) -> Arrival | None:
        """Return the next process that arrives, or None if none does before the deadline."""
        while not self._arrived and (left := deadline - time.monotonic()) > 0:
            self._arrived += self.handle([key.data for key, _ in self._selector.select(min(left, 0.2))])
        return self._arrived.pop(0) if self._arrived else None

    def close(self) -> None:
        for peer in [*self._unknown]:
            self._reject(peer)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        if len(self._unknown) == MAX_WAITING:
            self._reject(next(iter(self._unknown)))
        try:
            connection, _ = self._listener.accept()
        except OSError:  # for example, no more files may be open
            if self._unknown:
                self._reject(next(iter(self._unknown)))
            time.sleep(_ERROR_PAUSE_SECONDS)
            return
        connection.settimeout(SEND_SECONDS)
        peer = Peer(connection, self._token, accepted=True)
        self._unknown[peer] = time.monotonic() + HELLO_SECONDS
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _meet(self, peer: Peer) -> Arrival | None:
        """Read who has connected."""
        try:
            messages = peer.receive()
            if messages == []:
                return None
            if messages:
                arrival = Arrival(peer, Hello.parse(messages[0]))
                del self._unknown[peer]
                return arrival
        except NotTrustedError:
            self.rejected += 1
            peer.send({"end": "another token"})  # the other end cannot verify it, which tells it why
        except (ValueError, TimeoutError):
            pass  # another program
        self._reject(peer)
        return None

    def _reject(self, peer: Peer) -> None:
        del self._unknown[peer]
        self._selector.unregister(peer.connection)
        peer.connection.close()


def printable(value: Any) -> str:
    """Return a value of another process as a text for the terminal: short, and without control characters."""
    text = "".join(each if each.isprintable() else "?" for each in str(value))
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
