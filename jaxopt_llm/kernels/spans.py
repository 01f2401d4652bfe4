"""Which keys a query sees."""

from dataclasses import dataclass
from typing import NamedTuple

import jax


class Spans(NamedTuple):
    """The rows of the keys, from `first` to `last`, that each query sees: int32 [B, S]; none where first > last.

    They may lie before the keys' first row or beyond their last.
    """

    first: jax.Array
    last: jax.Array


@dataclass(frozen=True)
class Form:
    """scale: multiplies the scores; softcap: then bounds them, as softcap × tanh(score / softcap).

    before, after: a query in row r sees no key in a row below r - before, or above r + after; None promises nothing.
    """

    scale: float
    softcap: float | None = None
    before: int | None = None
    after: int | None = None
