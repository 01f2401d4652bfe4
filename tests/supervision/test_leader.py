"""The leader of a job with hosts whose programs behave as told, and who leads, without processes."""

import json
import selectors
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxopt_llm.distributed import wire
from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.supervision import leader, members, supervisor
from jaxopt_llm.supervision.faults import Journal, RestartBudget, read_hosts
from jaxopt_llm.supervision.host import End
from jaxopt_llm.supervision.leader import Leader, Limits
from jaxopt_llm.supervision.members import Members
from jaxopt_llm.supervision.task import Task

STUCK = -1  # exit code of a program that never ends


class Programs:
    """Programs of a job: host i ends with plan[i][n] at its n-th start."""

    def __init__(self, plan: Sequence[Sequence[int]]) -> None:
        self._plan, self.starts = plan, [list[int]() for _ in plan]  # number of hosts of each start

    def start(self, index: int, count: int) -> int:
        """Return the exit code."""
        self.starts[index].append(count)
        return self._plan[index][len(self.starts[index]) - 1]


class FakeHost:
    """Stands for the leader's own host, with index 0."""

    def __init__(self, programs: Programs, count: int) -> None:
        self.index, self.name, self.stopped, self.running = 0, "host0", False, False
        self._programs, self._count = programs, count
        self._code = STUCK
        self.selector = selectors.DefaultSelector()

    def start(self, command: Sequence[str], variables: dict[str, str]) -> None:
        assert not self.running
        self._code, self.running = self._programs.start(0, int(variables.get("WORLD_SIZE", self._count))), True

    def send(self, signum: int) -> None:
        """Do nothing: what can be killed has ended."""

    def poll(self) -> End | None:
        if not self.running or self._code == STUCK:
            return None
        self.running = False
        return End(0, self.name, self._code, "")

    def forget(self, connection: object) -> None:
        """Nobody has come."""

    def wait(self, seconds: float) -> list[Any]:
        time.sleep(seconds)
        return []

    def say(self, text: str) -> None:
        """Say nothing."""


class FakeMembers(Members):
    """Hosts of a job. The leader's own one is a FakeHost, with index 0.

    The programs of the others say at once that their steps begin, and end some looks later.
    """

    LOOKS = 4

    def __init__(self, host: Any, task: Task, programs: Programs) -> None:
        super().__init__(host, task)
        self._programs, self._run = programs, task.directory
        self._here = list(range(1, len(programs.starts)))
        self._deadline = time.monotonic() + 20
        self._due = list[tuple[int, End]]()  # ends, with the number of looks until they are seen
        self.signals = list[tuple[int, int]]()

    def indices(self) -> list[int]:
        return [*super().indices(), *self._here]

    def address(self, index: int) -> str:
        return "127.0.0.1"

    def seconds_here(self, index: int) -> float:
        return 0.0

    def send(self, index: int, message: dict[str, Any]) -> None:
        if "signal" in message:
            self.signals.append((index, message["signal"]))
        if index == 0:
            super().send(index, message)
        elif "start" in message:
            code = self._programs.start(index, message["start"]["processes"])
            self._due += [] if code == STUCK else [(self.LOOKS, End(index, f"host{index}", code, ""))]
            with (self._run / "events.jsonl").open("a") as file:
                file.write(json.dumps({"event": "start", "time": time.monotonic()}) + "\n")

    def give_up(self, index: int) -> None:
        if index == 0:
            super().give_up(index)
        else:
            self._here.remove(index)
            self._due.append((0, End(index, f"host{index}", None, "cannot be killed")))

    def take_ends(self) -> list[End]:
        ends = [end for looks, end in self._due if looks <= 0]
        self._due = [(looks - 1, end) for looks, end in self._due if looks > 0]
        return [*ends, *super().take_ends()]

    def serve(self, seconds: float) -> None:
        """Serve nobody, and not for ever."""
        assert time.monotonic() < self._deadline


@pytest.mark.parametrize(("stuck", "count"), [((0,), 2), ((1,), 2), ((0, 2), 3)], ids=["own", "other", "both"])
def test_hosts_whose_programs_cannot_be_killed_are_lost(
    stuck: tuple[int, ...], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An elastic job goes on without them, starts nothing beside the programs that are left, and does not grow."""
    for name, seconds in {"STRAGGLER_SECONDS": 0.05, "GIVE_UP_SECONDS": 0.1, "LOOK_SECONDS": 0.01}.items():
        monkeypatch.setattr(leader, name, seconds)
    programs = Programs([[STUCK] if index in stuck else [5, 0] for index in range(count)])
    host: Any = FakeHost(programs, count)
    task = Task(("sh",), tmp_path, Job("127.0.0.1:1234", count, 0))
    hosts = FakeMembers(host, task, programs)
    limits = Limits(hosts=count, least=1, elastic_seconds=0.2)
    assert Leader(host, task, limits, RestartBudget(10, 0.01), hosts).run() == 0
    for index in range(count):
        assert programs.starts[index] == ([count] if index in stuck else [count, count - len(stuck)])
    assert not [sent for _, sent in hosts.signals if sent == signal.SIGTERM]


def test_a_leader_that_does_not_answer_for_long_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen supervisor still has its port, and the kernel accepts connections for it."""
    busy_seconds = 0.4
    for module, name, seconds in (
        (wire, "HELLO_SECONDS", 0.05),
        (supervisor, "SILENCE_SECONDS", busy_seconds),
        (supervisor, "_RETRY_SECONDS", 0.01),
    ):
        monkeypatch.setattr(module, name, seconds)
    led = list[float]()

    def lead(self: Leader) -> int:
        led.append(time.monotonic())
        return 0

    host: Any = FakeHost(Programs([[], []]), 2)
    monkeypatch.setattr(supervisor, "Host", lambda index: host)
    monkeypatch.setattr(Leader, "run", lead)
    frozen, published = members.publish_leader(tmp_path, "127.0.0.1")
    with frozen:
        began = time.monotonic()
        task, limits = Task(("sh",), tmp_path, Job("127.0.0.1:1234", 2, 0)), Limits(2, 1, elastic_seconds=0.1)
        assert supervisor.supervise(task, limits, RestartBudget(10, 0.01)) == 0
    # One that is only busy for a moment is left to lead.
    assert began + busy_seconds < led[0] < began + busy_seconds + 5
    assert members.find_leader(tmp_path) in (None, published)  # the new leader has removed its own address


def test_the_journal_names_the_hosts_of_the_last_round(tmp_path: Path) -> None:
    assert read_hosts(tmp_path) == ()
    written = Journal(tmp_path)
    for hosts in ((0, 2), (1, 2)):
        written.write_hosts(hosts, ("--mesh.fsdp=2",))
    written.write_recovery(3.0)
    assert read_hosts(tmp_path) == (1, 2)
