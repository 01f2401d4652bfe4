"""The supervisor of a host: the leader of its job, or a member."""

import math
import time

from jaxopt_llm.config.parallel import parse_address
from jaxopt_llm.supervision.host import Host
from jaxopt_llm.supervision.leader import Leader, Limits
from jaxopt_llm.supervision.leader_address import (
    SILENCE_SECONDS,
    LeaderAddress,
    find_leader,
    join_leader,
    publish_leader,
)
from jaxopt_llm.supervision.member import Member
from jaxopt_llm.supervision.members import Members
from jaxopt_llm.supervision.policy import STOPPED, RestartBudget
from jaxopt_llm.supervision.task import Task

_RETRY_SECONDS = 0.5
_TURN_SECONDS = 5.0  # by which a host waits longer than the one before it, before it leads in place of host 0


def supervise(task: Task, limits: Limits, budget: RestartBudget) -> int:
    """Supervise a program on this host until the job ends, and return the exit code.

    Host 0 leads. With `limits.elastic_seconds`, the next host leads if host 0 is lost, and host 0 then joins it.
    A leader that does not answer for SILENCE_SECONDS is lost, too.
    """
    host = Host(task.job.index)
    if task.job.processes == 1:
        code = Leader(host, task, limits, budget, Members(host, task.job)).run()
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
            members = Members(host, task.job, *publish_leader(task.directory, address))
            result = Leader(host, task, limits, budget, members).run()
            members.close(task.directory)
        if result is not None:
            return result
        host.wait(_RETRY_SECONDS)
    return STOPPED


def _wait_to_lead(index: int, limits: Limits) -> float:
    """Return how long a host waits for the leader before it leads itself."""
    if index == 0:
        return 0.0
    return math.inf if limits.elastic_seconds is None else limits.elastic_seconds + _TURN_SECONDS * index
