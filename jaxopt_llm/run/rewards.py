"""Rewards of answers: functions of the user, which run in a process of their own with a time limit.

A function has the arguments of TRL's: function(prompts=..., completions=..., completion_ids=..., **columns) returns a
list with a number for each answer, or None where it does not apply. A prompt that is a text has answers that are
texts; one that is a list of messages has answers that are lists of one message. columns: the other columns of the rows.

This file is also the program of that process: python -m jaxopt_llm.run.rewards FILE:FUNCTION ... It writes the names
of the functions, reads a line of JSON for each step, and writes a line with the rewards.
"""

import contextlib
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxopt_llm.config import Config
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.functions import describe_failure, load_functions

RESERVED = ("mean", "std", "equal_groups")  # names of metrics beside those of the functions (run/rollouts.py)
START_SECONDS = 120.0  # time limit of the start, which imports the user's files


class Rewards:
    """Process of the functions that reward answers.

    Attributes:
        names: names of the functions.
    """

    def __init__(self, functions: Sequence[str], seconds: float) -> None:
        """Start the process. functions: each FILE:FUNCTION. seconds: time limit of `compute`.

        Raises:
            InputError: a function does not exist, or its file fails.
        """
        command = [sys.executable, "-m", "jaxopt_llm.run.rewards", *functions]
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}  # the devices are the run's
        self._seconds = seconds
        # In a session of its own, because the run still needs it when a signal of the terminal stops both.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self.names: list[str] = self._ask(None, START_SECONDS)

    def compute(
        self, prompts: Sequence[Any], completions: Sequence[Any], /, **columns: Sequence[Any]
    ) -> dict[str, Any]:
        """Return the rewards of answers by the name of the function: a number, or None where it does not apply.

        Raises:
            InputError: a function fails, takes too long or returns something else; or no function rewards an answer.
        """
        found = self._ask({"prompts": prompts, "completions": completions, **columns}, self._seconds)
        for index in range(len(prompts)):
            if all(of_function[index] is None for of_function in found):
                self.close()
                raise InputError(f"rollouts.rewards: no function rewards the answer to {str(prompts[index])[:80]!r}")
        return dict(zip(self.names, found, strict=True))

    def close(self) -> None:
        """End the process, and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _ask(self, request: Any, seconds: float) -> Any:
        """Return the answer of the process to a request, or what it writes first if there is none."""
        lines: list[bytes] = []

        def exchange() -> None:
            assert self._process.stdin is not None and self._process.stdout is not None
            with contextlib.suppress(OSError, ValueError):  # the process has ended
                if request is not None:
                    self._process.stdin.write(json.dumps(request).encode() + b"\n")
                    self._process.stdin.flush()
                lines.append(self._process.stdout.readline())

        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join(seconds)
        problem = ""
        if thread.is_alive():
            problem = f"took longer than {seconds:g} s; make them faster, or set a larger --rollouts.reward-seconds"
        elif not lines or not lines[0]:
            problem = f"ended their process (exit code {self._process.wait()})"
        elif problem := (answer := json_files.parse(lines[0])).get("error", ""):
            problem = f"failed: {problem}"
        if problem:
            self.close()
            thread.join()
            raise InputError(f"rollouts.rewards: the functions {problem}")
        return answer["found"]


def check_rewards(config: Config) -> None:
    """Raise InputError if the functions of `rollouts.rewards` cannot be loaded."""
    if config.draws and config.rollouts.rewards:
        Rewards(config.rollouts.rewards, config.rollouts.reward_seconds).close()


def _load(names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Return the functions by their names without the file."""
    found = dict[str, Callable[..., Any]]()
    for each, function in zip(names, load_functions(names), strict=True):
        name = each.rpartition(":")[2]
        if name in found or name in RESERVED:
            taken = "a metric of all rewards" if name in RESERVED else "another function"
            raise InputError(f"{each}: {taken} has the same name; rename the function")
        found[name] = function
    return found


def _call(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Return what a function returns. Raises InputError if it does not take the arguments."""
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise InputError(
            f"{function.__name__}: {error}; its arguments are {', '.join(given)}: let it take **columns for the rest"
        ) from error
    return function(**given)


def _check(name: str, values: Any, count: int) -> list[float | None]:
    """Return what a function returned as numbers. Raises InputError if it is not one number for each answer."""
    try:
        numbers = [None if value is None else float(value) for value in values]
    except (TypeError, ValueError):
        raise InputError(f"{name} returned no list of numbers, but {str(values)[:80]!r}") from None
    if len(numbers) != count:
        raise InputError(f"{name} returned {len(numbers)} rewards for {count} answers")
    if wrong := [number for number in numbers if number is not None and not math.isfinite(number)]:
        raise InputError(f"{name} returned a reward that is not finite: {wrong[0]}")
    return numbers


def main() -> int:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what functions print goes to the screen

    def reply(compute: Callable[[], Any]) -> bool:
        try:
            answer = {"found": compute()}
        except Exception as error:  # functions of the user raise anything
            answer = {"error": describe_failure(error)}
        print(json.dumps(answer), file=replies, flush=True)
        return "found" in answer

    functions: dict[str, Callable[..., Any]] = {}

    def load() -> list[str]:
        functions.update(_load(sys.argv[1:]))
        return list(functions)

    alive = reply(load)
    while alive and (line := sys.stdin.readline()):
        given = json_files.parse(line)
        count = len(given["prompts"])
        alive = reply(lambda: [_check(name, _call(function, given), count) for name, function in functions.items()])  # noqa: B023
    return 0


if __name__ == "__main__":
    sys.exit(main())
