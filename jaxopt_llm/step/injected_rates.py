"""Learning rates in the state of an optax transformation: those that `optax.inject_hyperparams` keeps there.

Each has a label, the keys that lead to it: "head" in `optax.partition({"head": ...}, ...)`, "1" for the second part of
a chain, and "" if there are none.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError

RATE = "learning_rate"


def map_rates(function: Callable[[str, Any, bool], Any], moments: tree.Tree) -> tree.Tree:
    """Return the state of an optimizer with other learning rates.

    Args:
        function: (label, rate, whether a schedule computes it at each step) -> rate.
    """
    return _map_below((), function, moments)


def _map_below(path: tuple[Any, ...], function: Callable[[str, Any, bool], Any], state: tree.Tree) -> tree.Tree:
    def visit(below: tuple[Any, ...], node: Any) -> Any:
        if not _is_injected(node):
            return node
        here, numbers = (*path, *below), node.hyperparams
        if RATE in numbers:
            label = "/".join(str(part) for part in map(_name_key, here) if part is not None)
            scheduled = RATE in getattr(node, "hyperparams_states", {})
            numbers = numbers | {RATE: function(label, numbers[RATE], scheduled)}
        return node._replace(hyperparams=numbers, inner_state=_map_below(here, function, node.inner_state))

    return jax.tree_util.tree_map_with_path(visit, state, is_leaf=_is_injected)


def _is_injected(node: Any) -> bool:
    return isinstance(node, optax.InjectStatefulHyperparamsState | optax.InjectHyperparamsState)


def _name_key(key: Any) -> Any:
    """Return the key of a dict, or the index of a tuple. The fields of optax's states have no part in a label."""
    return getattr(key, "key", getattr(key, "idx", None))


def read_rates(moments: tree.Tree) -> dict[str, Any]:
    """Return the learning rates by label."""
    found: dict[str, Any] = {}

    def note(label: str, rate: Any, scheduled: bool) -> Any:
        found[label] = rate
        return rate

    map_rates(note, moments)
    return found


def make_rate_metrics(moments: tree.Tree) -> dict[str, jax.Array]:
    """Return the metrics of a step: `learning_rate`, or with several rates `learning_rate/` and the label of each."""
    rates = read_rates(moments)
    several = len(rates) > 1
    return {f"{RATE}/{label}" if several else RATE: jnp.asarray(rate, jnp.float32) for label, rate in rates.items()}


def set_rates(moments: tree.Tree, rates: dict[str, float]) -> tree.Tree:
    """Return the state of an optimizer with these learning rates, by label.

    Raises:
        InputError: a schedule computes one of them.
    """

    def change(label: str, rate: Any, scheduled: bool) -> Any:
        if label not in rates:
            return rate
        if scheduled:
            raise InputError(
                "learning_rate: a schedule of the optimizer computes it at each step; to set it, give "
                "optax.inject_hyperparams a number in place of the schedule"
            )
        value = jnp.full(rate.shape, rates[label], rate.dtype)
        return jax.make_array_from_callback(rate.shape, rate.sharding, lambda index: value[index])

    return map_rates(change, moments)
