"""Arrays that a loss closes over although they change: those of another engine.

JAX reads such an array once, when the loss is traced. The compiled step then keeps this value, whatever that engine
does.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
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
    """Raise InputError if a loss closes over arrays of an engine.

    Args:
        closed: the jaxpr of the loss.
    """
    arrays = [each for each in list_constants(closed) if isinstance(each, jax.Array)]
    of_engines = {id(array) for engine, list_arrays in _engines.items() for array in list_arrays(engine)}
    if found := [each for each in arrays if id(each) in of_engines or _returned.get(id(each)) is each]:
        raise InputError(
            f"a function closes over arrays of an engine's model ({_describe(found)}), which it would read only "
            "once, when it is traced; put both models into one engine, pass the arrays in the batch, or copy them with "
            "jax.device_get if they are constants"
        )


def _describe(arrays: list[jax.Array]) -> str:
    more = f" and {len(arrays) - 3} more" if len(arrays) > 3 else ""
    return ", ".join(f"{each.dtype}{list(each.shape)}" for each in arrays[:3]) + more
