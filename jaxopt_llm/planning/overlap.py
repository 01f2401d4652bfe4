"""Time in which a program waits for its collectives, by the schedule of the compiled program.

The instructions of a computation run in the order of the text: kernels one after another, and next to them collectives
one after another. A collective begins at its start, or when the collective before it has ended. At its done the program
waits until it has ended. This wait is exposed; the rest of the collective is hidden by the kernels between start and
done, each of which takes its time by the roofline. Kernels are assumed to be as fast next to a collective as alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.chips import Chip
from jaxopt_llm.compiler.instructions import Execution, Instruction, Module, count_executions, list_callees
from jaxopt_llm.planning.kernel_bytes import CONTROL, estimate_kernel, is_kernel, list_fused


def find_exposed_seconds(module: Module, seconds: Mapping[str, float], chip: Chip) -> Mapping[str, float]:
    """Return the time of a step in which the program waits for a collective, by the collective's name.

    The time is that of all runs. A loop without a fixed trip count counts as one run.

    Args:
        seconds: time of one run of each collective, by name.

    Raises:
        KeyError: the chip has no matmuls in a dtype of the program.
    """
    schedule = _Schedule(module, seconds, chip, count_executions(module))
    schedule.run("ENTRY")
    return schedule.waited


@dataclass
class _Transfer:
    """Collective with the times at which it begins and ends."""

    name: str
    begin: float
    end: float


@dataclass
class _Clock:
    """Clock of one run of a computation.

    Attributes:
        transferring: time of all collectives so far, also of those in loops.
        waited: time in which the program waited for each collective, by name.
    """

    now: float = 0.0
    transferring: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)
    _transfers: list[_Transfer] = field(default_factory=list)

    def begin(self, name: str, seconds: float) -> _Transfer:
        begin = max(self.now, self._transfers[-1].end if self._transfers else 0.0)
        self._transfers.append(_Transfer(name, begin, begin + seconds))
        self.transferring += seconds
        self.waited[name] = 0.0
        return self._transfers[-1]

    def wait_for(self, last: _Transfer) -> None:
        """Advance to the end of a collective. Each collective that runs until then is waited for in its own time."""
        if last.end > self.now:
            for each in self._transfers:
                self.waited[each.name] += max(0.0, min(each.end, last.end) - max(each.begin, self.now))
            self.now = last.end

    def run(self, seconds: float, transferring: float = 0.0) -> None:
        """Advance by the time of a kernel or a loop, whose own collectives delay those that are under way."""
        for each in self._transfers:
            if each.end > self.now:
                each.begin, each.end = each.begin + transferring, each.end + transferring
        self.now += seconds
        self.transferring += transferring


@dataclass
class _Schedule:
    module: Module
    seconds: Mapping[str, float]
    chip: Chip
    executions: Mapping[str, Execution]
    waited: dict[str, float] = field(default_factory=dict)  # of all runs

    def run(self, name: str) -> _Clock:
        """Run a computation once, and add the waits of all its runs."""
        computation, clock = self.module[name], _Clock()
        started: dict[str, _Transfer] = {}
        for instruction in computation.values():
            ended = next((started[operand] for operand in instruction.operands if operand in started), None)
            if names := self._list_begun(instruction):
                *_, last = (clock.begin(each, self.seconds[each]) for each in names)
                if instruction.opcode.endswith("-start"):
                    started[instruction.name] = last
                else:
                    clock.wait_for(last)
            elif ended and instruction.opcode.endswith("-done"):
                clock.wait_for(ended)
            elif ended and instruction.opcode == "async-update":
                started[instruction.name] = ended
            elif instruction.opcode in CONTROL:
                for callee in list_callees(instruction):
                    if runs := self._times(callee) / self._times(name):
                        inner = self.run(callee)
                        clock.run(runs * inner.now, runs * inner.transferring)
            elif is_kernel(instruction) and not hlo.count_moved_bytes(computation, instruction):
                fused = list_fused(self.module, instruction)
                clock.run(estimate_kernel(self.module, computation, instruction, fused, self.chip).seconds)
        for each, seconds in clock.waited.items():
            self.waited[each] = seconds * self._times(name)
        return clock

    def _times(self, name: str) -> int:
        """Return the number of runs of a computation; 1 in a loop without a fixed trip count."""
        times = self.executions[name].times
        return 1 if times is None else times

    def _list_begun(self, instruction: Instruction) -> list[str]:
        """Return the names of the collectives that an instruction begins."""
        if instruction.opcode == "async-start":  # it calls a computation with the collective
            callees = (self.module[callee] for callee in list_callees(instruction))
            return [each.name for callee in callees for each in callee.values() if each.name in self.seconds]
        return [instruction.name] if instruction.name in self.seconds else []
