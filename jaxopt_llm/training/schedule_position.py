"""Position of a state in the schedule, for a group that goes on where other groups are."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxopt_llm.core import tree
from jaxopt_llm.training.guard import HISTORY, Guard
from jaxopt_llm.training.state import TrainState


def advance_position(state: TrainState, steps: int) -> TrainState:
    """Return the state with its counts moved on by steps that other groups have done. It donates what it changes.

    The counts are those of batches, of updates and of the schedule. The moments have seen only the
    gradients of this group, so their own counts stay.
    """
    leaves, structure = jax.tree.flatten(state.moments, is_leaf=_is_position)
    positions = [leaf for leaf in leaves if _is_position(leaf)]
    counts = state.step, state.guard, positions

    def advance(step: jax.Array, guard: Guard, positions: tree.Tree) -> tree.Tree:
        return step + steps, _advance_guard(guard, steps), jax.tree.map(lambda count: count + steps, positions)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, counts)
    step, guard, moved = jax.jit(advance, out_shardings=shardings, donate_argnums=(0, 1, 2))(*counts)
    rest = iter(moved)
    moments = jax.tree.unflatten(structure, [next(rest) if _is_position(leaf) else leaf for leaf in leaves])
    return replace(state, step=step, guard=guard, moments=moments)


def _is_position(leaf: Any) -> bool:
    return isinstance(leaf, optax.ScaleByScheduleState)


def _advance_guard(guard: Guard, steps: int) -> Guard:
    """Move the count of updates on. Entries of the history that no update has filled would judge every step as outlier.

    So they become so large that no step is one, until this group has filled them.
    """
    is_filled = jnp.arange(HISTORY) < guard["updates"]
    most = jnp.finfo(jnp.float32).max
    history = {name: jnp.where(is_filled, guard[name], most) for name in ("norms", "losses")}
    return guard | history | {"updates": guard["updates"] + steps}
