"""Arrays that a loss closes over although they change: those of another engine, and values of NNX variables.

JAX reads such an array once, when the loss is traced. The compiled step then keeps this value, whatever happens to the
engine or to the variable.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.jaxpr import list_constants

# The arrays that engines returned to their users, by identity; and each engine, with a function that lists its arrays.
_returned: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()
_engines: weakref.WeakKeyDictionary[Any, Callable[[Any], list[Any]]] = weakref.WeakKeyDictionary()


def register_engine(engine: Any, list_arrays: Callable[[Any], list[Any]]) -> None:
    """Remember an engine. list_arrays: returns the arrays of its state."""
    _engines[engine] = list_arrays


def register_returned(arrays: Iterable[jax.Array]) -> None:
    """Remember arrays that an engine returns to its user as those of its model."""
    _returned.update((id(array), array) for array in arrays if isinstance(array, jax.Array))


def check_captured(closed: ClosedJaxpr) -> None:
    """Raise InputError if a loss closes over arrays of an engine, or over the value of an NNX variable.

    Args:
        closed: the jaxpr of the loss.
    """
    arrays = [each for each in list_constants(closed) if isinstance(each, jax.Array)]
    if not arrays:
        return
    of_engines = {id(array) for engine, list_arrays in _engines.items() for array in list_arrays(engine)}
    if found := [each for each in arrays if id(each) in of_engines or _returned.get(id(each)) is each]:
        raise InputError(
            f"loss: it closes over arrays of another engine's model ({_describe(found)}), which it would read only "
            "once, when it is traced; put both models into one engine, pass the arrays in the batch, or copy them with "
            "jax.device_get if they are constants"
        )
    held = [(each, kind) for each in arrays if (kind := _find_variable(each))]
    if held:
        raise InputError(
            f"loss: it closes over the value of a {held[0][1]} ({_describe([each for each, _ in held])}), which it "
            "would read only once, when it is traced; use the model that the loss receives, make a frozen model a part "
            "of it (training.trainable), or copy the arrays with jax.device_get if they are constants"
        )


def _describe(arrays: list[jax.Array]) -> str:
    more = f" and {len(arrays) - 3} more" if len(arrays) > 3 else ""
    return ", ".join(f"{each.dtype}{list(each.shape)}" for each in arrays[:3]) + more


def _find_variable(array: jax.Array) -> str | None:
    """Return the name of the type of an NNX variable that holds an array, or None."""
    holders = gc.get_referrers(array)
    # Python keeps the attributes of an object in a dict once somebody has asked for it.
    holders += [owner for each in holders if isinstance(each, dict) for owner in gc.get_referrers(each)]
    return next((type(each).__name__ for each in holders if isinstance(each, nnx.Variable)), None)
