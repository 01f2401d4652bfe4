"""Groups that are jobs of their own: the exchange of a group with the outer server (jaxopt_llm/outer/).

After every `training.local_steps` steps the group brings what changed to the server. A thread does so. The update is
applied `groups.delay` steps later, always after the same step: the outer masters, and what the group has changed since.

A process exchanges the pieces of the masters that it owns. What an exchange leads to, the processes agree on: an update
is applied if all have one; otherwise all take what they have, and the group begins a round from there.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxopt_llm.config import Config
from jaxopt_llm.config.addresses import parse_address
from jaxopt_llm.config.fields import METADATA, get_field
from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.outer.client import Answer, Base, Member, OuterClient, ServerLost
from jaxopt_llm.outer.token import read_token
from jaxopt_llm.parallel.gathering import cast_masters
from jaxopt_llm.training.pieces import Pieces
from jaxopt_llm.training.setup import Setup
from jaxopt_llm.training.state import TrainState, state_shardings

LOOK_SECONDS = 0.5  # between two looks at the progress of an exchange
# Settings in which groups may differ: where their files are, and which group each is.
_OWN = ("evaluation.paths", "groups.index")
Say = Callable[[str], None]


@dataclass(eq=False)
class _Exchange:
    """Exchange that a thread does. own: masters of the group after `step`."""

    step: int
    own: np.ndarray
    thread: threading.Thread | None = None
    answer: Answer | None = None
    error: Exception | None = None


class JobGroup:
    """A group and its outer server. As a context manager it ends with the connection."""

    def __init__(self, setup: Setup, say: Say) -> None:
        self._setup, self._say = setup, say
        self._config: Config = setup.config
        self._processes = setup.processes
        self._channel = setup.processes.channel("outer step")
        self._base: Base | None = None
        self._running: _Exchange | None = None
        self._alone = False
        servers = self._config.groups.server
        self._address = servers[setup.processes.index % len(servers)]
        self._client: OuterClient | None = None

    def __enter__(self) -> "JobGroup":
        return self

    def __exit__(self, *error: object) -> None:
        if self._client is not None:
            self._client.close()

    def join(self, state: TrainState, start: int) -> tuple[TrainState, int]:
        """Return the state from which the group begins, and its step: those of the server, if it answers.

        Raises:
            InputError: the server refuses this group.
        """
        groups = self._config.groups
        self._pieces = Pieces(self._setup.program.specs.masters, state.masters)
        layout, form = self._pieces.layout, self._config.sharding.data_gradients
        member = Member(groups.index, groups.count, layout, form, self._make_facts())
        self._client = OuterClient(parse_address(self._address), member, read_token(groups.token_file))
        exchange = self._start(state, start)
        self._wait(exchange)
        if isinstance(exchange.error, InputError):
            raise exchange.error
        state, ahead = self._settle(state, exchange, start)
        return state, start if ahead is None else ahead

    def after_step(self, state: TrainState, step: int) -> tuple[TrainState, int | None]:
        """Begin an exchange or apply its update, if either is due after a step.

        Returns:
            The state, and the step at which the group goes on if it is further ahead; otherwise None.
        """
        if step % self._config.training.local_steps == 0:
            self._running = self._start(state, step)
        running = self._running
        last = self._config.training.steps
        if running is None or step < min(running.step + self._config.groups.delay, last):
            return state, None
        self._running = None
        self._wait(running)
        return self._settle(state, running, step)

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
            "form": config.sharding.data_gradients,
            "corpus": self._setup.data.corpus.sha256,
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
            except (ServerLost, InputError) as error:
                exchange.error = error

        exchange.thread = threading.Thread(target=run, name="outer step", daemon=True)
        exchange.thread.start()
        return exchange

    def _wait(self, exchange: _Exchange) -> None:
        """Wait for the end of an exchange, which the client bounds. Its progress is that of the main thread."""
        assert exchange.thread is not None and self._client is not None
        carried = -1
        with self._processes.main.wait():
            while exchange.thread.is_alive():
                exchange.thread.join(LOOK_SECONDS)
                if self._client.carried != carried:
                    carried = self._client.carried
                    self._processes.main.beat()

    def _settle(self, state: TrainState, exchange: _Exchange, step: int) -> tuple[TrainState, int | None]:
        """Apply the answer that the processes have; see `after_step`."""
        answer = exchange.answer
        told = {"whole": answer.whole, "step": answer.base.step, "counted": answer.counted} if answer else {}
        told |= {} if answer else {"lost": f"groups.server {self._address} ({exchange.error})"}
        all_told = [json_files.parse(each) for each in self._channel.exchange(json.dumps(told))]
        lost = [each["lost"] for each in all_told if "lost" in each]
        if answer is not None:
            self._base = answer.base
        if lost and not self._alone:
            self._say(f"step {step:>6}  no answer of {lost[0]}: the group trains by itself, and asks again every round")
        if self._alone and not lost:
            self._say(f"step {step:>6}  the outer server answers again")
        self._alone = bool(lost)
        whole = [each for each in all_told if each.get("whole")]
        if len(lost) == len(all_told):
            return state, None
        vector = answer.base.vector if answer is not None else exchange.own
        if lost or whole or step == exchange.step:
            state = self._store(state, vector, adds=False)
        else:
            state = self._store(state, vector - exchange.own, adds=True)
        ahead = min(max((each["step"] for each in whole), default=0), self._config.training.steps)
        if whole:
            added = "counts in the round that is open" if all(each["counted"] for each in whole) else "does not count"
            change = f"; its change since the last one {added}" if exchange.step != step or self._joined else ""
            self._say(f"step {step:>6}  takes the outer masters of step {ahead}{change}")
        self._joined = True
        if ahead <= step:
            return state, None
        return advance_counts(state, ahead - step), ahead

    _joined = False

    def _store(self, state: TrainState, vector: np.ndarray, adds: bool) -> TrainState:
        """Return the state with the masters of the vectors of all processes."""
        masters = self._pieces.write(state.masters, vector, adds)
        if state.compute is None:
            return replace(state, masters=masters)
        for leaf in jax.tree.leaves(state.compute):
            leaf.delete()  # the devices may not have room for it twice
        specs, placement = self._setup.program.specs, self._setup.placement
        shardings = state_shardings(specs, placement).compute
        if self._cast is None:
            self._cast = jax.jit(
                lambda masters: cast_masters(specs.masters, masters, placement), out_shardings=shardings
            )
        return replace(state, masters=masters, compute=self._cast(masters))

    _cast: Any = None


def advance_counts(state: TrainState, steps: int) -> TrainState:
    """Return the state with its counts moved on by steps that other groups have done: those of batches and schedule.

    Moments keep their own counts. Entries of the guard's history that no update has filled stay without effect.
    """

    def move(leaf: Any) -> Any:
        return leaf._replace(count=leaf.count + steps) if isinstance(leaf, optax.ScaleByScheduleState) else leaf

    @jax.jit
    def advance(counts: Any) -> Any:
        step, guard, moments = counts
        updates = guard["updates"]

        def fill(history: jax.Array) -> jax.Array:
            return jnp.where(jnp.arange(history.size) < updates, history, jnp.finfo(history.dtype).max)

        filled = {"norms": fill(guard["norms"]), "losses": fill(guard["losses"])}
        moved = jax.tree.map(move, moments, is_leaf=lambda leaf: isinstance(leaf, optax.ScaleByScheduleState))
        return step + steps, guard | filled | {"updates": updates + steps}, moved

    def is_count(leaf: Any) -> bool:
        return isinstance(leaf, optax.ScaleByScheduleState)

    leaves, structure = jax.tree.flatten(state.moments, is_leaf=is_count)
    schedules = [leaf for leaf in leaves if is_count(leaf)]
    step, guard, schedules = advance((state.step, state.guard, schedules))
    moved = iter(schedules)
    leaves = [next(moved) if is_count(leaf) else leaf for leaf in leaves]
    return replace(state, step=step, guard=guard, moments=jax.tree.unflatten(structure, leaves))
