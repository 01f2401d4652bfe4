"""The leader of a job with hosts whose programs behave as told, without processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.supervision import leader
from jaxopt_llm.supervision.host import End
from jaxopt_llm.supervision.leader import Leader, Limits
from jaxopt_llm.supervision.policy import RestartBudget
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

    def __init__(self, programs: Programs) -> None:
        self.index, self.name, self.stopped, self.running = 0, "host0", False, False
        self._programs = programs
        self._code = STUCK

    def start(self, command: Sequence[str], variables: dict[str, str]) -> None:
        assert not self.running
        self._code, self.running = self._programs.start(0, int(variables.get("WORLD_SIZE", 2))), True

    def send(self, signum: int) -> None:
        """Do nothing: what can be killed has ended."""

    def poll(self) -> End | None:
        if not self.running or self._code == STUCK:
            return None
        self.running = False
        return End(0, self.name, self._code, "")

    def say(self, text: str) -> None:
        """Say nothing."""


class FakeMembers:
    """Stands for host 1."""

    def __init__(self, programs: Programs) -> None:
        self._programs, self._here, self._ends = programs, [1], list[End]()
        self.program_token = ""

    def indices(self) -> list[int]:
        return self._here

    def address(self, index: int) -> str:
        return "127.0.0.1"

    def seconds_here(self, index: int) -> float:
        return 0.0

    def send(self, index: int, message: dict[str, Any]) -> None:
        if "start" in message:
            code = self._programs.start(index, message["start"]["processes"])
            self._ends += [] if code == STUCK else [End(index, "host1", code, "")]

    def give_up(self, index: int) -> None:
        self._here = []
        self._ends.append(End(index, "host1", None, "cannot be killed"))

    def take_ends(self) -> list[End]:
        ends, self._ends = self._ends, []
        return ends

    def serve(self, seconds: float) -> None:
        """Serve nobody."""

    def superseded(self, directory: Path) -> bool:
        return False

    def dismiss(self, code: int) -> None:
        """Dismiss nobody."""


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_host_whose_program_cannot_be_killed_is_lost(
    stuck: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An elastic job goes on without it, and starts nothing beside the program that is left."""
    for name, seconds in {"STRAGGLER_SECONDS": 0.05, "GIVE_UP_SECONDS": 0.1}.items():
        monkeypatch.setattr(leader, name, seconds)
    programs = Programs([[STUCK], [5, 0]] if stuck == 0 else [[5, 0], [STUCK]])
    host: Any = FakeHost(programs)
    members: Any = FakeMembers(programs)
    task = Task(("sh",), tmp_path, Job("127.0.0.1:1234", 2, 0))
    limits = Limits(hosts=2, least=1, elastic_seconds=0.2)
    assert Leader(host, task, limits, RestartBudget(10, 0.01), members).run() == 0
    assert programs.starts[1 - stuck] == [2, 1]
    assert programs.starts[stuck] == [2]
