"""An outer server in this process, and groups that change their masters at random."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxopt_llm.outer import client, server
from jaxopt_llm.outer.client import Answer, Base, Member, OuterClient
from jaxopt_llm.outer.codes import Layout
from jaxopt_llm.outer.server import OuterServer

LAYOUT = Layout(((7, 0), (256, 128)))
RATE, MOMENTUM = 0.7, 0.9
TOKEN = b"secret"
PATIENCE = 30.0  # seconds; what the tests wait for takes milliseconds


class Running:
    """A server in this process, at the same port after each start."""

    def __init__(self, directory: Path, groups: int, wait: float) -> None:
        self.new_settings = False
        self.directory, self.groups, self.wait, self.port = directory, groups, wait, 0
        self.start()

    def start(self) -> None:
        listener = server.open_listener(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._stopped = False
        ready = threading.Event()

        def run() -> None:
            arguments = (listener, self.directory, self.groups, self.wait, TOKEN)
            with listener, OuterServer(*arguments, new_settings=self.new_settings) as running:
                self.server = running
                ready.set()
                running.serve(lambda: self._stopped)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert ready.wait(PATIENCE)

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()

    def client(self, index: int, form: str = "exact", token: bytes = TOKEN, **facts: Any) -> OuterClient:
        known = {"process": 0, "segments": LAYOUT.segments, "rate": RATE, "momentum": MOMENTUM, "form": form}
        groups = facts.pop("groups", self.groups)
        member = Member(index, groups, LAYOUT, form, {**known, "settings": {}, **facts})
        return OuterClient(("127.0.0.1", self.port), member, token)

    def rounds(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "rounds.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def serve_quickly(directory: Path) -> Iterator[Callable[..., Running]]:
    """Yield a function that starts a server for some groups. Servers and clients then look often and wait little."""
    with contextlib.ExitStack() as scope, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "LOOK_SECONDS", 0.01)
        patch.setattr(client, "CONNECT_SECONDS", 1.0)
        patch.setattr(client, "BUSY_SECONDS", 2.0)
        patch.setattr(client, "PAUSE_SECONDS", 0.02)

        def start(groups: int, wait: float = PATIENCE) -> Running:
            running = Running(directory, groups, wait)
            scope.callback(running.stop)
            return running

        yield start


def draw(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(LAYOUT.size).astype(np.float32)


class Group:
    """A group that changes its masters at random."""

    def __init__(self, running: Running, index: int, **options: Any) -> None:
        self.index, self.client = index, running.client(index, **options)
        self.base: Base | None = None
        self.own = draw(1000)
        self.step = 0

    def exchange(self) -> Answer:
        answer = self.client.exchange(self.base, self.step, self.own)
        self.base, self.own = answer.base, answer.base.vector
        return answer

    def train(self, steps: int = 3) -> None:
        self.step += steps
        self.own = self.own - 0.1 * draw(100 * self.step + self.index)


def together(groups: list[Group]) -> list[Answer]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda group: group.exchange(), groups))


def begin(running: Running, **options: Any) -> list[Group]:
    groups = [Group(running, index, **options) for index in range(running.groups)]
    for group in groups:
        group.exchange()
    return groups
