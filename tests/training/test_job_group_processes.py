"""Several processes of one group, in threads: what they agree on after an exchange, and how a stop ends it."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from outer_groups import PATIENCE, draw, serve_quickly

from jaxopt_llm.config import Config, GroupsConfig, TrainingConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed.process_group import Flag
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.outer.client import Answer, Base, ServerBusy, ServerLost
from jaxopt_llm.training import job_groups
from jaxopt_llm.training.job_groups import JobGroup

SIZE, BEGUN, AHEAD = 4, 100, 200
OWN, OUTER = np.full(SIZE, 1, np.float32), np.full(SIZE, 5, np.float32)
OLD = Base(0, 0, "old", np.zeros(SIZE, np.float32))


class Talk:
    """Messages between the processes of a group."""

    def __init__(self, count: int) -> None:
        self._count, self._barrier, self._told = count, threading.Barrier(count, timeout=PATIENCE), [""] * count
        self._stop = Flag("stop", 0, 1)

    def of(self, index: int) -> Any:
        def exchange(message: str) -> list[str]:
            self._told[index] = message
            self._barrier.wait()
            told = list(self._told)
            self._barrier.wait()
            return told

        main = SimpleNamespace(wait=contextlib.nullcontext, beat=lambda: None)
        channel = SimpleNamespace(exchange=exchange)
        return SimpleNamespace(
            index=index, count=self._count, main=main, channel=lambda _: channel, flag=lambda _: self._stop
        )


class Process(JobGroup):
    """Process of a group whose masters are a vector."""

    def __init__(self, index: int, talk: Talk, stopping: Callable[[], bool] = lambda: False) -> None:
        config = replace(
            Config(), training=TrainingConfig(steps=1000, local_steps=3), groups=GroupsConfig(server=("here:1",))
        )
        self.said: list[str] = []
        super().__init__(SimpleNamespace(config=config, processes=talk.of(index)), self.said.append, stopping)  # type: ignore[arg-type]
        self._pieces: Any = SimpleNamespace(read=lambda masters: masters)
        self._client: Any = SimpleNamespace(carried=0, stop=lambda: None)
        self._base = OLD

    def _store(self, state: Any, vector: np.ndarray, adds: bool) -> Any:
        return SimpleNamespace(masters=state.masters + vector if adds else vector, adds=adds)


def run_both(calls: list[Callable[[], Any]]) -> list[Any]:
    def catch(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except InputError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(catch, calls))


def end_exchange(outcome: str) -> job_groups._Exchange:
    """Return an exchange that has ended so."""
    ended = threading.Thread(target=lambda: None)
    ended.start()
    exchange = job_groups._Exchange(BEGUN, OWN, ended)
    if outcome in ("lost", "refused"):
        exchange.error = ServerLost("down") if outcome == "lost" else InputError("groups.server: no")
    else:
        step = AHEAD if outcome == "whole" else BEGUN
        exchange.answer = Answer(Base(1, step, "new", OUTER), whole=outcome == "whole")
    return exchange


@pytest.mark.parametrize("later", [0, 10])
@pytest.mark.parametrize("one", ["lost", "refused", "update", "whole"])
@pytest.mark.parametrize("other", ["lost", "refused", "update", "whole"])
def test_processes_agree_after_every_pair_of_outcomes(
    one: str, other: str, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_groups, "advance_position", lambda state, steps: state)
    talk, trained = Talk(2), np.full(SIZE, 7, np.float32)  # the masters since OWN, where the exchange began
    state: Any = SimpleNamespace(masters=trained if later else OWN)
    pair = [(Process(index, talk), outcome) for index, outcome in enumerate((one, other))]
    results = run_both(
        [lambda p=p, o=o: p._finish(end_exchange(o), state, BEGUN + later) for p, o in pair]  # type: ignore[misc]
    )
    outcomes = {one, other}
    if "refused" in outcomes:
        assert [str(each) for each in results] == ["groups.server: no"] * 2
        return
    for (process, outcome), (after, ahead) in zip(pair, results, strict=True):
        base = process._base
        if "lost" in outcomes and outcomes != {"lost", "update"}:
            assert after is state and ahead is None
            assert base is (None if "whole" in outcomes else OLD)
            continue
        assert ahead == (AHEAD if "whole" in outcomes else None)
        assert (base is OLD) == (outcome == "lost")
        if outcome == "lost":
            np.testing.assert_array_equal(after.masters, state.masters)
        else:
            since = trained - OWN if later and "whole" not in outcomes else 0
            np.testing.assert_array_equal(after.masters, OUTER + since)


def test_a_server_that_has_another_process_of_this_index_refuses_it_and_is_not_silent() -> None:
    process, exchange = Process(0, Talk(1)), end_exchange("lost")
    exchange.error = ServerBusy("group 0 is there already")
    process._finish(exchange, SimpleNamespace(masters=OWN), BEGUN)  # type: ignore[arg-type]
    (line,) = process.said
    assert "is refused: groups.server " in line and "(group 0 is there already): the group trains by itself" in line
    assert "no answer" not in line


@pytest.mark.parametrize("finishes_first", [False, True])
def test_a_stop_of_one_process_ends_the_exchange_of_all(finishes_first: bool, tmp_path: Path) -> None:
    """Group 1 is connected and contributes to no round, or only to that of the process that is stopped."""
    talk, preemption = Talk(2), Preemption()
    with serve_quickly(tmp_path) as start:
        running = start(2, wait=PATIENCE)
        processes = [Process(0, talk), Process(1, talk, preemption.requested)]
        others = [running.client(1, process=index) for index in range(2)]
        for index, process in enumerate(processes):
            process._client = running.client(0, process=index)
            process._base = process._client.exchange(None, 0, draw(1000)).base
            others[index].exchange(None, 0, draw(1000))
        state: Any = SimpleNamespace(masters=draw(1))

        def stop() -> None:
            if finishes_first:
                base = processes[1]._base
                others[1].exchange(base, 3, draw(2))
            time.sleep(0.3)
            preemption._received = 15

        clock = time.monotonic()
        done = run_both([lambda p=p: p.after_step(state, 3) for p in processes] + [stop])  # type: ignore[misc]
        assert time.monotonic() - clock < PATIENCE / 3
        assert [ahead for _, ahead in done[:2]] == [None, None]
        np.testing.assert_array_equal(done[0][0].masters, state.masters)
        assert (done[1][0] is state) == (not finishes_first)
        assert not processes[0].said
