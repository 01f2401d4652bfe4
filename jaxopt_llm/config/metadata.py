"""Metadata of a setting, in addition to its type and its default.

A section of `Config` can have metadata that all its settings share. The metadata of a setting overrides it.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Resume = Literal["freely", "if_allowed", "never"]


@dataclass(frozen=True)
class Bounds:
    """Range of a number: `minimum` and `maximum` belong to it, `above` and `below` do not. None: no bound."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    def include(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        parts = (("at least", self.minimum), ("at most", self.maximum), ("above", self.above), ("below", self.below))
        return " and ".join(f"{text} {bound:,}" for text, bound in parts if bound is not None)


AUTO = "auto"  # a value that the start of a run resolves
AT_LEAST_ONE = Bounds(minimum=1)
NON_NEGATIVE = Bounds(minimum=0)
POSITIVE = Bounds(above=0)
SHARE = Bounds(minimum=0, below=1)


@dataclass(frozen=True)
class Metadata:
    """Metadata of a setting.

    resume: whether a resumed run may change the setting. "freely": yes, because the setting does not change what the
        model learns, only where, how fast and how long it trains. "if_allowed": only if `run.allow_change` names it.
        "never": no, because the setting determines the arrays of a checkpoint.
    in_pretrained: whether the folder or run that `model.pretrained` or `lora.pretrained` names sets it.
    search: values that `plan --search` tries if `--allow` names the setting, from wide to narrow. Empty: `--allow`
        cannot name it.
    search_rank: order in which the search proposes such settings when nothing fits; lower ranks first, because they
        change less of what the model learns.
    price: drawback of the narrower values in `search`, for advice to a run that does not fit.
    bounds: range of the values of a number.
    is_place: whether it names files or hosts, which no model card publishes.
    in_backward: the only value that `optimizer.in_backward` works with. None: any value.
    """

    resume: Resume = "if_allowed"
    in_pretrained: bool = False
    search: tuple[Any, ...] = ()
    search_rank: int = 0
    price: str = ""
    bounds: Bounds | None = None
    is_place: bool = False
    in_backward: Any = None


def setting(default: T, **metadata: Any) -> T:
    """Return a field of a section with a default value and some `Metadata`."""
    return dataclasses.field(default=default, metadata=metadata)


def section(default_factory: Callable[[], T], **metadata: Any) -> T:
    """Return a section of `Config` with metadata that all its settings share."""
    return dataclasses.field(default_factory=default_factory, metadata=metadata)


def find_out_of_range(name: str, section: Any) -> list[str]:
    """List the settings of a section that are outside their bounds. name: dotted name of the section."""
    found = []
    for field in dataclasses.fields(section):
        bounds, value = Metadata(**field.metadata).bounds, getattr(section, field.name)
        if bounds and not isinstance(value, str) and not bounds.include(value):  # a text is a choice such as auto
            found.append(f"{name}.{field.name}={value}: must be {bounds}")
    return found
