"""Messages with a payload between a process of a group and the outer server. Each proves that it knows the token.

A message is a line of JSON, signed as those between supervisors are: over the nonce of the receiver and the number of
the message. It says how many bytes follow. After them comes their SHA-256, signed the same way. So a payload cannot be
changed or repeated either, and both ends hash it while it travels: one of 40 GB takes minutes.
"""

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxopt_llm.core import json_files
from jaxopt_llm.distributed import handshake

# A connection that takes or brings no byte for this time is lost. The server says something every ALIVE_SECONDS while
# it has no answer yet, for example while it saves the masters.
SILENCE_SECONDS = 120.0
ALIVE_SECONDS = 5.0
_MAX_LINE_BYTES = 2**16
_CHUNK_BYTES = 2**20
_LOST_SECONDS = 30  # after which a host that acknowledges nothing is gone
NO_PAYLOAD = np.empty(0, np.uint8)


class Wire:
    """Connection that carries signed messages with payloads.

    Attributes:
        nonce: nonce of this end.
        their_nonce: nonce of the other end.
        carried: bytes that were sent and received so far. It changes with progress.
    """

    def __init__(self, connection: socket.socket, token: bytes, nonce: str, their_nonce: str) -> None:
        self.nonce, self.their_nonce, self.carried = nonce, their_nonce, 0
        self._connection, self._token, self._sent, self._opened = connection, token, 0, 0
        self._received = b""
        connection.settimeout(SILENCE_SECONDS)
        find_lost_hosts(connection)

    def close(self) -> None:
        shut(self._connection)

    def send(self, message: dict[str, Any], payload: np.ndarray = NO_PAYLOAD) -> None:
        """Send a message. payload: bytes, uint8."""
        nonce = f"{self.their_nonce}/{self._sent}"
        self._sent += 1
        self._send_line(handshake.sign(self._token, nonce, {**message, "bytes": payload.size}))
        if not payload.size:
            return
        view, digest = payload.data, hashlib.sha256()
        for start in range(0, payload.size, _CHUNK_BYTES):  # the timeout of sendall is that of the whole call
            chunk = view[start : start + _CHUNK_BYTES]
            self._connection.sendall(chunk)
            digest.update(chunk)
            self.carried += len(chunk)
        self._send_line(handshake.sign(self._token, f"{nonce}/payload", digest.hexdigest()))

    def _send_line(self, signed: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(signed).encode() + b"\n")

    def receive(self, expected: Callable[[dict[str, Any]], int]) -> tuple[dict[str, Any], np.ndarray]:
        """Return the next message and its payload.

        Args:
            expected: returns the number of bytes that a message of this kind must have, before they are allocated.

        Raises:
            EOFError: the other end has closed the connection.
            ValueError: the message is not one of the other end, or has another size.
            OSError: the connection is lost.
        """
        nonce = f"{self.nonce}/{self._opened}"
        message = self._receive_signed(nonce)
        if not isinstance(message, dict) or type(message.get("bytes")) is not int:
            raise ValueError("not a message")
        self._opened += 1
        if message["bytes"] != (wanted := expected(message)):
            raise ValueError(f"a payload of {message['bytes']:,} bytes in place of {wanted:,}")
        payload = np.empty(wanted, np.uint8)
        if wanted and self._fill(payload.data) != self._receive_signed(f"{nonce}/payload"):
            raise ValueError("a payload that was changed on its way")
        return message, payload

    def _receive_signed(self, nonce: str) -> Any:
        try:
            return handshake.open_signed(self._token, nonce, json_files.parse(self._receive_line()))
        except handshake.NotTrustedError as error:
            raise ValueError("a message of somebody without the token") from error

    def _receive_line(self) -> bytes:
        deadline = time.monotonic() + SILENCE_SECONDS
        while b"\n" not in self._received:
            if len(self._received) > _MAX_LINE_BYTES or time.monotonic() > deadline:
                raise ValueError("not a message")
            self._received += self._take(65536)
        line, _, self._received = self._received.partition(b"\n")
        return line

    def wait(self, seconds: float | None) -> None:
        """Set how long the begin of the next message may take. None: without limit."""
        self._connection.settimeout(seconds)
        if not self._received:
            self._received += self._take(65536)
        self._connection.settimeout(SILENCE_SECONDS)

    def _take(self, most: int) -> bytes:
        data = self._connection.recv(most)
        if not data:
            raise EOFError("the connection was closed")
        self.carried += len(data)
        return data

    def _fill(self, view: memoryview) -> str:
        """Receive a payload, and return its SHA-256."""
        at = min(len(self._received), len(view))
        view[:at], self._received = self._received[:at], self._received[at:]
        digest = hashlib.sha256(view[:at])
        while at < len(view):
            count = self._connection.recv_into(view[at : at + _CHUNK_BYTES])
            if not count:
                raise EOFError("the connection was closed")
            digest.update(view[at : at + count])
            at += count
            self.carried += count
        return digest.hexdigest()


def shut(connection: socket.socket) -> None:
    """Close a connection. A thread that waits for it notices that."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def find_lost_hosts(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other host is gone, also while nothing is sent for hours.

    It asks the other host only while everything that was sent has arrived. Otherwise it sends that again, by default
    for a quarter of an hour; the server says to a group that waits that it is alive.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    waits = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 1000 * _LOST_SECONDS}
    for name, value in waits.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
