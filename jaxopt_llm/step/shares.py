"""Several losses over one state, each of which trains its own parameters with its own optimizer.

The step of a loss is the ordinary step of a model in which all other parameters are frozen. It sees its share of the
state: its own masters, moments, guard and loss scale, and the other masters among the frozen parameters. All losses
read and change the same variables, and all count the same steps. Two losses may train the same parameter; each then has
its own moments of it.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxopt_llm.core import tree
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel import offload
from jaxopt_llm.step.hyperparameters import Hyperparameters
from jaxopt_llm.step.state import TrainState
from jaxopt_llm.step.step import Metrics, Step


def take_share(state: TrainState, name: str, trained: Params) -> TrainState:
    """Return the state as the step of the loss `name` sees it.

    Args:
        trained: specs of the parameters that the loss trains, with None for all others.
    """

    def take(half: tree.Tree) -> tree.Tree:
        return None if half is None else tree.restrict(half, trained)

    return replace(
        state,
        masters=take(state.masters),
        moments=state.moments[name],
        compute=take(state.compute),
        frozen=tree.merge(tree.exclude(state.trainable, trained), state.frozen),
        guard=state.guard[name],
        loss_scale=state.loss_scale[name],
        average=take(state.average),
    )


def put_share(state: TrainState, name: str, share: TrainState) -> TrainState:
    """Return a state with the share of the loss `name` after its step. What is not in the share stays as it is.

    The loss may have assigned to parameters that it does not train. They are among the frozen parameters of its share.
    """
    state = offload.store_like(state, state)

    def put(new: tree.Tree, old: tree.Tree) -> tree.Tree:
        return None if old is None else tree.merge(new, old)

    others = state.masters if state.compute is not None else tree.merge(share.frozen, share.masters)
    return replace(
        state,
        step=share.step,
        masters=put(share.masters, tree.restrict(others, state.masters)),
        frozen=tree.restrict(tree.merge(share.frozen, share.masters), state.frozen),
        moments=state.moments | {name: share.moments},
        compute=put(share.compute, state.compute),
        guard=state.guard | {name: share.guard},
        loss_scale=state.loss_scale | {name: share.loss_scale},
        variables=share.variables,
        average=put(share.average, state.average),
    )


@dataclass(frozen=True, eq=False)
class ShareStep:
    """The step of one of several losses, as a step of the whole state.

    inner: of its share.
    """

    inner: Step
    name: str
    trained: Params

    def step(
        self, state: TrainState, batch: Any, hyperparameters: Hyperparameters | None
    ) -> tuple[TrainState, Metrics]:
        # Compiled programs are named after this method, as those of one loss.
        share, metrics = self.inner(take_share(state, self.name, self.trained), batch, hyperparameters)
        new = put_share(state, self.name, share)
        updates: jax.Array = sum(guard["updates"] for guard in new.guard.values())
        return new, metrics | {"skipped": new.step - updates}
