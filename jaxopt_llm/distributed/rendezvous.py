"""Connections between the processes of a job, which compare them before JAX starts and detect lost ones later.

JAX crashes or hangs if two processes have the same index, if the port is in use, or if the coordinator does not answer.
It aborts if a process is lost. So all processes first connect to process 0, which compares them. The connections then
stay open: a process that is silent for too long, or that closes its connection without a message, ends the job with a
one-line error and exit code 5.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxopt_llm.config.parallel import parse_address
from jaxopt_llm.core import errors, json_files
from jaxopt_llm.core.errors import InputError, ProcessLost, ProcessMissing
from jaxopt_llm.distributed import wire
from jaxopt_llm.distributed.activity import WRITE_SECONDS, write_stacks
from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.distributed.wire import Arrival, Entrance, Hello, Peer, printable

START_SPREAD_SECONDS = 5  # time in which the processes of a job start one after another
EXIT_SECONDS = 1  # time that other processes have to end after the message that the job ends


def connect_processes(
    job: Job, facts: Mapping[str, Any], timeout_seconds: float, token: bytes = b""
) -> tuple[str, dict[int, Peer]]:
    """Wait until all processes of a job are connected and have equal facts.

    Args:
        facts: values that must be equal in all processes, by name.
        token: secret of the job; see wire.py.

    Returns:
        The address host:port at which JAX's own coordinator must listen, and the connections by process index. Process
        0 gets its connections to all others, and every other process its connection to process 0.

    Raises:
        ProcessMissing: a process is missing.
        InputError: the processes do not match.
    """
    deadline = time.monotonic() + timeout_seconds
    if job.index:
        return _join(job, facts, deadline, token)
    host, port = parse_address(job.coordinator)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=job.processes)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            # Perhaps another process 0 uses the port. It then answers with the error.
            with contextlib.suppress(_NotCoordinatorError, _NotReachedError):
                _join(job, facts, min(deadline, time.monotonic() + wire.HELLO_SECONDS), token)
            problem = "the port is in use by another program; set --distributed.coordinator to another port"
        else:
            problem = f"process 0 cannot listen there ({error}); set --distributed.coordinator to its own address"
        raise InputError(f"distributed.coordinator={job.coordinator}: {problem}") from error
    with selectors.DefaultSelector() as selector, contextlib.closing(Entrance(listener, token, selector)) as entrance:
        arrivals = _accept_all(entrance, job, facts, deadline)
    with socket.create_server((host, 0), family=family) as free:  # its port is free for JAX's coordinator
        address = f"{job.coordinator.rsplit(':', 1)[0]}:{free.getsockname()[1]}"
    for arrival in arrivals:
        arrival.peer.send({"start": address})
    return address, {arrival.hello.index: arrival.peer for arrival in arrivals}


class _NotCoordinatorError(InputError):
    """Another program listens at the coordinator's address."""


class _NotReachedError(ProcessMissing):
    """Nothing listens at the coordinator's address, or it does not answer."""


def _join(job: Job, facts: Mapping[str, Any], deadline: float, token: bytes) -> tuple[str, dict[int, Peer]]:
    reason, seconds = "nothing listens there", max(deadline - time.monotonic(), 0)
    while time.monotonic() < deadline:
        try:
            connection = wire.connect(parse_address(job.coordinator), max(deadline - time.monotonic(), 1e-3))
        except OSError as error:
            reason = str(error)
            time.sleep(0.2)
            continue
        with contextlib.ExitStack() as unless_joined:
            unless_joined.enter_context(connection)
            peer = Peer(connection, token)
            address = _ask(peer, job, facts, deadline)
            if address is not None:
                unless_joined.pop_all()
                return address, {0: peer}
        reason = "the connection was closed"
        time.sleep(0.2)
    raise _NotReachedError(
        f"distributed.coordinator={job.coordinator} was not reached in {seconds:.0f} s ({reason}); check process 0 and "
        "the network, or raise --distributed.timeout-seconds"
    )


def _ask(peer: Peer, job: Job, facts: Mapping[str, Any], deadline: float) -> str | None:
    """Say hello to process 0, and return the address at which JAX starts; None if the connection was closed.

    Raises:
        ProcessMissing: process 0 does not answer, or misses another process.
        InputError: process 0 ends the job, or this is not process 0 of this job.
    """
    place = f"distributed.coordinator={job.coordinator}"
    try:
        answers = peer.introduce(Hello(job.index, job.processes, socket.gethostname(), {**facts}), deadline)
        if answers is None:
            return None
        if "end" in answers[0]:
            raise (ProcessMissing if answers[0].get("missing") else InputError)(printable(answers[0]["end"]))
        return str(answers[0]["start"])
    except wire.NotTrustedError as error:
        raise InputError(
            f"{place}: process 0 there has another token; give all processes the same {wire.TOKEN_VARIABLE}"
        ) from error
    except TimeoutError as error:
        raise _NotReachedError(f"{place}: it does not answer; check the address and process 0") from error
    except (ValueError, KeyError) as error:
        problem = "it is not a coordinator of jaxopt_llm"
        raise _NotCoordinatorError(f"{place}: {problem}; check the address and process 0") from error


def _accept_all(entrance: Entrance, job: Job, facts: Mapping[str, Any], deadline: float) -> list[Arrival]:
    """Return the connections of all other processes.

    Raises:
        ProcessMissing: a process is missing.
        InputError: the processes do not match. In both cases those that are connected get the message too.
    """
    began = time.monotonic()
    arrivals: list[Arrival] = []
    hosts = {0: socket.gethostname()}
    problem, is_missing = "", False
    while len(arrivals) < job.processes - 1 and not problem:
        arrival = entrance.wait(deadline)
        if arrival is None:
            problem, is_missing = _describe_missing(job, hosts, time.monotonic() - began, entrance.rejected), True
            break
        arrivals.append(arrival)
        problem = _compare(arrival.hello, job, facts, hosts)
        hosts[arrival.hello.index] = printable(arrival.hello.host)
    if not problem:
        return arrivals
    until = min(deadline, time.monotonic() + START_SPREAD_SECONDS)
    while len(arrivals) < job.processes - 1 and (late := entrance.wait(until)):
        arrivals.append(late)
    for arrival in arrivals:
        arrival.peer.send({"end": problem, "missing": is_missing})
        arrival.peer.connection.close()
    raise (ProcessMissing if is_missing else InputError)(problem)


def _describe_missing(job: Job, hosts: Mapping[int, str], seconds: float, rejected: int) -> str:
    missing = ", ".join(str(index) for index in range(1, job.processes) if index not in hosts)
    others = f"; {rejected} connection(s) had another token" if rejected else ""
    return (
        f"process(es) {missing} of {job.processes} did not connect in {seconds:.0f} s{others}; start them, one per "
        "host, or lower --distributed.processes"
    )


def _compare(hello: Hello, job: Job, facts: Mapping[str, Any], hosts: Mapping[int, str]) -> str:
    """Return how a process does not match those that are connected, or "".

    hosts: of the connected processes, by index.
    """
    host, index = printable(hello.host), hello.index
    if hello.processes != job.processes:
        problem = f"process {index} ({host}) has distributed.processes={hello.processes}, process 0 has {job.processes}"
        return f"{problem}; set the same --distributed.processes for all"
    if index in hosts:
        return f"two processes have index {index}, on {hosts[index]} and {host}; change --distributed.process-id"
    return describe_differences(index, hello.facts, facts)


def describe_differences(index: int, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    ours = json_files.parse(json.dumps(dict(ours)))  # as their values arrived: for example lists for tuples
    found = [
        f"{printable(name)} is {printable(theirs.get(name))} on process {index} and {printable(ours.get(name))} on "
        "process 0"
        for name in sorted(ours.keys() | theirs.keys())
        if theirs.get(name) != ours.get(name)
    ]
    return f"the settings and software of all processes must be equal: {'; '.join(found)}" if found else ""


class Watch:
    """Thread that listens to the other processes, and ends this process if one of them fails or is lost.

    Attributes:
        checkpoint_step: step of the run's last checkpoint, for the message; see `ProcessLost`. It is set from outside,
            because the storage of the checkpoints may hang when a host is lost.
        reports: last report of each other process, by index; see `publish`.
    """

    def __init__(self, job: Job, peers: dict[int, Peer], timeout_seconds: float) -> None:
        self._job, self._peers, self._timeout = job, peers, timeout_seconds
        self._ending = threading.Lock()  # the thread that holds it ends the process
        # Their connections stay open until the end: one that `_run` closed after a goodbye would look like a death.
        self._all_peers = tuple(peers.values())
        self._leaving = False
        self.checkpoint_step: int | None = None
        self.reports: dict[int, dict[str, Any]] = {}
        self._report: Callable[[], dict[str, Any]] | None = None
        self._stacks: Path | None = None
        for peer in peers.values():
            peer.connection.settimeout(1)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def publish(self, report: Callable[[], dict[str, Any]], stacks: Path) -> None:
        """Send a report with each heartbeat to process 0, which forgets the earlier ones.

        stacks: file for the Python stacks of this process, if the job hangs.
        """
        self.reports.clear()
        self._report, self._stacks = report, stacks

    def end_hung(self, reason: str) -> NoReturn:
        """End all processes because one of them makes no progress. Each writes its stacks."""
        lost = ProcessLost(reason, self.checkpoint_step)
        self._end(errors.one_line(lost), lost.exit_code, hung=True)

    def leave(self) -> None:
        """End the watch after each peer has said goodbye, or is gone. Process 0 has all others as peers."""
        self._leaving = True
        for peer in self._all_peers:
            peer.send({"bye": True})
        self._thread.join(self._timeout)

    def fail(self, error: BaseException) -> NoReturn:
        """End all processes because of an error in this one.

        The others end with its exit code, or as after `ProcessLost` if a restart may help: after an unforeseen error,
        or an error of a disk or a network.
        """
        self._ending.acquire()
        code = errors.report_error(error)
        theirs = ProcessLost.exit_code if code in (errors.UNFORESEEN, errors.IO_ERROR) else code
        self._end_peers(f"process {self._job.index}: {errors.one_line(error) or type(error).__name__}", theirs)
        os._exit(code)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for index, peer in self._peers.items():
                selector.register(peer.connection, selectors.EVENT_READ, index)
            pause, sent = min(self._timeout / 5, 1), 0.0
            while self._peers:
                for key, _ in selector.select(min(pause, 0.5)):
                    if not self._handle_messages(key.data):
                        selector.unregister(key.fileobj)
                if not self._leaving and time.monotonic() > sent + pause:
                    sent = time.monotonic()
                    heartbeat = {"report": self._report()} if self._report and self._job.index else None
                    for index, peer in list(self._peers.items()):
                        peer.send(heartbeat)
                        if sent - peer.last_heard > self._timeout:
                            self._end_lost(index, f"has not answered for {self._timeout:g} s")

    def _handle_messages(self, index: int) -> bool:
        """Handle the messages of a process, and return whether more can come from it."""
        messages = self._peers[index].poll()
        if messages is None and not self._leaving:
            self._end_lost(index, "has died")
        for message in messages or []:
            if "end" in message:
                self._end(message["end"], message["code"], message.get("hung", False))
            if "report" in message:
                self.reports[index] = message["report"]
        if messages is None or any("bye" in message for message in messages):
            del self._peers[index]
            return False
        return True

    def _end_lost(self, index: int, symptom: str) -> NoReturn:
        lost = ProcessLost(f"process {index} of {self._job.processes} {symptom}", self.checkpoint_step)
        self._end(errors.one_line(lost), lost.exit_code)

    def _end(self, message: str, code: int, hung: bool = False) -> NoReturn:
        """End all processes. hung: the job hangs, and each process writes its stacks."""
        self._ending.acquire()
        sys.stderr.write(f"error: {message}\n")  # one write: with print() another thread's line could come in between
        sys.stderr.flush()
        self._end_peers(message, code, hung)
        os._exit(code)

    def _end_peers(self, message: str, code: int, hung: bool = False) -> None:
        """Send the end to all other processes, and wait up to EXIT_SECONDS for each of them to end.

        hung: each process also writes its stacks, for which it has WRITE_SECONDS more.

        If the process with JAX's coordinator ended first, JAX would abort the others.
        """
        peers = list(self._peers.values())
        for peer in peers:
            peer.send({"end": message, "code": code, "hung": hung})
        if hung and self._stacks is not None:  # after the messages, so that all processes write at the same time
            write_stacks(self._stacks, message)
        for peer in peers:
            peer.connection.settimeout(EXIT_SECONDS + (WRITE_SECONDS if hung else 0))
            with contextlib.suppress(OSError):
                while peer.connection.recv(65536):
                    pass
