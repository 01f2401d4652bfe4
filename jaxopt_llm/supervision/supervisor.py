"""The supervisor of a host: the leader of its job, or a member."""

import math
import time
from collections.abc import Sequence
from typing import Any

from jaxopt_llm.config.parallel import parse_address
from jaxopt_llm.distributed.wire import Peer
from jaxopt_llm.supervision.faults import STOPPED, RestartBudget
from jaxopt_llm.supervision.host import Host
from jaxopt_llm.supervision.leader import Leader, Limits
from jaxopt_llm.supervision.members import (
    PULSE_SECONDS,
    SILENCE_SECONDS,
    LeaderAddress,
    Members,
    Membership,
    find_leader,
    join_leader,
    obey,
    publish_leader,
)
from jaxopt_llm.supervision.task import Task

_RETRY_SECONDS = 0.5
_TURN_SECONDS = 5.0  # each host waits so much longer than the one before it, before it leads in place of host 0


def supervise(task: Task, limits: Limits, budget: RestartBudget) -> int:
    """Supervise a program on this host until the job ends, and return the exit code.

    Host 0 leads. With `limits.elastic_seconds`, the next host leads if host 0 is lost, and host 0 then joins it.
    A leader that does not answer for SILENCE_SECONDS is lost, too.
    """
    host = Host(task.job.index)
    if task.job.processes == 1:
        code = Leader(host, task, limits, budget, Members(host, task)).run()
        assert code is not None  # nobody else leads
        return code
    address = parse_address(task.job.coordinator)[0] if host.index == 0 else ""
    lost_at = answered_at = time.monotonic()
    silent: LeaderAddress | None = None  # the leader that has not answered since `answered_at`
    while not host.stopped:
        result: int | None = None
        published = find_leader(task.directory)
        try:
            membership, silent = None if published is None else join_leader(published, task.job), None
        except TimeoutError:
            if silent != published:
                silent, answered_at = published, time.monotonic()
            membership = None
            if time.monotonic() < answered_at + SILENCE_SECONDS:  # a leader that is busy still leads
                lost_at = time.monotonic()
                host.wait(_RETRY_SECONDS)
                continue
        if membership is not None:
            address = address or membership.leader.connection.getsockname()[0]
            result = Member(host, task, membership).run()
            lost_at = time.monotonic()
        elif address and time.monotonic() >= lost_at + _wait_to_lead(host.index, limits):
            members = Members(host, task, *publish_leader(task.directory, address))
            result = Leader(host, task, limits, budget, members).run()
            members.close()
        if result is not None:
            return result
        host.wait(_RETRY_SECONDS)
    return STOPPED


def _wait_to_lead(index: int, limits: Limits) -> float:
    """Return how long a host waits for the leader before it leads itself."""
    if index == 0:
        return 0.0
    return math.inf if limits.elastic_seconds is None else limits.elastic_seconds + _TURN_SECONDS * index


class Member:
    """Member of a job. It does what the leader says, as long as the leader is there."""

    def __init__(self, host: Host, task: Task, membership: Membership) -> None:
        self._host, self._task, self._membership = host, task, membership
        self._leader: Peer | None = membership.leader
        self._exit: int | None = None
        host.listen(membership.leader.connection, membership.leader)

    def run(self) -> int | None:
        """Return the exit code of the job; None: the leader is lost, and no program runs here any more."""
        self._obey(self._membership.messages)
        pulse = 0.0
        while True:
            end = self._host.poll()
            if end is not None and end.code is not None:
                if self._leader is not None:
                    self._leader.send({"ended": end.code, "what": end.what})
                if self._host.stopped or (self._leader is None and end.code == 0):
                    return self._leave(end.code)
            if not self._host.running:
                if self._exit is not None or self._host.stopped:
                    return self._leave(STOPPED if self._exit is None else self._exit)
                if self._leader is None:
                    return None
            for _ in self._host.wait(0.5):
                self._receive()
            now = time.monotonic()
            if self._leader is not None and now > self._leader.last_heard + SILENCE_SECONDS:
                self._lose_leader()
            if self._leader is not None and now > pulse + PULSE_SECONDS:
                pulse = now
                self._leader.send()

    def _receive(self) -> None:
        """Read the messages of the leader, and handle them."""
        assert self._leader is not None
        messages = self._leader.poll()
        if messages is None:
            self._lose_leader()
        self._obey(messages or ())

    def _obey(self, messages: Sequence[dict[str, Any]]) -> None:
        """Handle messages of the leader."""
        for message in messages:
            if "exit" in message:
                self._exit = message["exit"]
            elif "start" not in message or not self._host.stopped:
                obey(message, self._host, self._task, self._membership.program_token)

    def _lose_leader(self) -> None:
        assert self._leader is not None
        self._host.forget(self._leader.connection)
        self._leader = None

    def _leave(self, code: int) -> int:
        if self._leader is not None:
            self._lose_leader()
        return code
