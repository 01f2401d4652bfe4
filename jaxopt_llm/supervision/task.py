"""Program of a supervisor, its place in the job in each round, and its settings for fewer hosts than the recipe's.

The planner chooses these settings in a process of its own, because it needs JAX.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.core import json_files
from jaxopt_llm.distributed.launchers import HOLD_VARIABLE, Job
from jaxopt_llm.distributed.wire import TOKEN_VARIABLE

_OF_THE_JOB = ("distributed.coordinator", "distributed.processes", "distributed.process_id")


@dataclass(frozen=True)
class Place:
    """Place of a host in a round.

    Attributes:
        coordinator: host:port of process 0 of the round.
        flags: settings of `train` for this number of hosts, such as the mesh.
        hold_seconds: time from the start of the program during which its steps may not begin.
    """

    coordinator: str
    processes: int
    index: int
    flags: tuple[str, ...] = ()
    hold_seconds: float = 0.0

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> "Place":
        """Return the place in a message of the leader."""
        return cls(**{**message, "flags": tuple(message["flags"])})


@dataclass(frozen=True)
class Task:
    """Program of a run.

    Attributes:
        words: `train` and its arguments, or a program and its arguments.
        job: the job that the launcher describes.
    """

    words: tuple[str, ...]
    directory: Path
    job: Job

    @property
    def trains(self) -> bool:
        return self.words[0] == "train"

    def command(self, place: Place) -> list[str]:
        """Return the command line of the program."""
        if not self.trains:
            return list(self.words)
        words = self.words
        if not self._is_own(place):
            told = zip(_OF_THE_JOB, (place.coordinator, place.processes, place.index), strict=True)
            flags = (f"--{name.replace('_', '-')}={value}" for name, value in told)
            words = (*drop_settings(words, _OF_THE_JOB), *flags)
        return [sys.executable, "-m", "jaxopt_llm", *words, *place.flags]

    def variables(self, place: Place, token: str) -> dict[str, str]:
        """Return the environment variables that the program gets in addition to the supervisor's.

        They tell `train` when its steps may begin. They tell another program its place, if it is not the place that the
        launcher gave: as torchrun's variables, which `find_job` prefers to variables of other launchers.

        Args:
            token: token of the job's programs; "" for none. One in the supervisor's own environment comes before it.
        """
        is_given = bool(os.environ.get(TOKEN_VARIABLE, "").strip())
        tokens = {TOKEN_VARIABLE: token} if token and not is_given else {}
        if self.trains:
            return {HOLD_VARIABLE: str(time.monotonic() + place.hold_seconds), **tokens}
        if self._is_own(place):
            return tokens
        address, port = place.coordinator.rsplit(":", 1)
        numbers = {"WORLD_SIZE": place.processes, "RANK": place.index, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
        texts = {name: str(number) for name, number in numbers.items()}
        return {"MASTER_ADDR": address, "TORCHELASTIC_USE_AGENT_STORE": "False", **texts, **tokens}

    def _is_own(self, place: Place) -> bool:
        return Job(place.coordinator, place.processes, place.index) == self.job


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_setting(words: Sequence[str], name: str) -> str | None:
    """Return the last value of the flag --name, which is written with dashes or underscores; None: it is not given."""
    found = None
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if _name(flag) == name:
            found = value if equals else next(iter(words[index + 1 :]), None)
    return found


def drop_settings(words: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return a command line without these flags and their values."""
    kept: list[str] = []
    is_value = False
    for word in words:
        flag, equals, _ = word.partition("=")
        if not is_value and _name(flag) not in names:
            kept.append(word)
        is_value = not is_value and _name(flag) in names and not equals
    return tuple(kept)


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""


PLANNER = "jaxopt_llm.planning.search.fewer_hosts"
AHEAD = 4  # numbers of hosts that are planned at a time: each takes up to minutes for a large recipe


class Meshes:
    """Flags of `train` by the number of hosts. A program other than `train` needs none: it finds its mesh itself.

    hosts: number of hosts that the recipe's mesh is for.
    """

    def __init__(self, task: Task, hosts: int) -> None:
        self._task = task
        self._found: dict[int, tuple[str, ...] | None] = {hosts: ()}
        self._hosts = hosts
        self._planner: subprocess.Popen[str] | None = None
        self._asked: tuple[int, ...] = ()

    def knows(self, count: int) -> bool:
        """Return whether `flags` has an answer for a number of hosts."""
        self._collect()
        return not self._task.trains or count in self._found

    def flags(self, count: int) -> tuple[str, ...] | None:
        """Return the flags for a number of hosts that `knows` knows; None if no mesh of them keeps the batch."""
        return self._found[count] if self._task.trains else ()

    def prepare(self, most: int, least: int) -> None:
        """Let the planner choose meshes for some numbers of hosts, while the run goes on. It answers later.

        Args:
            most, least: bounds of the numbers. The largest come first.
        """
        unknown = [count for count in range(most, least - 1, -1) if not self.knows(count)]
        if self._planner is not None or not unknown:
            return
        self._asked = tuple(unknown[:AHEAD])
        counts = ",".join(map(str, self._asked))
        self._planner = subprocess.Popen(
            [sys.executable, "-m", PLANNER, str(self._hosts), counts, *self._task.words[1:]],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def _collect(self) -> None:
        """Read the planner's answer if it is done. One that failed has said why on standard error."""
        if self._planner is None or self._planner.poll() is None:
            return
        answer, _ = self._planner.communicate()
        chosen = json_files.parse(answer) if self._planner.returncode == 0 else {}
        self._found |= {
            count: None if (flags := chosen.get(str(count))) is None else tuple(flags) for count in self._asked
        }
        self._planner = None
