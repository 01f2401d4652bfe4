"""The supervisor that decides for all hosts of a job: when a round begins, with which hosts, and what follows it.

A round begins when all hosts are there, and ends when the program has ended on all of its hosts. So the programs of a
job start at the same time, however long each host was away.

An elastic job waits for missing hosts for a limited time. Meanwhile the programs of the hosts that are there start,
compile and restore, and then hold (`hold_start` in distributed/launchers.py). They train when the time is over. If more
hosts are there before, they give way to a larger round.
"""

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxopt_llm.config.parallel import parse_address
from jaxopt_llm.core.errors import ProcessLost
from jaxopt_llm.supervision.faults import (
    FINAL,
    STOPPED,
    Journal,
    RestartBudget,
    Strikes,
    find_cause,
    find_final_code,
    last_start,
    newest_checkpoint,
    read_hosts,
)
from jaxopt_llm.supervision.host import End, Host
from jaxopt_llm.supervision.members import Members
from jaxopt_llm.supervision.task import Meshes, Place, Task, join_address

LOOK_SECONDS = 0.5  # between two looks at the run's files and at the clock
# Time that the other programs have to end after the first one has failed. They can do nothing useful: a checkpoint
# needs all of them. One that is frozen, or stuck in a driver, never ends by itself.
STRAGGLER_SECONDS = 20.0
# After this time, a program that SIGKILL has not ended counts as lost with its host. It waits in the kernel, for a disk
# or a driver.
GIVE_UP_SECONDS = 60.0
# As STRAGGLER_SECONDS, but before the first step, where a process that has not met the others would wait for the one
# that is gone. It gets SIGTERM then, after which it ends with 75.
STARTING_SECONDS = 3.0
# A host that comes back within this time has lost no more than its supervisor, as a rule, so the others do not prepare.
PATIENCE = 0.1  # of the limit
LEAST_PATIENCE_SECONDS = 10.0


@dataclass
class Wait:
    """Wait for missing hosts.

    Attributes:
        limit: seconds after which the job goes on without them; infinite: never.
        prepares: the programs of the hosts that are there may start before the limit, and hold.
    """

    limit: float
    prepares: bool
    _since: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float:
        return max(0.0, self._since + self.limit - time.monotonic())

    def lets_begin(self) -> bool:
        """Return whether a round without the missing hosts may begin, to train or to prepare."""
        waited = time.monotonic() - self._since
        return waited >= self.limit or (self.prepares and waited >= max(PATIENCE * self.limit, LEAST_PATIENCE_SECONDS))


@dataclass
class Round:
    """Programs that start together, one on each of some hosts.

    Attributes:
        hosts: their indices.
        start_before: event of the run's last start before the round.
        hold_until: before this time its steps do not begin.
        trains: its steps have begun.
        gives_way: it is ended for a larger one before its first step.
        fails_early: one of its programs has failed while it held.
        stops_start: the programs that are left were told to stop before the first step.
        killed: the hosts on which a program was left over, and was killed.
    """

    hosts: tuple[int, ...]
    start_before: dict[str, Any]
    hold_until: float = 0.0
    trains: bool = False
    gives_way: bool = False
    fails_early: bool = False
    stops_start: bool = False
    killed: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Limits:
    """Numbers of hosts of a round.

    Attributes:
        hosts: of the recipe's mesh; further ones wait as spares.
        least: smallest number of a round that begins without hosts that are missing.
        elastic_seconds: how long missing hosts are waited for; None: without limit.
    """

    hosts: int
    least: int
    elastic_seconds: float | None


class Leader:
    """Leader of a job. host: its own one, which is one of the members."""

    def __init__(self, host: Host, task: Task, limits: Limits, budget: RestartBudget, members: Members) -> None:
        self._host, self._task, self._limits, self._members = host, task, limits, members
        self._budget = budget
        self._meshes = Meshes(task, limits.hosts)
        self._journal = Journal(task.directory)
        self._fault_at: float | None = None  # until the run is back
        self._not_before = time.monotonic()  # end of the pause
        self._wait: Wait | None = None  # for missing hosts; None: no wait has begun
        self._round = Round((), last_start(task.directory))
        # The hosts of the last round that was allowed to train, of another leader if there was one. By itself, a job
        # has all hosts.
        self._announced = read_hosts(task.directory) or tuple(range(limits.hosts))
        self._strikes = Strikes(task.directory, self._journal)

    def run(self) -> int | None:
        """Lead rounds until the job ends, and return its exit code; None: another supervisor leads."""
        while self._gather():
            grows, ends = self._run_round()
            own = next((end.code for end in ends if end.index == self._host.index), None)
            if self._host.stopped:
                return STOPPED if own is None else own
            is_complete = all(end.code is not None for end in ends)
            if is_complete and (self._round.gives_way or (grows and all(end.code == STOPPED for end in ends))):
                continue  # a round that gives way has nothing to save
            if is_complete and self._round.fails_early and self._wait is not None:
                self._wait.prepares = False
                codes = ", ".join(str(end.code) for end in ends)
                self._host.say(f"the prepared programs ended with exit codes {codes}; waits for missing hosts")
                continue
            final = self._judge(ends)
            if final is not None:
                self._members.dismiss(final)
                return final
        return STOPPED if self._host.stopped else None

    def _gather(self) -> bool:
        """Wait for the hosts of the next round, and begin it. Return False if there is none that this host leads."""
        if self._wait is None:
            limit = math.inf if self._limits.elastic_seconds is None else self._limits.elastic_seconds
            # At the start of a job, hosts come one after the other: preparing for each number is wasted.
            self._wait = Wait(limit, prepares=self._task.trains and self._fault_at is not None)
        while not self._host.stopped and not self._members.superseded():
            self._members.take_ends()  # hosts that were lost since the last round, and are back
            now, present = time.monotonic(), self._members.indices()
            is_full = len(present) >= self._limits.hosts
            may_begin = now >= self._not_before and (is_full or self._wait.lets_begin())
            if may_begin and (chosen := self._choose(present)):
                self._begin(chosen, 0.0 if is_full else self._wait.seconds_left())
                return True
            self._members.serve(LOOK_SECONDS if now >= self._not_before else min(LOOK_SECONDS, self._not_before - now))
        return False

    def _choose(self, present: Sequence[int]) -> tuple[int, ...]:
        """Return the hosts of the largest round that has a mesh, () if there is none or it is not known yet.

        Hosts with too many strikes are used only to fill a round up. An elastic job prefers a smaller round to them.
        """
        good = [index for index in present if not self._strikes.avoids(index)]
        every = good + [index for index in present if index not in good]
        for hosts in (every,) if self._limits.elastic_seconds is None else (good, every):
            for count in range(min(len(hosts), self._limits.hosts), self._limits.least - 1, -1):
                if not self._meshes.knows(count):
                    self._meshes.prepare(count, self._limits.least)
                    return ()
                if self._meshes.flags(count) is not None:
                    return tuple(sorted(hosts[:count]))
        return ()

    def _begin(self, chosen: tuple[int, ...], hold_seconds: float) -> None:
        """Start the program on the hosts of a round. hold_seconds: time from now during which it may not train."""
        flags = self._meshes.flags(len(chosen))
        assert flags is not None
        hold_until = time.monotonic() + hold_seconds
        if hold_seconds:
            self._host.say(f"prepares {_list_hosts(chosen)}, and waits {hold_seconds:.0f} s more for the others")
        else:
            self._announce(chosen)
        self._round = Round(chosen, last_start(self._task.directory), hold_until)
        for rank, index in enumerate(chosen):
            place = Place(self._coordinator(chosen[0]), len(chosen), rank, flags, hold_seconds)
            self._members.send(index, {"start": asdict(place)})
        if self._limits.elastic_seconds is not None:
            self._meshes.prepare(len(chosen) - 1, self._limits.least)

    def _announce(self, chosen: tuple[int, ...]) -> None:
        """Say on which hosts the job goes on, if they have changed."""
        if chosen != self._announced:
            self._host.say(f"continues on {_list_hosts(chosen)}")
            self._journal.write_hosts(chosen, self._meshes.flags(len(chosen)) or ())
        self._announced = chosen

    def _coordinator(self, first: int) -> str:
        """Return host:port of process 0 of a round. first: the host that it runs on."""
        if first == 0:
            return self._task.job.coordinator
        return join_address(self._members.address(first), parse_address(self._task.job.coordinator)[1])

    def _run_round(self) -> tuple[bool, list[End]]:
        """Wait until the program has ended on all hosts of the round. Return whether it ended to grow, and the ends."""
        ends: list[End] = []
        grows, broken_at, current = False, None, self._round
        while waited := set(current.hosts) - {end.index for end in ends}:
            for end in self._members.take_ends():
                if end.index in waited:
                    ends.append(end)
                    waited.discard(end.index)
            if self._host.stopped and not self._host.running:
                break
            now = time.monotonic()
            if broken_at is None and self._is_broken(ends):
                broken_at = now
                self._fault_at = self._fault_at or now
                current.fails_early = now < current.hold_until
            elif broken_at is not None:
                self._end_stragglers(waited, now - broken_at)
                if now - broken_at > GIVE_UP_SECONDS:
                    for index in waited:
                        self._members.give_up(index)  # its end is among those that are taken next
            if not ends and not grows and not self._host.stopped:
                if now >= current.hold_until:
                    self._announce(current.hosts)
                self._note_start(now)
                if current.trains and self._may_grow():
                    grows = True
                    self._signal(current.hosts[:1], signal.SIGTERM)  # all save, and end with 75
                elif now < current.hold_until and len(self._choose(self._members.indices())) > len(current.hosts):
                    grows = current.gives_way = True
                    broken_at = now
                    self._signal(current.hosts, signal.SIGTERM)
                    if len(self._members.indices()) >= self._limits.hosts:
                        self._wait = None
            if waited:
                self._members.serve(LOOK_SECONDS)
        return grows, ends

    def _is_broken(self, ends: Sequence[End]) -> bool:
        """Return whether the other programs can do nothing useful: one has failed, or was stopped at the start."""
        return any(end.code not in (0, STOPPED) or (end.code == STOPPED and self._starts()) for end in ends)

    def _starts(self) -> bool:
        """Return whether a round of `train` has not come to its first step."""
        before = self._round.start_before
        return self._task.trains and not self._round.trains and last_start(self._task.directory) == before

    def _end_stragglers(self, left: set[int], seconds: float) -> None:
        """End the programs that are left some seconds after the round was broken."""
        if seconds > (STARTING_SECONDS if self._round.gives_way else STRAGGLER_SECONDS):
            self._round.killed |= left
            self._signal(left, signal.SIGKILL)
        elif seconds > STARTING_SECONDS and not self._round.stops_start and self._starts():
            self._round.stops_start = True  # a second SIGTERM would end them without an exit code of their own
            self._signal(left, signal.SIGTERM)

    def _signal(self, indices: Sequence[int] | set[int], signum: int) -> None:
        """Send a signal to the program on some hosts."""
        for index in indices:
            self._members.send(index, {"signal": int(signum)})

    def _note_start(self, now: float) -> None:
        """Notice when the steps of a round begin, and write it into the journal if this follows a fault."""
        if self._round.trains or last_start(self._task.directory) == self._round.start_before:
            return
        self._round.trains, self._wait = True, None
        if self._fault_at is not None:
            self._journal.write_recovery(now - self._fault_at)
            self._fault_at = None

    def _may_grow(self) -> bool:
        """Return whether hosts that came back, and have stayed, allow a larger round."""
        wait = self._limits.elastic_seconds
        hosts = self._round.hosts
        if wait is None or len(hosts) == self._limits.hosts:
            return False
        stayed = [i for i in self._members.indices() if i in hosts or self._members.seconds_here(i) > wait]
        return len(self._choose(stayed)) > len(hosts)

    def _judge(self, ends: Sequence[End]) -> int | None:
        """Write the fault that ended a round into the journal. Return the exit code of the job, None to go on."""
        final, cause = find_final_code(ends), find_cause(ends)
        if cause is None:
            return final
        self._fault_at, self._wait = self._fault_at or time.monotonic(), None
        self._budget = self._budget.after_fault(newest_checkpoint(self._task.directory))
        if final is None and self._budget.exhausted:
            final = ProcessLost.exit_code if cause.code is None else cause.code
        self._journal.write_fault(cause, ends, 0 if final is not None else self._budget.restarts)
        if final is None and self._task.job.processes > 1:
            avoided = self._strikes.add(cause, self._round.hosts, self._round.killed)
            if avoided is not None:
                self._host.say(f"host {avoided} has caused too many faults: other hosts are preferred to it")
        name = self._journal.describe(cause) + f" on host {cause.index}" * (self._task.job.processes > 1)
        if final is None:
            self._not_before = time.monotonic() + self._budget.pause_seconds
            self._host.say(f"{name}; restart {self._budget.restarts} in {self._budget.pause_seconds:g} s")
        elif final not in FINAL:
            self._host.say(f"{name}; no new checkpoint after {self._budget.limit} restarts, so it ends")
        return final


def _list_hosts(indices: Sequence[int]) -> str:
    return f"{len(indices)} host(s) ({', '.join(map(str, indices))})"
