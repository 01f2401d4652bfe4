"""Port of the leader of a job's supervisors: who may speak there, and the token that their programs get."""

import contextlib
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gates import DEADLINE, finish
from test_elastic import NOTE_TOKEN, Hosts, await_that, wait_for
from test_supervisor import faults, start_supervisor, starts

from jaxopt_llm.distributed.wire import MAX_WAITING, NotTrustedError, Peer
from jaxopt_llm.supervision.members import LeaderAddress, find_leader, publish_leader

HELLO: dict[str, Any] = {"index": 1, "processes": 2, "host": "\x1b[31mother\n", "facts": {}}


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.delenv("JAXOPT_LLM_TOKEN", raising=False)
    hosts = Hosts(tmp_path, 2)
    for index in range(2):
        hosts.plan(index, NOTE_TOKEN + "exit 0")
    yield hosts
    for process in hosts.running.values():
        process.kill()


class Held:
    """Connection that holds back what is sent."""

    sent = b""

    def sendall(self, data: bytes) -> None:
        self.sent += data


def start_leader(hosts: Hosts) -> LeaderAddress:
    hosts.start(0)
    await_that(lambda: find_leader(hosts.run))
    published = find_leader(hosts.run)
    assert published is not None
    return published


def connect(published: LeaderAddress) -> socket.socket:
    return socket.create_connection((published.host, published.port), timeout=DEADLINE)


def await_close(connection: socket.socket) -> None:
    """Wait until the other end, which does not admit this one, closes a connection."""
    with contextlib.suppress(ConnectionResetError):  # it was closed before everything was read
        while data := connection.recv(4096):
            assert b"welcome" not in data


def finish_all(hosts: Hosts) -> str:
    """Start host 1, wait for the end of the job, and return the lines of the leader."""
    assert starts(hosts.home(0)) == 0
    hosts.start(1)
    _, said = finish(hosts.running[0])
    finish(hosts.running[1])
    assert [starts(hosts.home(index)) for index in range(2)] == [1, 1]
    return said


@pytest.mark.parametrize(
    "sent",
    [b"", b"\0\xff" * 100, b"[" * 100_000 + b"\n", b"[1]\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 2**21],
    ids=["silence", "garbage", "deep", "list", "other program", "long"],
)
def test_a_stranger_is_not_admitted(sent: bytes, hosts: Hosts) -> None:
    published = start_leader(hosts)
    assert (hosts.run / "supervisors").stat().st_mode & 0o077 == 0
    with connect(published) as stranger:
        with contextlib.suppress(OSError):  # the leader may close it before it has read everything
            stranger.sendall(sent)
        await_close(stranger)
    assert finish_all(hosts) == ""


@pytest.mark.parametrize(
    ("token", "change", "said"),
    [
        ("guess", {}, ""),
        ("", {}, ""),
        (None, {"index": 0}, "refuses host 0 (?[31mother?): the leader has this index, too; change"),
        (None, {"index": 2, "processes": 3}, "refuses host 2 (?[31mother?): the job has 2 host(s); correct"),
        (None, {"index": -1}, ""),
        (None, {"index": True}, ""),
    ],
    ids=["another token", "no token", "the leader's index", "too large", "negative", "bool"],
)
def test_a_supervisor_that_is_none_of_the_job_is_refused(
    token: str | None, change: dict[str, Any], said: str, hosts: Hosts
) -> None:
    """Check also that a refusal is one line, however often it happens."""
    published = start_leader(hosts)
    known = published.token if token is None else token
    for _ in range(2):
        with connect(published) as stranger:
            peer = Peer(stranger, known.encode())
            assert peer.receive() == []  # the nonce of the leader
            peer.send(HELLO | change)
            await_close(stranger)
    lines = finish_all(hosts).splitlines()
    assert len(lines) == bool(said) and all(line.startswith(f"supervise: {said}") for line in lines)
    assert all(line.isprintable() for line in lines)


def test_a_host_that_the_job_does_not_have_is_told_so(hosts: Hosts) -> None:
    start_leader(hosts)
    address, port = hosts.address.split(":")
    job = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": "3", "RANK": "2"}
    third = start_supervisor(hosts.folder, "--run-directory", hosts.run, "--", "true", **job)
    _, stderr = finish(third, 2)
    assert stderr.startswith("error: supervise: the leader refuses host 2 (") and stderr.count("\n") == 1
    assert "the job has 2 host(s); correct --distributed.process-id there" in stderr
    finish_all(hosts)


@pytest.mark.skipif(sys.platform != "linux", reason="the open files of a process are listed by Linux only")
def test_many_silent_connections_keep_no_host_out(hosts: Hosts) -> None:
    published = start_leader(hosts)
    with contextlib.ExitStack() as scope:
        for _ in range(MAX_WAITING + 50):
            stranger = scope.enter_context(connect(published))
            assert stranger.recv(10).startswith(b"jaxopt_llm")  # it was accepted
        files = os.listdir(f"/proc/{hosts.running[0].pid}/fd")
        assert len(files) < MAX_WAITING + 25
        finish_all(hosts)


@pytest.mark.skipif(sys.platform != "linux", reason="the limits of another process are set on Linux only")
def test_a_leader_that_may_open_no_more_files_waits_for_some(hosts: Hosts) -> None:
    published = start_leader(hosts)
    pid = hosts.running[0].pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    with connect(published):
        time.sleep(1)
        assert hosts.running[0].poll() is None
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        finish_all(hosts)


def test_a_leader_without_the_token_is_not_obeyed(hosts: Hosts) -> None:
    """It listens at the published address, and knows all that is sent there."""
    listener, published = publish_leader(hosts.run, "127.0.0.1")
    place = {"coordinator": hosts.address, "processes": 2, "index": 1, "flags": [], "hold_seconds": 0.0}
    hosts.start(1)
    with listener:
        listener.settimeout(DEADLINE)
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(DEADLINE)
                peer = Peer(connection, b"guess", accepted=True)
                while (sent := connection.recv(65536, socket.MSG_PEEK)).count(b"\n") < 2:  # its nonce and the hello
                    time.sleep(0.01)
                assert published.token.encode() not in sent
                with pytest.raises(NotTrustedError):
                    peer.receive()
                peer.send({"welcome": 1})
                peer.send({"start": place})
                await_close(connection)
    assert starts(hosts.home(1)) == 0
    hosts.start(0)
    hosts.finish()
    assert starts(hosts.home(1)) == 1


def test_a_message_that_comes_together_with_the_welcome_is_obeyed(hosts: Hosts) -> None:
    listener, published = publish_leader(hosts.run, "127.0.0.1")
    hosts.start(1)
    listener.settimeout(DEADLINE)
    with listener, listener.accept()[0] as connection:
        connection.settimeout(DEADLINE)
        leader = Peer(connection, published.token.encode(), accepted=True)
        while not leader.receive():
            pass  # the nonce, before the hello
        leader.connection = held = Held()  # type: ignore[assignment]
        leader.send({"welcome": 1})
        leader.send({"exit": 4})
        connection.sendall(held.sent)
        assert hosts.running[1].wait(60) == 4


def test_all_programs_of_a_job_get_the_same_token(hosts: Hosts) -> None:
    for index in range(2):
        hosts.plan(index, NOTE_TOKEN + wait_for("go") + "exit 1", NOTE_TOKEN + "exit 0")
    published = start_leader(hosts)
    hosts.start(1)
    (hosts.run / "go").touch()
    hosts.finish()
    (token,) = {*hosts.tokens(0), *hosts.tokens(1)}
    assert len(hosts.tokens(0)) == len(hosts.tokens(1)) == 2
    assert len(token) == 64 and token != published.token


@pytest.mark.parametrize(("given", "kept"), [("of the user", True), (" ", False)])
def test_a_token_of_the_user_is_kept(given: str, kept: bool, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXOPT_LLM_TOKEN", given)
    for index in (0, 1):
        hosts.start(index)
    hosts.finish()
    assert ({*hosts.tokens(0), *hosts.tokens(1)} == {given}) == kept


def test_texts_of_other_hosts_have_no_control_characters(hosts: Hosts) -> None:
    hosts.plan(0, "exit 5", "exit 0")
    hosts.plan(1, "printf '\\033[31mred\\n' >&2; exit 1", "exit 0")
    for index in (0, 1):
        hosts.start(index)
    hosts.finish()
    (fault,) = faults(hosts.run)
    assert fault["what"] == "?[31mred"
