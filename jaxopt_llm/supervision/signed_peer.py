"""Connection between two supervisors of a job, which both prove with each message that they know the job's token.

The leader greets a connection with its nonce, and the other end sends its own one in its first message. From then on
each end signs the nonce of the other, the number of the message and the message. So none can be changed, repeated or
sent to another connection. Messages are not encrypted.
"""

import socket
from typing import Any

from jaxopt_llm.distributed import handshake
from jaxopt_llm.distributed.peer import Peer


class SignedPeer(Peer):
    """Peer whose messages are signed. Its signs of life, which say nothing, are not.

    Attributes:
        nonce: nonce of this end.
        their_nonce: nonce of the other end, which must be known before a message is sent.
    """

    def __init__(self, connection: socket.socket, token: bytes, their_nonce: str = "") -> None:
        super().__init__(connection)
        self.nonce, self.their_nonce = handshake.make_nonce(), their_nonce
        self._token, self._sent, self._opened = token, 0, 0

    def greet(self) -> None:
        """Send the nonce of this end, without a proof."""
        super().send({"nonce": self.nonce})

    def send(self, message: Any = None) -> None:
        if message is not None:
            message = handshake.sign(self._token, f"{self.their_nonce}/{self._sent}", message)
            self._sent += 1
        super().send(message)

    def receive(self) -> list[dict[str, Any]] | None:
        """Return messages as `Peer.receive` does. One that the other end has not signed is a ValueError, too."""
        messages = super().receive()
        return None if messages is None else [self._open(message) for message in messages]

    def _open(self, signed: dict[str, Any]) -> dict[str, Any]:
        try:
            message = handshake.open_signed(self._token, f"{self.nonce}/{self._opened}", signed)
        except handshake.NotTrustedError as error:
            raise ValueError("a message of somebody without the token") from error
        if not isinstance(message, dict):
            raise ValueError("not a message")
        self._opened += 1
        return message
