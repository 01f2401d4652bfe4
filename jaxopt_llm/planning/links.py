"""Links that collectives use, the traffic of a step, and the time in which the compiled program waits for it.

The instructions of a computation run in the order of the text: kernels one after another, and next to them collectives
one after another. A collective begins at its start, or when the collective before it has ended. At its done the program
waits until it has ended. This wait is exposed; the rest of the collective is hidden by the kernels between start and
done; each kernel takes its time by the roofline. Kernels are assumed to be as fast next to a collective as alone.
"""

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jax.sharding import AbstractMesh

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.chips import Chip
from jaxopt_llm.compiler.instructions import Execution, Instruction, Module, count_executions, list_callees
from jaxopt_llm.planning.free_memory import choose_unit
from jaxopt_llm.planning.kernel_bytes import CONTROL, estimate_kernel, is_kernel, list_fused
from jaxopt_llm.planning.search.roofline import LINK_EFFICIENCY, Transfer


@dataclass(frozen=True)
class Traffic(Transfer):
    """Collectives of a compiled program. What kernels hide of them is a fact of its schedule.

    every: number of steps between two runs. Bytes and seconds are those of a step on average.
    """

    bytes: int
    dtypes: tuple[str, ...]
    times: int
    every: int = 1


def find_link(
    axes: tuple[str, ...], kind: str, mesh: jax.sharding.Mesh | AbstractMesh, chip: Chip, gpus_per_host: int
) -> tuple[str, float]:
    """Return the slowest link between the devices along these mesh axes, and its bandwidth for each device.

    The link is "nvlink" or "pcie" within a host, and "network" between hosts; the bandwidth is in bytes per second.

    If every host holds several GPUs of a group, NCCL uses one ring for each of them. Each ring leaves the host through
    its own network card and carries its share of what a GPU sends. A collective-permute has one neighbour, and
    therefore one card.

    Args:
        axes: names of the mesh axes that the collective runs over.
        kind: name of the collective in XLA, for example "all-gather".
    """
    hosts = np.arange(mesh.size).reshape(mesh.axis_sizes) // gpus_per_host
    dims = [mesh.axis_names.index(axis) for axis in axes]
    groups = np.moveaxis(hosts, dims, range(-len(dims), 0)).reshape(-1, math.prod(mesh.shape[axis] for axis in axes))
    if np.all(groups == groups[:, :1]):
        return chip.peer_link, chip.peer_bytes_per_second
    fewest = min(np.unique(group, return_counts=True)[1].min() for group in groups)
    rings = 1 if kind == "collective-permute" else int(fewest)
    return "network", min(rings * chip.network_bytes_per_second, chip.peer_bytes_per_second)


@dataclass(frozen=True)
class TimedCollective:
    """Collective of a compiled step with the time of all its runs.

    seconds: at the full rate of the link, without latency.
    exposed: share of the time in which the program waits for it.
    """

    collective: hlo.Collective
    link: str
    seconds: float
    exposed: float


def time_collectives(
    collectives: Sequence[hlo.Collective], mesh: jax.sharding.Mesh, chip: Chip, gpus_per_host: int
) -> tuple[TimedCollective, ...]:
    """Return the collectives of a step with their time and the share of it that no kernel hides."""
    if not collectives:
        return ()
    links = {each.name: find_link(each.axes, each.kind, mesh, chip, gpus_per_host) for each in collectives}
    at_full_rate = {each.name: each.wire_bytes / links[each.name][1] for each in collectives}
    attained = {name: seconds / LINK_EFFICIENCY[links[name][0]] for name, seconds in at_full_rate.items()}
    waited = find_exposed_seconds(collectives[0].module, attained, chip)
    return tuple(
        TimedCollective(
            collective=each,
            link=links[each.name][0],
            seconds=at_full_rate[each.name] * each.times,
            exposed=min(waited[each.name] / (attained[each.name] * each.times), 1.0) if attained[each.name] else 0.0,
        )
        for each in collectives
    )


def sum_traffic(
    collectives: Sequence[hlo.Collective], mesh: jax.sharding.Mesh, chip: Chip, gpus_per_host: int
) -> Iterator[Traffic]:
    """Yield the collectives of a step, summed by kind, mesh axes and dtypes."""
    groups = collections.defaultdict(list)
    for timed in time_collectives(collectives, mesh, chip, gpus_per_host):
        groups[timed.collective.axes, timed.collective.kind, timed.collective.dtypes].append(timed)
    for (axes, kind, dtypes), group in groups.items():
        times = sum(each.collective.times for each in group)
        sent = sum(each.collective.wire_bytes * each.collective.times for each in group)
        seconds = sum(each.seconds for each in group)
        hidden = sum(each.seconds * (1 - each.exposed) for each in group)
        yield Traffic(axes, group[0].link, kind, sent, seconds, hidden / seconds if seconds else 0.0, dtypes, times)


def spread_over_steps(traffic: Iterable[Traffic], every: int) -> Iterator[Traffic]:
    """Yield the traffic of a program that runs every so many steps, averaged over the steps."""
    for each in traffic:
        yield replace(each, bytes=round(each.bytes / every), seconds=each.seconds / every, every=every)


def format_traffic(collectives: Sequence[Traffic]) -> list[str]:
    """Return the lines of the table of the collectives of a step."""
    total = sum(each.bytes for each in collectives)
    name, unit = choose_unit(total)
    lines = [f"{'collectives of a step':44} {'times':>7} {f'{name} sent':>9} {'ms':>9} {'overlapped':>10}"]
    for traffic in sorted(collectives, key=lambda traffic: -traffic.seconds):
        kind = f"{' × '.join(traffic.axes)} ({traffic.link}): {traffic.kind} {' '.join(traffic.dtypes)}"
        kind += f", every {traffic.every} steps" if traffic.every > 1 else ""
        sent = f"{traffic.bytes / unit:9.3f} {traffic.seconds * 1e3:9.2f} {traffic.overlapped:10.0%}"
        lines.append(f"  {kind:42} {traffic.times:7,} {sent}")
    seconds = sum(each.seconds for each in collectives)
    return [*lines, f"  {'all':42} {'':7} {total / unit:9.3f} {seconds * 1e3:9.2f}"]


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
