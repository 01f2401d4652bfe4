"""The supervisor of a host that another host's supervisor leads."""

import time
from collections.abc import Sequence
from typing import Any

from jaxopt_llm.supervision.host import Host
from jaxopt_llm.supervision.leader_address import PULSE_SECONDS, SILENCE_SECONDS, Membership
from jaxopt_llm.supervision.policy import STOPPED
from jaxopt_llm.supervision.signed_peer import SignedPeer
from jaxopt_llm.supervision.task import Place, Task


class Member:
    """Member of a job. It does what the leader says, as long as the leader is there."""

    def __init__(self, host: Host, task: Task, membership: Membership) -> None:
        self._host, self._task, self._membership = host, task, membership
        self._leader: SignedPeer | None = membership.leader
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
        try:
            messages = self._leader.receive()
        except TimeoutError:
            return
        except ValueError:
            messages = None
        if messages is None:
            self._lose_leader()
        self._obey(messages or ())

    def _obey(self, messages: Sequence[dict[str, Any]]) -> None:
        """Handle messages of the leader."""
        for message in messages:
            if "start" in message and not self._host.stopped:
                place = Place.from_json(message["start"])
                self._host.start(self._task.command(place), self._task.variables(place, self._membership.program_token))
            elif "signal" in message:
                self._host.send(message["signal"])
            elif "exit" in message:
                self._exit = message["exit"]

    def _lose_leader(self) -> None:
        assert self._leader is not None
        self._host.forget(self._leader.connection)
        self._leader = None

    def _leave(self, code: int) -> int:
        if self._leader is not None:
            self._lose_leader()
        return code
