"""What keeps processes from coming together is said by all of them, before JAX starts and in time."""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ports import free_address

from jaxopt_llm.errors import InputError
from jaxopt_llm.parallel import rendezvous
from jaxopt_llm.parallel.launchers import Job
from jaxopt_llm.parallel.rendezvous import meet

pytestmark = pytest.mark.core

FACTS = {"training.steps": 4, "mesh.fsdp": 2}
PATIENCE = 120  # seconds: what is waited for comes in milliseconds


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes at all comes soon enough."""
    for name in ("COMING", "ANSWER"):
        monkeypatch.setattr(rendezvous, name, PATIENCE)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the package goes by, which stands still."""
    now = [1000.0]
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    return now


@pytest.fixture
def coordinator() -> str:
    return free_address()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call, in a thread of its own, returns, or the InputError that it raises."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except InputError as error:
            results[number] = str(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    return results


def process(
    coordinator: str, index: int, processes: int = 2, timeout: float = PATIENCE, **facts: object
) -> Callable[[], Any]:
    return lambda: meet(Job(coordinator, processes, index), {**FACTS, **facts}, timeout)


def test_all_learn_where_jax_is_to_listen(coordinator: str) -> None:
    (first, peers), (second, to_first), (third, _) = together(*(process(coordinator, index, 3) for index in range(3)))
    host, port = first.split(":")
    assert host == "127.0.0.1" and port not in ("0", coordinator.split(":")[1])
    assert first == second == third
    assert (sorted(peers), list(to_first)) == ([1, 2], [0])


def test_what_differs_is_named(coordinator: str) -> None:
    told = together(process(coordinator, 0), process(coordinator, 1, **{"training.steps": 5}))
    assert told[0] == told[1]
    assert told[0].endswith("must be equal: training.steps is 5 on process 1 and 4 on process 0")


@pytest.mark.parametrize("index", [0, 1])
def test_two_processes_with_one_number_are_refused(coordinator: str, index: int) -> None:
    numbers = [0, 1, index]
    for told in together(*(process(coordinator, number, 3) for number in numbers)):
        assert told.startswith(f"two processes have number {index}, on {socket.gethostname()} and")


def test_other_counts_of_processes_are_refused(coordinator: str) -> None:
    for told in together(process(coordinator, 0, 2), process(coordinator, 1, 3)):
        assert "has distributed.processes=3, process 0 has 2" in told


def test_who_is_missing_is_named_in_time(coordinator: str, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    receive = rendezvous.Peer.receive_one

    def time_is_up_when_one_has_come(peer: rendezvous.Peer, deadline: float) -> Any:
        told = receive(peer, deadline)
        if told and "index" in told:
            clock[0] += 20
        return told

    monkeypatch.setattr(rendezvous.Peer, "receive_one", time_is_up_when_one_has_come)
    for told in together(process(coordinator, 0, 4, timeout=20), process(coordinator, 2, 4)):
        assert told.startswith("of 4 processes, number 1, 3 did not come in 20 s")


def test_a_coordinator_that_does_not_answer_is_named_in_time(
    coordinator: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(rendezvous.time, "sleep", sleep)
    (told,) = together(process(coordinator, 1, timeout=20))
    assert f"distributed.coordinator={coordinator} was not reached in 20 s" in told and "refused" in told
    assert 1020 <= clock[0] < 1021


def test_a_port_in_use_is_named(coordinator: str) -> None:
    connections = []

    def answer() -> None:
        for _ in range(2):
            connections.append(other.accept()[0])
            connections[-1].sendall(b"HTTP/1.1 400\n")

    with socket.create_server(("127.0.0.1", int(coordinator.split(":")[1]))) as other:
        first, second, _ = together(process(coordinator, 0), process(coordinator, 1), answer)
    for connection in connections:
        connection.close()
    assert f"{coordinator}: the port is in use by another program" in first
    assert f"{coordinator}: it is no coordinator of jaxopt_llm" in second


def test_an_address_of_another_host_is_named() -> None:
    (told,) = together(process("192.0.2.1:7000", 0))
    assert "192.0.2.1:7000: process 0 cannot listen there" in told


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # of a connection that is left open
def test_strangers_do_not_disturb(coordinator: str) -> None:
    host, port = coordinator.split(":")
    told = threading.Event()

    def stranger() -> None:
        while not told.wait(0.05):
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))) as connection:
                connection.sendall(b"GET / HTTP/1.1\n\n")
                told.set()

    def after_the_stranger() -> Any:
        assert told.wait(PATIENCE)
        return process(coordinator, 1)()

    (first, _), _, (second, _) = together(process(coordinator, 0), stranger, after_the_stranger)
    assert first == second


def test_the_time_to_answer_begins_with_the_connection(clock: list[float]) -> None:
    """Not when process 0 begins to listen: the others may start much later."""
    ours, theirs = socket.socketpair()

    def accept() -> tuple[socket.socket, None]:
        clock[0] += PATIENCE
        return ours, None

    with ours, theirs:
        rendezvous.Peer(theirs).send({"index": 1, "host": "other", "processes": 2, "facts": FACTS})
        rendezvous._accept(SimpleNamespace(accept=accept), math.inf)  # type: ignore[arg-type]
        assert ours.gettimeout() == PATIENCE


def test_a_connection_to_itself_is_no_coordinator(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ports that the system gives to connections, one in 28,000 is the one that is tried."""
    host, port = coordinator.split(":")
    connect, tried, closed = socket.create_connection, threading.Event(), threading.Event()

    class ToItself(socket.socket):
        def close(self) -> None:
            super().close()
            closed.set()

    def to_itself_at_first(*args: Any, **options: Any) -> socket.socket:
        if tried.is_set():
            return connect(*args, **options)
        connection = ToItself()
        connection.bind((host, int(port)))
        connection.connect((host, int(port)))
        assert connection.getpeername() == connection.getsockname()
        tried.set()
        return connection

    def once_the_port_is_free() -> Any:
        assert closed.wait(PATIENCE)
        return process(coordinator, 0)()

    monkeypatch.setattr(socket, "create_connection", to_itself_at_first)
    (first, _), (second, _) = together(once_the_port_is_free, process(coordinator, 1))
    assert first == second
