"""Errors that keep processes from connecting: all processes report them, before JAX starts and in time."""

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ports import free_address

from jaxopt_llm.core.errors import InputError, ProcessLost, ProcessMissing
from jaxopt_llm.distributed import rendezvous, wire
from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.distributed.rendezvous import connect_processes
from jaxopt_llm.distributed.wire import Entrance, Hello

pytestmark = pytest.mark.core

FACTS = {"training.steps": 4, "mesh.fsdp": 2}
PATIENCE = 120  # seconds; everything that the tests wait for takes milliseconds


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give processes that connect at all enough time."""
    monkeypatch.setattr(rendezvous, "START_SPREAD_SECONDS", PATIENCE)
    monkeypatch.setattr(wire, "HELLO_SECONDS", PATIENCE)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the package's clock with one that stands still."""
    now = [1000.0]
    for module in (rendezvous, wire):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    return now


@pytest.fixture
def coordinator() -> str:
    return free_address()


def run_together(*calls: Callable[[], Any]) -> list[Any]:
    """Run each call in its own thread, and return their results, or the text of the error that one raises.

    The text of a ProcessMissing begins with "missing: ".
    """
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except InputError as error:
            results[index] = str(error)
        except ProcessMissing as error:
            results[index] = f"missing: {error}"

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    return results


def process(
    coordinator: str, index: int, processes: int = 2, timeout: float = PATIENCE, token: bytes = b"", **facts: object
) -> Callable[[], Any]:
    return lambda: connect_processes(Job(coordinator, processes, index), {**FACTS, **facts}, timeout, token)


def test_all_get_the_address_for_jax(coordinator: str) -> None:
    (first, peers), (second, to_first), (third, _) = run_together(
        *(process(coordinator, index, 3) for index in range(3))
    )
    host, port = first.split(":")
    assert host == "127.0.0.1" and port not in ("0", coordinator.split(":")[1])
    assert first == second == third
    assert (sorted(peers), list(to_first)) == ([1, 2], [0])


def test_different_settings_are_named(coordinator: str) -> None:
    first, second = run_together(process(coordinator, 0), process(coordinator, 1, **{"training.steps": 5}))
    assert first == second
    assert first.endswith("must be equal: training.steps is 5 on process 1 and 4 on process 0")


@pytest.mark.parametrize("index", [0, 1])
def test_two_processes_with_one_index_are_refused(coordinator: str, index: int) -> None:
    indices = [0, 1, index]
    for message in run_together(*(process(coordinator, each, 3) for each in indices)):
        assert message.startswith(f"two processes have index {index}, on {socket.gethostname()} and")


def test_other_counts_of_processes_are_refused(coordinator: str) -> None:
    for message in run_together(process(coordinator, 0, 2), process(coordinator, 1, 3)):
        assert "has distributed.processes=3, process 0 has 2; set the same --distributed.processes" in message


def test_missing_processes_are_named_in_time(
    coordinator: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = rendezvous._compare

    def compare_and_time_out(*arguments: Any) -> str:
        clock[0] += 20
        return compare(*arguments)

    monkeypatch.setattr(rendezvous, "_compare", compare_and_time_out)
    for message in run_together(process(coordinator, 0, 4, timeout=20), process(coordinator, 2, 4)):
        assert message.startswith("missing: process(es) 1, 3 of 4 did not connect in 20 s; start them")


def test_a_coordinator_that_does_not_answer_is_named_in_time(
    coordinator: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(rendezvous.time, "sleep", sleep)
    (message,) = run_together(process(coordinator, 1, timeout=20))
    assert message.startswith(f"missing: distributed.coordinator={coordinator} was not reached in 20 s")
    assert "refused" in message
    assert 1020 <= clock[0] < 1021


def test_a_coordinator_that_only_listens_is_named(coordinator: str) -> None:
    host, port = coordinator.split(":")
    with socket.create_server((host, int(port))):
        (message,) = run_together(process(coordinator, 1, timeout=0.5))
    assert message.startswith(f"missing: distributed.coordinator={coordinator}: it does not answer")


def test_a_missing_process_is_no_wrong_input() -> None:
    """A supervisor ends after 2, and starts the job again after 5."""
    assert ProcessMissing.exit_code == ProcessLost.exit_code == 5


def test_a_port_in_use_is_named(coordinator: str) -> None:
    connections = []

    def answer() -> None:
        for _ in range(2):
            connections.append(other.accept()[0])
            connections[-1].sendall(b"HTTP/1.1 400\n")

    with socket.create_server(("127.0.0.1", int(coordinator.split(":")[1]))) as other:
        first, second, _ = run_together(process(coordinator, 0), process(coordinator, 1), answer)
    for connection in connections:
        connection.close()
    assert f"{coordinator}: the port is in use by another program" in first
    assert f"{coordinator}: it is not a coordinator of jaxopt_llm" in second


def test_an_address_of_another_host_is_named() -> None:
    (message,) = run_together(process("192.0.2.1:7000", 0))
    assert "192.0.2.1:7000: process 0 cannot listen there" in message


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # of an open connection
def test_other_programs_do_not_disturb(coordinator: str) -> None:
    host, port = coordinator.split(":")
    sent = threading.Event()

    def other_program() -> None:
        while not sent.wait(0.05):
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))) as connection:
                connection.sendall(b"GET / HTTP/1.1\n\n")
                sent.set()

    def process_after_it() -> Any:
        assert sent.wait(PATIENCE)
        return process(coordinator, 1)()

    (first, _), _, (second, _) = run_together(process(coordinator, 0), other_program, process_after_it)
    assert first == second


def test_a_silent_connection_is_closed_some_time_after_it_came(clock: list[float]) -> None:
    """The time does not begin when process 0 starts to listen: the others may start much later."""
    listener = socket.create_server(("127.0.0.1", 0))
    with selectors.DefaultSelector() as selector, contextlib.closing(Entrance(listener, b"", selector)) as entrance:
        clock[0] += 10 * PATIENCE
        with socket.create_connection(listener.getsockname(), timeout=PATIENCE) as silent:
            assert [key.data for key, _ in selector.select(PATIENCE)] == [listener]
            assert entrance.handle([listener]) == []
            clock[0] += PATIENCE
            entrance.handle([])
            silent.settimeout(0.2)
            assert silent.recv(1000).startswith(b"jaxopt_llm ")
            with pytest.raises(TimeoutError):
                silent.recv(1)
            clock[0] += 1
            entrance.handle([])
            silent.settimeout(PATIENCE)
            assert silent.recv(1) == b""


def test_a_process_with_another_token_is_refused(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = threading.Event()

    def other_token() -> Any:
        try:
            return process(coordinator, 1, token=b"guess")()
        finally:
            refused.set()

    def of_the_job() -> Any:
        assert refused.wait(PATIENCE)
        return process(coordinator, 1, token=b"secret")()

    (first, _), message, (second, _) = run_together(process(coordinator, 0, token=b"secret"), other_token, of_the_job)
    assert "process 0 there has another token; give all processes the same JAXOPT_LLM_TOKEN" in message
    assert first == second


def test_rejected_connections_are_counted_when_a_process_is_missing(
    coordinator: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_token() -> Any:
        try:
            return process(coordinator, 1)()
        finally:
            clock[0] += 20

    message, _ = run_together(process(coordinator, 0, timeout=20, token=b"secret"), other_token)
    assert message.startswith("missing: process(es) 1 of 2 did not connect in 20 s; 1 connection(s) had another token")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0\xff" * 100,
        b"[" * 100000 + b"\n",
        b"jaxopt_llm " + b"0" * 32 + b'\nproof {"index": -1}\n',
        b"{}\n",
        b"x" * 2**21,
    ],
    ids=["silence", "garbage", "deep", "no proof", "empty", "long"],
)
def test_what_others_send_delays_no_process(coordinator: str, sent: bytes) -> None:
    host, port = coordinator.split(":")
    connected = threading.Event()
    open_connections = []

    def other_program() -> None:
        while not connected.wait(0.05):
            with contextlib.suppress(ConnectionRefusedError):
                open_connections.append(socket.create_connection((host, int(port))))
                with contextlib.suppress(OSError):  # process 0 may close it before it has read everything
                    open_connections[-1].sendall(sent)
                connected.set()

    def process_after_it() -> Any:
        assert connected.wait(PATIENCE)
        return process(coordinator, 1)()

    began = time.monotonic()
    (first, _), _, (second, _) = run_together(process(coordinator, 0), other_program, process_after_it)
    assert first == second and time.monotonic() - began < PATIENCE / 2
    for connection in open_connections:
        connection.close()


def test_a_process_that_may_open_no_more_files_for_a_moment_accepts_later(
    coordinator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")]

    def fail_once(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    (first, _), (second, _) = run_together(*(process(coordinator, index, timeout=30) for index in range(2)))
    assert first == second and not failures


def test_texts_of_others_have_no_control_characters(coordinator: str) -> None:
    red = {"training.steps": "\x1b[31m5\n", "\x1b]0;title\x07": 1}
    first, second = run_together(process(coordinator, 0), process(coordinator, 1, **red))
    assert first == second and first.isprintable() and "training.steps is ?[31m5? on process 1" in first


@pytest.mark.parametrize(
    "change", [{"index": -1}, {"index": 2}, {"index": True}, {"processes": 10**9}, {"host": 1}, {"facts": []}]
)
def test_a_hello_out_of_range_is_none(change: dict[str, Any]) -> None:
    hello = {"index": 1, "processes": 2, "host": "other", "facts": FACTS}
    assert Hello.parse(hello).index == 1
    with pytest.raises(ValueError, match="hello|range"):
        Hello.parse(hello | change)


def test_the_token_is_read_from_the_environment() -> None:
    assert wire.read_token({}) == b""
    assert wire.read_token({"JAXOPT_LLM_TOKEN": " of the job\n"}) == b"of the job"


def test_a_connection_to_itself_is_not_a_coordinator(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect from the coordinator's own port, which the system chooses for one connection in 28,000."""
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
    (first, _), (second, _) = run_together(once_the_port_is_free, process(coordinator, 1))
    assert first == second
