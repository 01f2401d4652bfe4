"""Connection of one process of a group to the outer server."""

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed import handshake
from jaxopt_llm.distributed.handshake import Hello, printable
from jaxopt_llm.distributed.peer import Peer
from jaxopt_llm.outer.codes import Layout
from jaxopt_llm.outer.masters import make_name, subtract
from jaxopt_llm.outer.wire import NO_PAYLOAD, Wire, shut

CONNECT_SECONDS = 10.0  # for which a server that does not answer is tried again
# In which a lost process of the same group must be gone when this one starts: longer than TCP_USER_TIMEOUT (wire.py).
BUSY_SECONDS = 45.0
GREETING_SECONDS = 10.0  # in which a server that has accepted a connection says who it is, and whether it admits us
ANSWER_SECONDS = 600.0  # in which a server closes a round, after the time for which it waits for the groups
_SLOW_DISK = 50e6  # bytes per second, at which it has time to save masters and momentum
PAUSE_SECONDS = 0.2


class ServerLost(Exception):
    """The outer server does not answer. The message says why."""


class ServerBusy(ServerLost):
    """The outer server has another connection with the index of this group."""


@dataclass(frozen=True, eq=False)
class Base:
    """Outer masters that a group has. name: see OuterMasters. vector: float32."""

    round: int
    step: int
    name: str
    vector: np.ndarray


@dataclass(frozen=True, eq=False)
class Answer:
    """Answer to an exchange.

    Attributes:
        base: outer masters from now on.
        whole: they are those of the server, and not an update of those that the group had.
        counted: with `whole`: the change counts in the round that is open.
    """

    base: Base
    whole: bool
    counted: bool = False


@dataclass(frozen=True)
class Member:
    """A process of a group, as it joins.

    Attributes:
        index, groups: of its group.
        facts: what the server needs to know of it, and values that must be equal in all groups, by name.
    """

    index: int
    groups: int
    layout: Layout
    form: str
    facts: dict[str, Any]


class OuterClient:
    """Client of the outer server. One thread uses it at a time.

    Attributes:
        carried: changes with progress of an exchange.
    """

    def __init__(self, address: tuple[str, int], member: Member, token: bytes) -> None:
        self._address, self._member, self._token = address, member, token
        self._wire: Wire | None = None
        self._connection: socket.socket | None = None  # of the wire, also before the server has admitted us
        self._wait = 0.0
        self._is_empty = False
        self._before = 0
        self._starts = True  # no exchange has ended yet
        self._stopped = threading.Event()

    @property
    def carried(self) -> int:
        wire = self._wire
        return self._before + (wire.carried if wire is not None else 0)

    def stop(self) -> None:
        """End the connection and an exchange that is under way. Another thread may call it."""
        self._stopped.set()
        if (connection := self._connection) is not None:
            shut(connection)

    def _close(self) -> None:
        if self._wire is not None:
            self._before += self._wire.carried + 1
            self._wire.close()
            self._wire = self._connection = None

    def exchange(self, base: Base | None, step: int, own: np.ndarray) -> Answer:
        """Bring the own masters after a step to the server, and return its answer.

        Args:
            base: outer masters that the own ones began from; None: the group has to begin from those of the server.

        Raises:
            ServerLost: the server does not answer, or has another connection with the index of this group.
            InputError: the server refuses this group. At the first exchange, also if such a connection stays.
        """
        try:
            return self._exchange_again(base, step, own)
        finally:
            self._starts = False

    def _exchange_again(self, base: Base | None, step: int, own: np.ndarray) -> Answer:
        """Do an exchange, twice if the connection has ended since the last one."""
        was_connected = self._wire is not None
        try:
            return self._exchange(base, step, own)
        except (OSError, ValueError, EOFError) as error:
            self._close()
            reason: Exception = error
        if was_connected and not self._stopped.is_set():
            # The server may have started again since the last exchange. It knows which changes it has counted.
            try:
                return self._exchange(base, step, own)
            except (OSError, ValueError, EOFError) as error:
                self._close()
                reason = error
        raise ServerLost(printable(reason)) from reason

    def _exchange(self, base: Base | None, step: int, own: np.ndarray) -> Answer:
        wire = self._wire or self._connect()
        if self._is_empty:
            offered = base or Base(0, step, make_name(), own)
            self._send(wire, "offer", offered.round, offered.step, offered.name, _to_bytes(offered.vector))
            message, data = self._receive(wire)
            self._is_empty = False
            if message["kind"] == "masters":  # another group was faster
                theirs = self._whole(message, data)
                if base is None or theirs.base.name != base.name:
                    return theirs
            elif base is None:
                return Answer(offered, whole=False)
        if base is None:
            self._send(wire, "fetch", 0, step, "")
            return self._whole(*self._receive(wire))
        form, layout = self._member.form, self._member.layout
        self._send(wire, "change", base.round, step, base.name, layout.encode(base.vector - own, form))
        message, data = self._receive(wire)
        if message["kind"] == "update":
            vector = subtract(layout, base.vector, data, form)
            return Answer(_read_base(message, vector), whole=False)
        return self._whole(message, data)

    @staticmethod
    def _whole(message: dict[str, Any], data: np.ndarray) -> Answer:
        if message["kind"] != "masters":
            raise ValueError("not an answer")
        base = _read_base(message, data.view("<f4").astype(np.float32, copy=False))
        return Answer(base, whole=True, counted=message.get("counted") is True)

    @staticmethod
    def _send(wire: Wire, kind: str, number: int, step: int, base: str, payload: np.ndarray = NO_PAYLOAD) -> None:
        wire.send({"kind": kind, "round": number, "step": step, "base": base}, payload)

    def _receive(self, wire: Wire) -> tuple[dict[str, Any], np.ndarray]:
        """Return the answer of the server. Before it, the server says that it is alive."""
        layout, form = self._member.layout, self._member.form
        sizes = {"update": layout.count_bytes(form), "masters": 4 * layout.size, "taken": 0, "alive": 0}

        def expected(message: dict[str, Any]) -> int:
            kind = message.get("kind")
            if not isinstance(kind, str) or kind not in sizes:
                raise ValueError("not an answer")
            return sizes[kind]

        seconds = self._wait + ANSWER_SECONDS + 8 * layout.size / _SLOW_DISK
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            message, data = wire.receive(expected)
            if message["kind"] != "alive":
                return message, data
        raise TimeoutError(f"no answer in {seconds:.0f} s")

    def _connect(self) -> Wire:
        """Connect and join, within CONNECT_SECONDS, or BUSY_SECONDS if this process has just started."""
        began, problem = time.monotonic(), Exception("nothing listens there")
        while not self._stopped.is_set():
            waits = self._starts and isinstance(problem, ServerBusy)
            left = began + (BUSY_SECONDS if waits else CONNECT_SECONDS) - time.monotonic()
            if left <= 0:
                break
            try:
                connection = socket.create_connection(self._address, timeout=min(left, CONNECT_SECONDS))
            except OSError as error:
                problem = error
                time.sleep(PAUSE_SECONDS)
                continue
            with contextlib.ExitStack() as unless_joined:
                unless_joined.enter_context(connection)
                self._connection = connection
                if self._stopped.is_set():
                    break
                if connection.getsockname() == connection.getpeername():  # TCP has connected it to itself
                    time.sleep(PAUSE_SECONDS)
                    continue
                try:
                    wire = self._join(connection)
                except ServerBusy as error:
                    problem = error
                    time.sleep(PAUSE_SECONDS)
                    continue
                unless_joined.pop_all()
                self._wire = wire
                return wire
        if not isinstance(problem, ServerBusy):
            raise ConnectionError(str(problem))
        if self._starts and not self._stopped.is_set():
            raise InputError(
                f"groups.server {self._address[0]}:{self._address[1]}: another process uses --groups.index "
                f"{self._member.index}: give each group its own, or end that process"
            )
        raise problem

    def _join(self, connection: socket.socket) -> Wire:
        """Say who this process is.

        Raises:
            InputError: the server refuses it.
            ServerBusy: the server has another connection of this process, which may have ended.
        """
        peer, nonce, member = Peer(connection), handshake.make_nonce(), self._member
        deadline = time.monotonic() + GREETING_SECONDS
        greeting = peer.receive_one(deadline)
        if greeting is None or not isinstance(greeting.get("nonce"), str):
            raise ValueError("it is no outer server")
        hello = Hello(member.index, member.groups, socket.gethostname(), member.facts, nonce)
        peer.send(handshake.sign(self._token, greeting["nonce"], hello.__dict__))
        signed = peer.receive_one(deadline)
        if signed is None:
            raise EOFError("the connection was closed")
        where = f"groups.server {self._address[0]}:{self._address[1]}"
        try:
            answer = handshake.open_signed(self._token, nonce, signed)
        except handshake.NotTrustedError as error:
            problem = "it has another token" if self._token else "this group has no token"
            raise InputError(
                f"{where}: {problem}; give both the same file, with groups.token_file and --token-file"
            ) from error
        if not isinstance(answer, dict):
            raise ValueError("it is no outer server")
        if "refused" in answer:
            raise InputError(f"{where} refuses group {member.index}: {printable(answer['refused'])}")
        if "busy" in answer:
            raise ServerBusy(printable(answer["busy"]))
        if not isinstance(answer.get("nonce"), str) or type(answer.get("wait")) not in (int, float):
            raise ValueError("it is no outer server")
        self._wait, self._is_empty = float(answer["wait"]), answer.get("empty") is True
        return Wire(connection, self._token, nonce, answer["nonce"])


def _read_base(message: dict[str, Any], vector: np.ndarray) -> Base:
    number, step, name = (message.get(each) for each in ("round", "step", "name"))
    if type(number) is not int or type(step) is not int or not isinstance(name, str):
        raise ValueError("not an answer")
    return Base(number, step, name, vector)


def _to_bytes(vector: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(vector, "<f4").view(np.uint8)
