"""Connections to the outer server that do not keep to the rules, and what becomes of the groups."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outer_groups import LAYOUT, PATIENCE, TOKEN, Group, Running, begin, draw, serve_quickly, together

from jaxopt_llm.distributed import acceptor, handshake
from jaxopt_llm.distributed.handshake import Hello
from jaxopt_llm.distributed.peer import Peer
from jaxopt_llm.outer import client, wire
from jaxopt_llm.outer.client import ServerLost


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with serve_quickly(tmp_path) as start:
        yield start


def knock(running: Running) -> tuple[socket.socket, Peer, str]:
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE)
    peer = Peer(connection)
    greeting = peer.receive_one(time.monotonic() + PATIENCE)
    assert greeting is not None
    return connection, peer, greeting["nonce"]


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(PATIENCE)
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return True


def join_by_hand(running: Running, index: int) -> wire.Wire:
    connection, peer, nonce = knock(running)
    member = running.client(index)._member
    hello = Hello(index, 2, "host", member.facts, "mine")
    peer.send(handshake.sign(TOKEN, nonce, hello.__dict__))
    signed = peer.receive_one(time.monotonic() + PATIENCE)
    return wire.Wire(connection, TOKEN, "mine", handshake.open_signed(TOKEN, "mine", signed)["nonce"])


def send(joined: wire.Wire, message: dict[str, Any], payload: np.ndarray) -> None:
    with contextlib.suppress(ConnectionError):  # the server closes it when it has read the first line
        joined.send(message, payload)


def test_strangers_do_no_harm(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "HELLO_SECONDS", 0.5)
    running = run(2)
    groups = begin(running)
    silent = knock(running)[0]
    garbage = knock(running)[0]
    garbage.sendall(b"\x00\xff" * 1000 + b"\n")
    deep = knock(running)[0]
    deep.sendall(b"[" * 10_000 + b"\n")
    unknown, peer, nonce = knock(running)
    peer.send(handshake.sign(b"guess", nonce, Hello(0, 2, "host", {}, "mine").__dict__))
    assert all(map(is_closed, (silent, garbage, deep, unknown)))
    for group in groups:
        group.train()
    assert not any(answer.whole for answer in together(groups))


@pytest.mark.parametrize("attack", ["size", "content", "kind", "no kind", "number", "unsigned", "replayed"])
def test_a_wrong_message_of_a_member_ends_only_its_connection(attack: str, run: Callable[..., Running]) -> None:
    running = run(2)
    other = Group(running, 0)
    other.exchange()
    joined = join_by_hand(running, 1)
    payload = LAYOUT.encode(draw(5), "exact")
    message = {"kind": "change", "round": 0, "step": 3, "base": ""}
    if attack == "size":
        send(joined, message, np.append(payload, payload[:4]))
    elif attack == "content":
        sent, real = [], joined._connection
        joined._connection = type("Recorder", (), {"sendall": lambda self, data: sent.append(bytes(data))})()  # type: ignore[assignment]
        joined.send(message, payload)
        joined._connection = real
        whole = bytearray(b"".join(sent))
        whole[whole.index(b"\n") + 1] ^= 1  # the first byte of the payload
        real.sendall(whole)
    elif attack == "unsigned":
        joined._connection.sendall(json.dumps(message | {"bytes": 0, "sha256": ""}).encode() + b"\n")
    elif attack == "replayed":
        joined.send({"kind": "fetch", "round": 0, "step": 0, "base": ""})
        joined._sent = 0
        joined.send({"kind": "fetch", "round": 0, "step": 0, "base": ""})
    else:
        wrong = {"kind": {"kind": "other"}, "no kind": {"kind": []}, "number": {"round": -1}}[attack]
        send(joined, message | wrong, payload)
    assert is_closed(joined._connection)
    other.train()
    answer = other.exchange()
    assert not answer.whole and running.rounds()[-1]["contributed"] == [0]


def test_a_server_that_is_no_outer_server_is_lost(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Running]) -> None:
    monkeypatch.setattr(client, "GREETING_SECONDS", 0.3)
    running = run(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        other = running.client(0)
        other._address = silent.getsockname()
        with pytest.raises(ServerLost):
            other.exchange(None, 0, draw(1))
