"""Acceptor of process 0: it receives the connections of the other processes side by side."""

import contextlib
import queue
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from jaxopt_llm.distributed import handshake
from jaxopt_llm.distributed.handshake import Hello
from jaxopt_llm.distributed.peer import Peer

HELLO_SECONDS = 5  # time that a new connection has for its first message
MAX_WAITING = 256  # connections whose first message is waited for at the same time
ERROR_PAUSE_SECONDS = 0.1  # after an error of accept, which may come back at once


@dataclass(frozen=True)
class Arrival:
    """Connection of a process that knows the token of the job."""

    peer: Peer
    hello: Hello

    def answer(self, token: bytes, message: dict[str, Any]) -> None:
        self.peer.send(handshake.sign(token, self.hello.nonce, message))


class Acceptor:
    """Acceptance of connections. As a context manager it ends with them.

    A connection that sends nothing, or garbage, delays no other one and is closed without an answer.

    Attributes:
        rejected: number of connections so far from processes with another token.
    """

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        self._listener, self._token = listener, token
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._waiting = threading.Semaphore(MAX_WAITING)
        self._closed = False
        self.rejected = 0
        self._thread = threading.Thread(target=self._accept, name="acceptor", daemon=True)

    def __enter__(self) -> "Acceptor":
        self._listener.settimeout(0.2)  # a thread that waits in accept does not notice that the socket is closed
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrived.get_nowait().peer.connection.close()

    def wait(self, deadline: float) -> Arrival | None:
        """Return the next process that arrives, or None if none does before the deadline."""
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return self._arrived.get(timeout=min(left, 0.2))
        return None

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # for example, no more files may be open for a moment
                time.sleep(ERROR_PAUSE_SECONDS)
                continue
            if self._waiting.acquire(blocking=False):
                threading.Thread(target=self._receive, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _receive(self, connection: socket.socket) -> None:
        peer, nonce, arrival = Peer(connection), handshake.make_nonce(), None
        try:
            peer.send({"nonce": nonce})
            signed = peer.receive_one(time.monotonic() + HELLO_SECONDS)
            arrival = Arrival(peer, handshake.read_hello(handshake.open_signed(self._token, nonce, signed)))
        except handshake.NotTrustedError:
            self.rejected += 1
            peer.send(handshake.sign(b"", "", "another token"))  # the other end cannot verify it, which tells it why
        except (ValueError, TimeoutError):
            pass  # another program
        finally:
            self._waiting.release()
            if arrival is None:
                connection.close()
        if arrival is not None:
            self._arrived.put(arrival)
