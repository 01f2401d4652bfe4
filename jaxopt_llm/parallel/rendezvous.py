"""Where the processes of a job meet before JAX starts, and how each knows that the others live.

JAX ends a second process with one number, a port in use or a coordinator that does not answer with a crash or a hang,
and a job that has lost a process with an abort. So all first connect to process 0, which compares what they are, and
the connections stay: who is silent for too long, or gone without a word, ends the job with a line and exit code 5."""

import contextlib
import errno
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxopt_llm import errors
from jaxopt_llm.errors import InputError, ProcessLost
from jaxopt_llm.parallel.launchers import Job

_LONGEST = 2**20  # bytes of a message
COMING = 5  # seconds that one process starts after another
ANSWER = 5  # seconds that a connection is given to say who it is
PARTING = 1  # seconds that who is told of an end is given to end, too


class Peer:
    """A connection that carries lines of JSON; an empty line says that the sender lives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.heard = time.monotonic()
        self._received = b""

    def send(self, message: Any = None) -> None:
        """Raises nothing: who is gone is found by reading."""
        with contextlib.suppress(OSError):
            self.connection.sendall(b"\n" if message is None else json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come, or None at the end of the connection. Waits for some bytes. Raises ValueError
        where they are no messages, TimeoutError as the connection's timeout says."""
        try:
            data = self.connection.recv(65536)
        except TimeoutError:
            raise
        except OSError:
            return None
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        messages = [json.loads(line) for line in lines if line]
        if len(self._received) > _LONGEST or not all(isinstance(each, dict) for each in messages):
            raise ValueError("no message")
        return messages

    def receive_one(self, deadline: float) -> dict[str, Any] | None:
        """The same, of one message, until a time of time.monotonic()."""
        messages: list[dict[str, Any]] | None = []
        while messages == []:
            self.connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            messages = self.receive()
        return messages[0] if messages else None


def meet(job: Job, facts: Mapping[str, Any], timeout_seconds: float) -> tuple[str, dict[int, Peer]]:
    """Waits until all processes of a job have come and are found to be equal.

    facts: what must be equal on all, by name.

    Returns the address at which JAX's own coordinator is to listen, host:port, and the connections, by the number of
    the process: of process 0 to all others, and of those to it. Raises InputError where they do not come together.
    """
    deadline = time.monotonic() + timeout_seconds
    if job.index:
        return _join(job, facts, deadline)
    host, port = _address(job)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=job.processes)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            # By another process 0 perhaps, which then says so.
            with contextlib.suppress(_NoCoordinator):
                _join(job, facts, min(deadline, time.monotonic() + ANSWER))
            mend = "the port is in use by another program; choose another"
        else:
            mend = f"process 0 cannot listen there ({error}); name an address of its host"
        raise InputError(f"distributed.coordinator={job.coordinator}: {mend}") from error
    with listener:
        peers = _gather(listener, job, facts, deadline)
    with socket.create_server((host, 0), family=family) as free:
        address = f"{job.coordinator.rsplit(':', 1)[0]}:{free.getsockname()[1]}"
    for peer in peers.values():
        peer.send({"start": address})
    return address, peers


class _NoCoordinator(InputError):
    """What listens there is something else."""


def _join(job: Job, facts: Mapping[str, Any], deadline: float) -> tuple[str, dict[int, Peer]]:
    why, given = "nothing listens there", max(deadline - time.monotonic(), 0)
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection(_address(job), timeout=max(deadline - time.monotonic(), 1e-3))
        except OSError as error:
            why = str(error)
            time.sleep(0.2)
            continue
        if connection.getsockname() == connection.getpeername():
            # Where nobody listens, TCP may give a connection to its own host the very port that it goes to: it then
            # answers itself. Reset, not closed: a closed one would keep the port from process 0 for a minute.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            continue
        with contextlib.ExitStack() as unless_joined:
            unless_joined.enter_context(connection)
            peer = Peer(connection)
            peer.send(
                {"index": job.index, "processes": job.processes, "host": socket.gethostname(), "facts": {**facts}}
            )
            try:
                told = peer.receive_one(deadline)
                if told is None:
                    why = "the connection was closed"
                    time.sleep(0.2)
                    continue
                if "end" in told:
                    raise InputError(told["end"])
                start = told["start"]
            except (TimeoutError, ValueError, KeyError) as error:
                what = "it does not answer" if isinstance(error, TimeoutError) else "it is no coordinator of jaxopt_llm"
                raise _NoCoordinator(f"distributed.coordinator={job.coordinator}: {what}; see to process 0") from error
            unless_joined.pop_all()
            return start, {0: peer}
    raise _NoCoordinator(
        f"distributed.coordinator={job.coordinator} was not reached in {given:.0f} s ({why}): see to process 0 and the "
        "network, or raise --distributed.timeout-seconds"
    )


def _gather(listener: socket.socket, job: Job, facts: Mapping[str, Any], deadline: float) -> dict[int, Peer]:
    """The connections of all processes but this one. Raises InputError, and tells those that have come."""
    began = time.monotonic()
    peers: dict[int, Peer] = {}
    hosts = {0: socket.gethostname()}
    refused: list[Peer] = []
    why = ""
    while len(peers) < job.processes - 1 and not why:
        listener.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            arrival = _accept(listener, deadline)
        except TimeoutError:
            missing = [str(index) for index in range(1, job.processes) if index not in peers]
            if time.monotonic() >= deadline:
                why = (
                    f"of {job.processes} processes, number {', '.join(missing)} did not come in "
                    f"{time.monotonic() - began:.0f} s: start them, one per host, or lower --distributed.processes"
                )
            continue
        if arrival is None:
            continue
        peer, index, host, count, others = arrival
        if count != job.processes:
            why = f"process {index} ({host}) has distributed.processes={count}, process 0 has {job.processes}"
        elif index in hosts:
            why = f"two processes have number {index}, on {hosts[index]} and {host}: see to --distributed.process-id"
        else:
            why = _difference(index, others, facts)
        hosts[index] = host
        if why:
            refused.append(peer)
        else:
            peers[index] = peer
    if why:
        until = min(deadline, time.monotonic() + COMING)
        _refuse(listener, [*peers.values(), *refused], job.processes - 1, why, until)
        raise InputError(why)
    return peers


def _accept(listener: socket.socket, deadline: float) -> tuple[Peer, int, str, int, dict[str, Any]] | None:
    """Return the next connection with the index, host, job size and facts that its process sends, or None if some
    other program tried the port: its connection is closed.

    Raises:
        TimeoutError: no connection came within the listener's timeout, or one came and sent nothing for ANSWER seconds
            or until `deadline`, a time of `time.monotonic()`.
    """
    connection, _ = listener.accept()
    with contextlib.ExitStack() as unless_accepted:
        unless_accepted.enter_context(connection)
        peer = Peer(connection)
        try:
            told = peer.receive_one(min(deadline, time.monotonic() + ANSWER))
            index, host = int(told["index"]), str(told["host"])  # type: ignore[index]
            count, facts = int(told["processes"]), dict(told["facts"])  # type: ignore[index]
        except (ValueError, KeyError, TypeError):
            return None
        unless_accepted.pop_all()
        return peer, index, host, count, facts


def _refuse(listener: socket.socket, peers: list[Peer], expected: int, why: str, deadline: float) -> None:
    """Tells all why there will be no job, also those that are only just coming."""
    for peer in peers:
        peer.send({"end": why})
    with contextlib.suppress(TimeoutError, ValueError):
        while len(peers) < expected:
            listener.settimeout(max(deadline - time.monotonic(), 1e-3))
            peer = Peer(listener.accept()[0])
            peer.receive_one(deadline)
            peer.send({"end": why})
            peers.append(peer)


def _difference(index: int, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    ours = json.loads(json.dumps(dict(ours)))
    found = [
        f"{name} is {theirs.get(name)} on process {index} and {ours.get(name)} on process 0"
        for name in sorted(ours.keys() | theirs.keys())
        if theirs.get(name) != ours.get(name)
    ]
    return f"the processes of a job must be equal: {'; '.join(found)}" if found else ""


def _address(job: Job) -> tuple[str, int]:
    host, port = job.coordinator.rsplit(":", 1)
    return host.strip("[]"), int(port)


class Watch:
    """A thread that listens to the other processes, and ends this one when one of them fails or is lost."""

    def __init__(self, job: Job, peers: dict[int, Peer], timeout_seconds: float) -> None:
        self._job, self._peers, self._timeout = job, peers, timeout_seconds
        self._ending = threading.Lock()  # whoever has it ends the process
        self._leaving = False
        for peer in peers.values():
            peer.connection.settimeout(1)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Ends the watch, once all others leave, too."""
        self._leaving = True
        for peer in list(self._peers.values()):
            peer.send({"bye": True})
        self._thread.join(self._timeout)

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all processes by an error of this one."""
        self._ending.acquire()
        code = errors.report(error)
        self._tell_all(f"process {self._job.index}: {errors.line(error) or type(error).__name__}", code)
        os._exit(code)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for index, peer in self._peers.items():
                selector.register(peer.connection, selectors.EVENT_READ, index)
            pause, sent = min(self._timeout / 5, 5), 0.0
            while self._peers:
                for key, _ in selector.select(min(pause, 0.5)):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                if not self._leaving and time.monotonic() > sent + pause:
                    sent = time.monotonic()
                    for index, peer in list(self._peers.items()):
                        peer.send()
                        if sent - peer.heard > self._timeout:
                            self._lost(index, f"has not answered for {self._timeout:g} s")

    def _hear(self, index: int) -> bool:
        """Whether there is more to come from a process."""
        messages = self._peers[index].receive()
        if messages is None and not self._leaving:
            self._lost(index, "has died")
        for message in messages or []:
            if "end" in message:
                self._end(message["end"], message["code"])
        if messages is None or any("bye" in message for message in messages):
            del self._peers[index]
            return False
        return True

    def _lost(self, index: int, how: str) -> NoReturn:
        lost = ProcessLost(f"process {index} of {self._job.processes} {how}")
        self._end(errors.line(lost), lost.exit_code)

    def _end(self, why: str, code: int) -> NoReturn:
        self._ending.acquire()
        sys.stderr.write(f"error: {why}\n")  # at once: print() would let another thread's line into it
        sys.stderr.flush()
        self._tell_all(why, code)
        os._exit(code)

    def _tell_all(self, why: str, code: int) -> None:
        """And waits a moment until they have ended: where JAX's coordinator is gone, JAX aborts."""
        peers = list(self._peers.values())
        for peer in peers:
            peer.send({"end": why, "code": code})
        for peer in peers:
            peer.connection.settimeout(PARTING)
            with contextlib.suppress(OSError):
                while peer.connection.recv(65536):
                    pass
