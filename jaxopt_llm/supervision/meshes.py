"""Settings for fewer hosts than the recipe is for.

The planner chooses them in a process of its own, because it needs JAX.
"""

import os
import subprocess
import sys

from jaxopt_llm.core import json_files
from jaxopt_llm.supervision.task import Task

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
            most, least: bounds of the numbers, of which the largest come first.
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
