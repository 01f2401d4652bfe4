"""Rounds of the outer step, for one process of the groups: who has contributed, and when a round closes.

A round closes when all groups that are waited for have contributed, or some time after the first contribution. At the
start it is all groups, because they come one after the other. A group that is connected is waited for, until PATIENCE
rounds in a row have waited in vain; and again when it is in time once, or has started again.

A change that comes one round late counts in the round that is open. An older one is dropped: it was made from masters
that the others have left (Liu et al. 2024, arXiv:2401.09135, on what stale changes do to an outer momentum). Neither
is a change that the server has counted already, but whose group has not heard the answer.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxopt_llm.outer.codes import is_finite
from jaxopt_llm.outer.masters import OuterMasters, OuterStep

PATIENCE = 2  # rounds: after one, a group that was late by accident can be in time again
Record = dict[str, Any]  # a line of rounds.jsonl


@dataclass(frozen=True, eq=False)
class Update:
    """Answer to a group whose change is in the round. data: the encoded update that led to the state."""

    state: OuterMasters
    data: np.ndarray


@dataclass(frozen=True, eq=False)
class Whole:
    """Answer with the masters themselves, from which the group goes on.

    counted: its change counts in the round that is open.
    """

    state: OuterMasters
    counted: bool


@dataclass(eq=False)
class Contribution:
    """Change of a group. answer: None while its round is open."""

    step: int
    data: np.ndarray
    answer: Update | Whole | None = None


class Rounds:
    """Rounds of one process of the groups. Any thread may call the methods, but one thread closes the rounds.

    Args:
        groups: number of groups.
        wait: seconds that a round waits after its first contribution.
        state: outer masters so far; None before there are any.
        wake: called when a round may close.
    """

    def __init__(self, groups: int, wait: float, state: OuterMasters | None, wake: Callable[[], None]) -> None:
        self._groups, self._wait, self._state, self._wake = groups, wait, state, wake
        self._changed = threading.Condition()
        self._connected: dict[int, object] = {}
        self._awaited = set(range(groups))
        self._missed: dict[int, int] = {}  # rounds in a row that have waited for a group in vain
        self._fresh: dict[int, Contribution] = {}
        self._late: dict[int, Contribution] = {}
        self._began = 0.0  # time of the first contribution
        self._bytes = 0
        self._closing = False
        self._offered: OuterMasters | None = None  # masters that are not saved yet

    @property
    def state(self) -> OuterMasters | None:
        return self._state

    @property
    def connected(self) -> list[int]:
        with self._changed:
            return sorted(self._connected)

    def join(self, group: int, connection: object) -> None:
        """Note that a group is there. connection: what it speaks through."""
        with self._changed:
            self._connected[group] = connection
            self._await(group)

    def leave(self, group: int, connection: object) -> None:
        """Note that a connection has ended."""
        with self._changed:
            if self._connected.get(group) is connection:
                del self._connected[group]
                self._awaited.discard(group)
        self._wake()

    def _await(self, group: int) -> None:
        self._awaited.add(group)
        self._missed.pop(group, None)

    def offer(self, state: OuterMasters) -> bool:
        """Take the masters from which the groups begin. Return False if there are masters, or an offer, already."""
        with self._changed:
            if self._state is not None or self._offered is not None:
                return False
            self._offered = state
        self._wake()
        return True

    def wait_for_masters(self, seconds: float) -> OuterMasters | None:
        """Return the outer masters; None if there are none within some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is not None, seconds)
            return self._state

    def begin_if_offered(self, save: Callable[[OuterMasters], None]) -> None:
        """Begin with the masters that were offered, if there are some. save: keeps them durably, which takes long."""
        with self._changed:
            offered = self._offered
        if offered is not None:
            save(offered)
            with self._changed:
                self._state, self._offered = offered, None
                self._changed.notify_all()

    def contribute(self, group: int, base: str, change: Contribution, seconds: float) -> bool:
        """Take the change of a group. It has an answer when the round is closed, or at once if it is too late.

        Args:
            base: name of the outer masters that the change begins from.
            seconds: longest wait for the end of a round that is closing.

        Returns:
            Whether the change was taken: no round is closing.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._closing, seconds):
                return False
            state = self._state
            assert state is not None
            if base == state.name:
                self._began = self._began if self._fresh else time.monotonic()
                self._fresh[group] = change
                self._await(group)
            else:
                counted = base == state.previous and group not in state.contributors
                change.answer = Whole(state, counted)
                if counted:
                    self._late[group] = change
            self._bytes += change.data.size
        self._wake()
        return True

    def wait_for(self, change: Contribution, seconds: float) -> Update | Whole | None:
        """Return the answer to a change; None if there is none within some seconds."""
        with self._changed:
            self._changed.wait_for(lambda: change.answer is not None, seconds)
            return change.answer

    def close_if_due(
        self, outer: OuterStep, save: Callable[[OuterMasters], None], write: Callable[[Record], None]
    ) -> None:
        """Close the round if it is due.

        Args:
            save: keeps the new masters durably, before any group hears of them.
            write: writes the record of the round.
        """
        with self._changed:
            overdue = time.monotonic() >= self._began + self._wait
            if not self._fresh or not (overdue or self._awaited <= self._fresh.keys()):
                return
            self._closing = True
            fresh, late, state = self._fresh, self._late, self._state
            self._fresh, self._late = {}, {}
            carried, self._bytes = self._bytes, 0
            connected = set(self._connected)
            self._count_missed(self._awaited - fresh.keys())
        assert state is not None
        mean, counted, wrong = _average(state, outer, fresh, late)
        new, data = state, np.empty(0, np.uint8)
        if counted:
            contributors = tuple(sorted(counted & fresh.keys()))
            step = max((fresh[group].step for group in contributors), default=state.step)
            new, data = state.advance(outer, mean, step, contributors)
            save(new)
            others = set(range(self._groups)) - fresh.keys()
            record: Record = {"round": new.round, "step": new.step, "contributed": list(contributors)}
            record |= {"counted_late": sorted(counted & late.keys()), "not_finite": sorted(wrong)}
            record |= {"late": sorted(others & connected), "absent": sorted(others - connected)}
            record |= {"bytes": carried + len(fresh) * data.size}
            write(record | {"seconds": round(time.monotonic() - self._began, 3)})
        with self._changed:
            self._state = new
            for group, change in fresh.items():
                change.answer = Whole(new, counted=False) if group in wrong else Update(new, data)
            self._closing = False
            self._changed.notify_all()

    def _count_missed(self, groups: set[int]) -> None:
        """Note for which groups a round has waited in vain."""
        for group in groups:
            self._missed[group] = self._missed.get(group, 0) + 1
            if group not in self._connected or self._missed[group] >= PATIENCE:
                self._awaited.discard(group)


def _average(
    state: OuterMasters, outer: OuterStep, fresh: dict[int, Contribution], late: dict[int, Contribution]
) -> tuple[np.ndarray, set[int], set[int]]:
    """Return the mean change, the groups in it, and those that are left out: they have a value that is not finite.

    The changes are added in the order of the groups, one at a time: a server may have no room for all as float32.
    """
    total = np.zeros(state.layout.size, np.float32)
    counted, wrong = set(), set()
    for group in sorted(fresh.keys() | late.keys()):
        change, *more = (state.layout.decode(each[group].data, outer.form) for each in (fresh, late) if group in each)
        for other in more:
            change += other
        if is_finite(change):
            total += change
            counted.add(group)
        else:
            wrong.add(group)
    total /= np.float32(max(len(counted), 1))
    return total, counted, wrong
