"""Program of a supervisor, and its place in the job in each round."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxopt_llm.distributed.handshake import TOKEN_VARIABLE
from jaxopt_llm.distributed.hold import HOLD_VARIABLE
from jaxopt_llm.distributed.launchers import Job

_OF_THE_JOB = ("distributed.coordinator", "distributed.processes", "distributed.process_id")


@dataclass(frozen=True)
class Place:
    """Place of a host in a round.

    Attributes:
        coordinator: host:port of process 0 of the round.
        flags: settings of `train` for this number of hosts, such as those of the mesh.
        hold_seconds: time from the start of the program during which its steps may not begin.
    """

    coordinator: str
    processes: int
    index: int
    flags: tuple[str, ...] = ()
    hold_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Place":
        return cls(**{**values, "flags": tuple(values["flags"])})


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
        """Return the variables of the program, beside those of the supervisor.

        They tell `train` when its steps may begin, and another program its place, if the launcher named another one.
        These are torchrun's, which `find_job` prefers to those of other launchers.

        Args:
            token: token of the job's programs; "" for none. One in the supervisor's own environment comes before it,
                and for the program `distributed.token_file` comes before both.
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
