"""Groups that are jobs of their own: the exchange of a group with the outer server (jaxopt_llm/outer/).

After every `training.local_steps` steps the group brings what it has changed to the server. A thread does so. The
update is applied `groups.delay` steps later, always after the same step: the masters become the outer masters, and what
the group has changed since.

A process exchanges the pieces of the masters that it owns. The processes agree on what an exchange leads to: an update
is applied by those that have one. If some have to take the outer masters in full, all do, or none if one of them has no
answer: else pieces of one model would be beside pieces of another one.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxopt_llm.config import Config
from jaxopt_llm.config.addresses import parse_address
from jaxopt_llm.config.fields import METADATA, get_field
from jaxopt_llm.core import json_files
from jaxopt_llm.core.block_format import BLOCK_SIZES
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.repeat import repeat
from jaxopt_llm.outer.client import Answer, Base, Member, OuterClient, ServerBusy, ServerLost
from jaxopt_llm.outer.codes import BITS, Format
from jaxopt_llm.outer.token import read_token
from jaxopt_llm.parallel.gathering import cast_masters
from jaxopt_llm.training.pieces import Pieces
from jaxopt_llm.training.schedule_position import advance_position
from jaxopt_llm.training.setup import Setup
from jaxopt_llm.training.state import TrainState, state_shardings

LOOK_SECONDS = 0.5  # between two looks at the progress of an exchange
REMIND_ROUNDS = 10  # without an answer, after which the warning is repeated
# Settings that decide what is learnt, and in which groups may differ: where their files are, and which group each is.
_OWN = ("evaluation.paths", "groups.index")


@dataclass(eq=False)
class _Exchange:
    """Exchange that a thread does. own: masters of the group after `step`, at which it began."""

    step: int
    own: np.ndarray
    thread: threading.Thread | None = None
    answer: Answer | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class _Outcome:
    """Outcome of the exchange of one process.

    Attributes:
        lost: why there is no answer; "" if there is one.
        refused: why the server refuses the group; "" if it does not. It is then lost, too.
        whole, counted: see Answer.
        step: of the outer masters.
    """

    lost: str = ""
    refused: str = ""
    whole: bool = False
    counted: bool = False
    step: int = 0


class JobGroup:
    """A group and its outer server. As a context manager it ends with the connection.

    Args:
        say: receives a line if something is not as usual.
        stopping: returns whether a stop of this process was requested. No process then waits for an exchange.
    """

    def __init__(self, setup: Setup, say: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        self._setup, self._say, self._stopping = setup, say, stopping
        self._config: Config = setup.config
        self._processes = setup.processes
        self._channel, self._stop = setup.processes.channel("outer step"), setup.processes.flag("stop of outer step")
        servers = self._config.groups.server
        self._address = servers[setup.processes.index % len(servers)]
        self._client: OuterClient | None = None
        self._base: Base | None = None
        self._running: _Exchange | None = None
        self._lost_rounds = 0  # in a row
        self._has_answered, self._lost = False, ""  # why there has been no answer in this run
        self._cast: Any = None

    def __enter__(self) -> "JobGroup":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None and self._lost:
            self._say(f"{self._setup.directory}: the run ends without an outer step: {self._lost}")
        if self._client is not None:
            self._client.stop()

    def join(self, state: TrainState, start: int) -> tuple[TrainState, int]:
        """Return the state from which the group begins, and its step: those of the server, if it answers.

        A group that is further than the server keeps its step.

        Raises:
            InputError: the server refuses this group.
        """
        groups = self._config.groups
        self._pieces = Pieces(self._setup.program.specs.masters, state.masters)
        layout, form = self._pieces.layout, find_format(self._config)
        if form in BITS and (exact := self._pieces.exact):
            self._say(
                f"sharding.data_gradients: {len(exact)} matrices are exchanged exactly (first: {exact[0]}): no block "
                f"of {BLOCK_SIZES[-1]} to {BLOCK_SIZES[0]} values divides each device's part of the last dimension"
            )
        member = Member(groups.index, groups.count, layout, form, self._make_facts())
        self._client = OuterClient(parse_address(self._address), member, read_token(groups.token_file))
        state, ahead = self._finish(self._start(state, start), state, start)
        if ahead == self._config.training.steps:
            self._say(f"the other groups have finished: {self._setup.directory} keeps the checkpoints that it has")
        return state, start if ahead is None else ahead

    def after_step(self, state: TrainState, step: int) -> tuple[TrainState, int | None]:
        """Begin an exchange, or apply its update, if it is due after a step.

        Returns:
            The state, and the step at which the group goes on if the other groups are ahead; otherwise None.

        Raises:
            InputError: the server, which has started again, refuses this group.
        """
        training, groups = self._config.training, self._config.groups
        if step % training.local_steps == 0:
            self._running = self._start(state, step)
        running = self._running
        if running is None or step < min(running.step + groups.delay, training.steps):
            return state, None
        self._running = None
        return self._finish(running, state, step)

    def _make_facts(self) -> dict[str, Any]:
        """Return what the server needs to know, and what must be equal in all groups."""
        config, processes = self._config, self._processes
        table = hashlib.sha256(json.dumps(self._pieces.table).encode()).hexdigest()[:16]
        compared = [name for name, each in METADATA.items() if each.resume != "freely" and name not in _OWN]
        return {
            "process": processes.index,
            "processes": processes.count,
            "segments": self._pieces.layout.segments,
            "rate": float(config.optimizer.outer_learning_rate),
            "momentum": float(config.optimizer.outer_momentum),
            "form": find_format(config),
            "hash of the corpus": self._setup.data.corpus.sha256[:16],
            "hash of the pieces of the masters": table,
            "settings": {name: get_field(config, name) for name in compared},
        }

    def _start(self, state: TrainState, step: int) -> _Exchange:
        """Copy the masters to the host, and let a thread exchange them."""
        with self._processes.main.wait():
            exchange = _Exchange(step, self._pieces.read(state.masters))
        client, base = self._client, self._base
        assert client is not None

        def run() -> None:
            try:
                exchange.answer = client.exchange(base, step, exchange.own)
            except Exception as error:  # the main thread raises it
                exchange.error = error

        exchange.thread = threading.Thread(target=run, name="outer step", daemon=True)
        exchange.thread.start()
        return exchange

    def _finish(self, exchange: _Exchange, state: TrainState, step: int) -> tuple[TrainState, int | None]:
        """Wait for an exchange of all processes, and apply what they have got; see `after_step`."""
        # In a thread: a process also has to hear of a stop, and to tell it, while it waits for the other ones.
        with repeat(self._heed_stops, LOOK_SECONDS, "stops"):
            self._wait(exchange)
            outcomes = self._tell(exchange)
        return self._settle(state, exchange, outcomes, step)

    def _heed_stops(self) -> None:
        """End the exchange in all processes if a stop of any of them is requested."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 is lost: the watch ends this process
            if self._stopping():
                self._stop.lift()
            if self._stop.is_up() and self._client is not None:
                self._client.stop()

    def _wait(self, exchange: _Exchange) -> None:
        """Wait for the end of an exchange, whose time the client bounds. Its progress is that of the main thread."""
        assert exchange.thread is not None and self._client is not None
        carried = -1
        with self._processes.main.wait():
            while exchange.thread.is_alive():
                exchange.thread.join(LOOK_SECONDS)
                if self._client.carried != carried:
                    carried = self._client.carried
                    self._processes.main.beat()
        if exchange.error is not None and not isinstance(exchange.error, (ServerLost, InputError)):
            raise exchange.error

    def _tell(self, exchange: _Exchange) -> list[_Outcome]:
        """Return the outcomes of all processes.

        Raises:
            InputError: the server of any process refuses this group.
        """
        if exchange.answer is None:
            refused = str(exchange.error) if isinstance(exchange.error, InputError) else ""
            what = "is refused:" if isinstance(exchange.error, ServerBusy) else "no answer of"
            own = _Outcome(f"{what} groups.server {self._address} ({exchange.error})", refused)
        else:
            own = _Outcome("", "", exchange.answer.whole, exchange.answer.counted, exchange.answer.base.step)
        told = self._channel.exchange(json.dumps(asdict(own)))
        outcomes = [_Outcome(**json_files.parse(each)) for each in told]
        if refused := next((each.refused for each in outcomes if each.refused), ""):
            raise InputError(refused)
        return outcomes

    def _settle(
        self, state: TrainState, exchange: _Exchange, outcomes: Sequence[_Outcome], step: int
    ) -> tuple[TrainState, int | None]:
        """Apply what the processes have got; see `after_step`."""
        is_any_lost, is_any_whole = (any(getattr(each, name) for each in outcomes) for name in ("lost", "whole"))
        ahead = max((each.step for each in outcomes if each.whole), default=0)
        ahead = min(ahead, self._config.training.steps)
        self._report(outcomes, step, ahead)
        if is_any_lost and is_any_whole:
            self._base = None  # the next exchange asks for the masters of all processes
            return state, None
        answer = exchange.answer
        if answer is not None:
            self._base = answer.base
        if all(each.lost for each in outcomes):
            return state, None
        # A process without an answer keeps its masters, with what it has changed since.
        vector = exchange.own if answer is None else answer.base.vector
        if step > exchange.step and not is_any_whole:
            state = self._store(state, vector - exchange.own, adds=True)
        else:
            state = self._store(state, vector, adds=False)
        return (state, None) if ahead <= step else (advance_position(state, ahead - step), ahead)

    def _report(self, outcomes: Sequence[_Outcome], step: int, ahead: int) -> None:
        """Say what is not as usual."""
        lost, whole = [each for each in outcomes if each.lost], [each for each in outcomes if each.whole]
        where = f"step {step:>6}  "
        reminds = self._lost_rounds % REMIND_ROUNDS == 0
        if lost and reminds and not self._stopping() and not self._stop.is_up():
            self._say(f"{where}{lost[0].lost}: the group trains by itself, and asks again every round")
        if self._lost_rounds and not lost:
            self._say(f"{where}the outer server answers again")
        if lost:
            self._lost_rounds += 1
            if not self._has_answered:
                self._lost = lost[0].lost
            return
        self._lost_rounds, self._has_answered, self._lost = 0, True, ""
        if whole and all(each.counted for each in whole):
            self._say(f"{where}late: what the group has changed counts in the next outer step; goes on at step {ahead}")
        elif whole:
            self._say(f"{where}takes the outer masters of step {ahead}")

    def _store(self, state: TrainState, vector: np.ndarray, adds: bool) -> TrainState:
        """Return the state with the masters of the vectors of all processes. adds: added to its masters."""
        masters = self._pieces.write(state.masters, vector, adds)
        if state.compute is None:
            return replace(state, masters=masters)
        for leaf in jax.tree.leaves(state.compute):
            leaf.delete()  # the devices may have no room for it twice
        specs, placement = self._setup.program.specs, self._setup.placement
        if self._cast is None:
            shardings = state_shardings(specs, placement).compute
            self._cast = jax.jit(lambda each: cast_masters(specs.masters, each, placement), out_shardings=shardings)
        return replace(state, masters=masters, compute=self._cast(masters))


def find_format(config: Config) -> Format:
    """Return the format in which groups exchange changes and updates."""
    form = config.sharding.data_gradients
    if form == "exact" and config.precision.reduce_dtype == "bfloat16":
        return "bfloat16"
    return form
