"""Connection between two processes of a job, which carries lines of JSON."""

import contextlib
import json
import socket
import time
from typing import Any

from jaxopt_llm.core import json_files

_MAX_MESSAGE_BYTES = 2**20


class Peer:
    """Connection that carries lines of JSON. An empty line means that the sender is alive."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.last_heard = time.monotonic()
        self._received = b""

    def send(self, message: Any = None) -> None:
        """Send a message, or an empty line. Connection errors are ignored here: the receiving side finds them."""
        with contextlib.suppress(OSError):
            self.connection.sendall(b"\n" if message is None else json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for some bytes, and return the messages that are complete, or None at the end of the connection.

        Raises:
            ValueError: the bytes are not messages.
            TimeoutError: no bytes came within the timeout of the connection.
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
        messages = [json_files.parse(line) for line in lines if line]
        if len(self._received) > _MAX_MESSAGE_BYTES or not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message")
        return messages

    def receive_some(self, deadline: float) -> list[dict[str, Any]] | None:
        """Return at least one message as `receive` does. deadline: a time of `time.monotonic()`."""
        messages: list[dict[str, Any]] | None = []
        while messages == []:
            self.connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            messages = self.receive()
        return messages

    def receive_one(self, deadline: float) -> dict[str, Any] | None:
        """Return one message as `receive` does, and drop those that come together with it."""
        messages = self.receive_some(deadline)
        return messages[0] if messages else None
