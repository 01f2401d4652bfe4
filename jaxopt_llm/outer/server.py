"""The outer server: it takes the changes of the groups, and moves the outer masters.

It serves each process of a group on its own: process p of all groups exchange their pieces of the masters.
"""

import contextlib
import functools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed import handshake
from jaxopt_llm.distributed.acceptor import Acceptor, Arrival
from jaxopt_llm.distributed.handshake import Hello, printable
from jaxopt_llm.outer import store
from jaxopt_llm.outer.codes import Layout, is_finite
from jaxopt_llm.outer.masters import OuterMasters, OuterStep
from jaxopt_llm.outer.rounds import Contribution, Record, Rounds, Update, Whole
from jaxopt_llm.outer.wire import ALIVE_SECONDS, Wire

LOOK_SECONDS = 0.2  # between two looks at the clocks of the rounds
JOIN_SECONDS = 5.0  # longest wait for the end of a connection
RECORDS = "rounds.jsonl"
_MOST_PROCESSES, _LONGEST_NAME = 2**16, 100


@dataclass
class Lane:
    """One process of the groups, as the server sees it. facts: see Saved; those of a group must be equal to them."""

    process: int
    layout: Layout
    outer: OuterStep
    facts: dict[str, Any]
    rounds: Rounds


class OuterServer:
    """Server of the outer step. As a context manager it ends with its connections.

    Args:
        listener: where the groups arrive.
        directory: of the masters and of rounds.jsonl.
        groups: number of groups.
        wait: seconds that a round waits after its first contribution.
        new_settings: take the facts of the first group that joins in place of those that are kept beside the masters.
    """

    def __init__(
        self,
        listener: socket.socket,
        directory: Path,
        groups: int,
        wait: float,
        token: bytes,
        *,
        new_settings: bool = False,
    ) -> None:
        self._directory, self._groups, self._wait, self._token = directory, groups, wait, token
        self._new_settings = new_settings
        self._acceptor = Acceptor(listener, token)
        self._lanes: dict[int, Lane] = {}
        self._lock = threading.Lock()
        self._wires: set[Wire] = set()
        self._threads: list[threading.Thread] = []
        self._due, self._closed = threading.Event(), False
        self._refused = 0
        self._saved = store.load_all(directory)  # a damaged file is found at the start

    def __enter__(self) -> "OuterServer":
        if self._saved:
            newest = max((saved.state for saved in self._saved.values()), key=lambda state: state.round)
            self._say(f"continues from round {newest.round}, step {newest.step}")
        self._acceptor.__enter__()
        self._thread = threading.Thread(target=self._welcome, name="arrivals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._thread.join()
        self._acceptor.__exit__(*error)
        with self._lock:
            for wire in self._wires:
                wire.close()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)

    def serve(self, stopping: Callable[[], bool]) -> None:
        """Close rounds when they are due, until `stopping()` returns True.

        Raises:
            OSError: the masters cannot be saved.
        """
        while not stopping():
            self._due.wait(LOOK_SECONDS)
            self._due.clear()
            for lane in list(self._lanes.values()):
                save = functools.partial(store.save, self._directory, lane.process, lane.facts)
                lane.rounds.begin_if_offered(save)
                lane.rounds.close_if_due(lane.outer, save, functools.partial(self._write, lane))
            if self._acceptor.rejected > self._refused:
                self._refused = self._acceptor.rejected
                self._say(f"refused {self._refused} connection(s) so far with another token")

    def _write(self, lane: Lane, record: Record) -> None:
        """Append the record of a round, and say who was not in it."""
        line = json.dumps({"time": round(time.time(), 3), "process": lane.process, **record}) + "\n"
        try:
            with (self._directory / RECORDS).open("ab", buffering=0) as file:
                file.write(line.encode())
        except OSError as error:  # the masters are saved: a record is not worth the groups' time
            self._say(f"a line of {RECORDS} is lost ({error}): {line.rstrip()}")
        missing = [f"{name} {record[name]}" for name in ("late", "absent", "not_finite") if record[name]]
        if missing:
            self._say(f"round {record['round']}, step {record['step']}: without groups: {', '.join(missing)}")

    @staticmethod
    def _say(line: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads our standard error: the groups go on
            print(line, file=sys.stderr, flush=True)

    def _welcome(self) -> None:
        while not self._closed:
            arrival = self._acceptor.wait(time.monotonic() + LOOK_SECONDS)
            if arrival is not None:
                thread = threading.Thread(target=self._meet, args=(arrival,), daemon=True)
                thread.start()
                self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _meet(self, arrival: Arrival) -> None:
        """Answer a process of a group, and serve it until it goes."""
        hello, lane = arrival.hello, None
        try:
            wire = Wire(arrival.peer.connection, self._token, handshake.make_nonce(), hello.nonce)
            lane = self._join(wire, hello)
        except (InputError, ValueError, ConnectionError) as error:
            problem = f"not a process of a group ({error})" if isinstance(error, ValueError) else str(error)
            self._say(f"refuses group {hello.index} ({printable(hello.host)}) and tells it: {printable(problem)}")
            kind = "busy" if isinstance(error, ConnectionError) else "refused"
            arrival.answer(self._token, {kind: problem})
            return
        finally:
            if lane is None:
                arrival.peer.connection.close()
        reason = "has left"
        try:
            self._say(f"group {hello.index} ({printable(hello.host)}) is here with process {lane.process}")
            answer = {"nonce": wire.nonce, "empty": lane.rounds.state is None, "wait": self._wait}
            arrival.answer(self._token, answer)
            while True:
                self._serve_message(wire, lane, hello.index)
        except (OSError, ValueError, EOFError, MemoryError) as error:
            reason = f"is gone ({error})"
        finally:
            lane.rounds.leave(hello.index, wire)
            with self._lock:
                self._wires.discard(wire)
            wire.close()
        self._say(f"group {hello.index}, process {lane.process}, {printable(reason)}")

    def _join(self, wire: Wire, hello: Hello) -> Lane:
        """Admit a process to its lane, which begins with the first one.

        Raises:
            InputError: it does not fit to the other groups.
            ValueError: it is no process of a group.
            ConnectionError: its group is there already. Perhaps it is lost, and this one takes its place soon.
        """
        facts, process = hello.facts, hello.facts.get("process")
        layout, outer = Layout.parse(facts.get("segments")), OuterStep.parse(facts)
        if type(process) is not int or not 0 <= process < _MOST_PROCESSES:
            raise ValueError("a process out of range")
        if hello.processes != self._groups:
            raise InputError(
                f"groups.count is {hello.processes} here, and the outer server has --groups {self._groups}: make them "
                "equal"
            )
        facts = {name: value for name, value in facts.items() if name != "segments"}
        with self._lock:
            lane, saved = self._lanes.get(process), self._saved.get(process)
            if lane is None:
                kept = saved.facts if saved is not None and not self._new_settings else facts
                state = saved.state if saved is not None else None
                rounds = Rounds(self._groups, self._wait, state, self._due.set)
                lane = Lane(process, state.layout if state is not None else layout, outer, kept, rounds)
            if lane.facts != facts:
                raise InputError(_describe_differences(facts, lane.facts))
            if lane.layout != layout:
                raise InputError(
                    f"the masters of the outer server in {self._directory} have other pieces: use the model, the mesh "
                    "and the processes of the other groups, or another --directory"
                )
            if hello.index in lane.rounds.connected:
                raise ConnectionError(
                    f"group {hello.index} is there already: give each group its own --groups.index, or wait until the "
                    "connection of the one that was lost has ended"
                )
            lane.rounds.join(hello.index, wire)
            self._lanes[process] = lane
            self._saved.pop(process, None)
            self._wires.add(wire)
        return lane

    def _serve_message(self, wire: Wire, lane: Lane, group: int) -> None:
        """Wait for a message of a process, and answer it."""

        def expected(message: dict[str, Any]) -> int:
            sizes = {"offer": 4 * lane.layout.size, "change": lane.layout.count_bytes(lane.outer.form), "fetch": 0}
            numbers = [message.get(name) for name in ("round", "step")]
            is_named = isinstance(message.get("base"), str) and len(message["base"]) <= _LONGEST_NAME
            is_numbered = all(type(number) is int and number >= 0 for number in numbers)
            kind = message.get("kind")
            if not isinstance(kind, str) or kind not in sizes or not is_named or not is_numbered:
                raise ValueError("not a message")
            return sizes[kind]

        wire.wait(None)
        message, payload = wire.receive(expected)
        state, described = lane.rounds.state, (message["round"], message["step"], message["base"])
        if message["kind"] == "offer":
            offered = OuterMasters.begin(lane.layout, *described, payload.view("<f4").astype(np.float32, copy=False))
            if is_finite(offered.masters):
                is_taken = lane.rounds.offer(offered)
                while (state := lane.rounds.wait_for_masters(ALIVE_SECONDS)) is None:
                    wire.send({"kind": "alive"})
                if is_taken:
                    wire.send({"kind": "taken"})
                    return
        if state is None:
            raise ValueError("a message before the masters")
        if message["kind"] == "change":
            _answer_change(wire, lane, group, message, payload)
        else:
            _send_whole(wire, Whole(state, counted=False))


def _answer_change(wire: Wire, lane: Lane, group: int, message: dict[str, Any], payload: np.ndarray) -> None:
    change = Contribution(message["step"], payload)
    while not lane.rounds.contribute(group, message["base"], change, ALIVE_SECONDS):
        wire.send({"kind": "alive"})
    while (answer := lane.rounds.wait_for(change, ALIVE_SECONDS)) is None:
        wire.send({"kind": "alive"})
    if isinstance(answer, Update):
        wire.send({"kind": "update", **_describe(answer.state)}, answer.data)
    else:
        _send_whole(wire, answer)


def _send_whole(wire: Wire, answer: Whole) -> None:
    described = {"kind": "masters", "counted": answer.counted, **_describe(answer.state)}
    wire.send(described, np.ascontiguousarray(answer.state.masters, "<f4").view(np.uint8))


def _describe(state: OuterMasters) -> dict[str, Any]:
    return {"round": state.round, "step": state.step, "name": state.name}


def _describe_differences(theirs: dict[str, Any], kept: dict[str, Any]) -> str:
    """Return how the facts of a group differ from those of the other groups. It reads this: it is the one "here"."""

    def compare(one: Any, other: Any) -> list[str]:
        one, other = (each if isinstance(each, dict) else {} for each in (one, other))
        names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
        return [f"{name} is {one.get(name)} here and {other.get(name)} in the other groups" for name in names]

    # Hashes of what a setting leads to differ with it, and say less.
    found = compare(theirs.get("settings"), kept.get("settings")) or compare(theirs, kept)
    return (
        f"all groups must have the same settings, mesh and data: {'; '.join(found)}; to change the settings of all "
        "groups, start the outer server with --new-settings"
    )


def open_listener(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens.

    Raises:
        InputError: it cannot listen there.
    """
    host, port = address
    with contextlib.ExitStack() as unless_listening:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = unless_listening.enter_context(socket.create_server((host, port), family=family))
        except OSError as error:
            raise InputError(
                f"--listen {host}:{port}: cannot listen there ({error}); give an address of this host and a free port"
            ) from error
        unless_listening.pop_all()
    return listener
