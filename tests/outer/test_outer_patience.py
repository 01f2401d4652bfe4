"""Waits of the outer server and its clients: for a slow disk, a frozen server, a lost host and a full log."""

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outer_groups import LAYOUT, PATIENCE, Group, Running, begin, draw, serve_quickly, together

from jaxopt_llm.outer import server, store, wire
from jaxopt_llm.outer.client import Member, OuterClient, ServerLost

SILENCE = 1.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with serve_quickly(tmp_path) as start:
        yield start


def test_the_first_masters_may_take_long_to_save(run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than an end that is silent is waited for. Meanwhile other processes can join."""
    saves, save = threading.Event(), store.save

    def save_slowly(*arguments: Any) -> None:
        saves.set()
        time.sleep(3 * SILENCE)
        save(*arguments)

    monkeypatch.setattr(store, "save", save_slowly)
    monkeypatch.setattr(wire, "SILENCE_SECONDS", SILENCE)
    monkeypatch.setattr(server, "ALIVE_SECONDS", SILENCE / 10)
    running = run(2)
    first, second = Group(running, 0), Group(running, 1)
    other, late = running.client(0, process=1), draw(7)
    with ThreadPoolExecutor() as pool:
        offered = pool.submit(first.exchange)
        assert saves.wait(PATIENCE)
        clock = time.monotonic()
        other._connect()
        second.own = late
        answered = pool.submit(second.exchange)
        time.sleep(SILENCE / 2)
        assert second.client._wire is not None and time.monotonic() - clock < 2 * SILENCE
        assert not offered.done() and not answered.done()
        assert not offered.result().whole and answered.result().whole
    np.testing.assert_array_equal(second.own, first.own)
    other.stop()


def test_a_connection_ends_if_its_host_acknowledges_nothing(run: Callable[..., Running]) -> None:
    """Without a limit of its own, the kernel sends for 15 minutes. Linux asks no host that owes an acknowledgement."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("this system has no such limit")
    running = run(1)
    (group,) = begin(running)
    (theirs,) = running.server._wires
    for each in (theirs, group.client._wire):
        assert each is not None
        assert each._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_a_stop_does_not_wait_for_a_server_that_is_frozen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen, ThreadPoolExecutor() as pool:
        client = OuterClient(frozen.getsockname(), Member(0, 2, LAYOUT, "exact", {}), b"")
        clock = time.monotonic()
        exchanged = pool.submit(client.exchange, None, 0, draw(1))
        with frozen.accept()[0]:
            time.sleep(0.2)
            client.stop()
            with pytest.raises(ServerLost):
                exchanged.result()
        assert time.monotonic() - clock < 5


class FullDisk:
    """File on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        pass


def test_a_server_whose_output_nobody_takes_goes_on(
    run: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    running = run(2)
    groups = begin(running)
    for group in groups:
        group.train()
    assert not any(answer.whole for answer in together(groups))
    for group in groups:
        group.client.stop()
    end = time.monotonic() + PATIENCE
    while (connected := running.server._lanes[0].rounds.connected) and time.monotonic() < end:
        time.sleep(0.01)
    assert not connected
