"""The outer masters of one process of the groups, and the outer step that moves them.

The formulas are those of training/local_steps.py.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxopt_llm.outer.codes import FORMATS, Layout


@dataclass(frozen=True)
class OuterStep:
    """Settings of the outer step.

    Attributes:
        rate, momentum: optimizer.outer_learning_rate and optimizer.outer_momentum.
        form: format of changes and updates.
    """

    rate: float
    momentum: float
    form: str

    @classmethod
    def parse(cls, facts: Mapping[str, Any]) -> "OuterStep":
        """Return the settings from what a group says.

        Raises:
            ValueError: they are none.
        """
        rate, momentum, form = (facts.get(name) for name in ("rate", "momentum", "form"))
        if type(rate) is not float or type(momentum) is not float or type(form) is not str or form not in FORMATS:
            raise ValueError("no settings of an outer step")
        return cls(rate, momentum, form)


@dataclass(frozen=True, eq=False)
class OuterMasters:
    """Outer masters after a round.

    Attributes:
        round: number of outer steps so far.
        step: largest step of a group whose change they contain.
        name, previous: names of these masters and of those before the round. Masters of one name are equal to the bit,
            also if a server was started again from older ones.
        masters, momentum: float32 vectors, which are never changed in place.
        contributors: groups whose change of this round they contain.
    """

    layout: Layout
    round: int
    step: int
    name: str
    previous: str
    masters: np.ndarray
    momentum: np.ndarray
    contributors: tuple[int, ...] = ()

    @classmethod
    def begin(cls, layout: Layout, number: int, step: int, name: str, masters: np.ndarray) -> "OuterMasters":
        return cls(layout, number, step, name, "", masters, np.zeros_like(masters))

    def advance(
        self, outer: OuterStep, change: np.ndarray, step: int, contributors: tuple[int, ...]
    ) -> tuple["OuterMasters", np.ndarray]:
        """Return the masters after an outer step, and its update, encoded. Everyone applies it as `subtract` does.

        change: mean over the groups of (outer masters - the group's masters).
        """
        decay, rate = np.float32(outer.momentum), np.float32(outer.rate)
        momentum = decay * self.momentum + change
        update = self.layout.encode(rate * (change + decay * momentum), outer.form)
        masters = subtract(self.layout, self.masters, update, outer.form)
        advanced = replace(
            self,
            round=self.round + 1,
            step=max(self.step, step),
            name=make_name(),
            previous=self.name,
            masters=masters,
            momentum=momentum,
            contributors=contributors,
        )
        return advanced, update


def make_name() -> str:
    return secrets.token_hex(8)


def subtract(layout: Layout, masters: np.ndarray, update: np.ndarray, form: str) -> np.ndarray:
    """Return the masters after an encoded update. The server and all groups get the same bits."""
    new: np.ndarray = masters - layout.decode(update, form)
    return new
