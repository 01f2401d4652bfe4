"""Fixtures of the outer server."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from outer_groups import PATIENCE, Running

from jaxopt_llm.outer import client, server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(client, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(client, "PAUSE_SECONDS", 0.02)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as scope:

        def start(groups: int, wait: float = PATIENCE) -> Running:
            running = Running(tmp_path, groups, wait)
            scope.callback(running.stop)
            return running

        yield start
