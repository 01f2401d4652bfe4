"""Settings for fewer hosts than the recipe is for.

The planner chooses them in a process of its own, because it needs JAX.
"""

import json
import os
import subprocess
import sys

from jaxopt_llm.supervision.task import Task

PLANNER = "jaxopt_llm.planning.search.fewer_hosts"


class Meshes:
    """Flags of `train` by the number of hosts.

    hosts: number of hosts that the recipe's mesh is for.
    """

    def __init__(self, task: Task, hosts: int) -> None:
        self._task, self._hosts = task, hosts
        self._found: dict[int, tuple[str, ...] | None] = {hosts: ()}
        self._planner: subprocess.Popen[str] | None = None

    def prepare(self, least: int) -> None:
        """Let the planner choose meshes of fewer hosts, while the run goes on. least: the smallest number of hosts."""
        counts = [str(count) for count in range(least, self._hosts) if count not in self._found]
        if self._planner is None and counts and self._task.trains:
            self._planner = subprocess.Popen(
                [sys.executable, "-m", PLANNER, str(self._hosts), ",".join(counts), *self._task.words[1:]],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                text=True,
            )

    def flags(self, count: int) -> tuple[str, ...] | None:
        """Return the flags for a number of hosts; None if no mesh of them keeps the batch.

        A program other than `train` finds its mesh itself.
        """
        if not self._task.trains:
            return ()
        if count not in self._found:
            self.prepare(count)
            assert self._planner is not None
            answer, _ = self._planner.communicate()
            code, self._planner = self._planner.returncode, None
            chosen = json.loads(answer) if code == 0 else {}
            self._found |= {int(number): flags and tuple(flags) for number, flags in chosen.items()}
            self._found.setdefault(count, None)
        return self._found[count]
