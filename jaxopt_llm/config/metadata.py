"""Metadata of a setting, in addition to its type and its default.

A section of `Config` can have metadata that all its settings share. The metadata of a setting overrides it.
"""

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

from jaxopt_llm.core.errors import InputError

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


class Section:
    """Base class of the sections of a configuration, which are dataclasses.

    A dict of settings is accepted in place of a section within it.

    Attributes:
        path: dotted name of the section, such as model.rope.

    Raises:
        InputError: there is no setting of a name.
    """

    path = ""

    def __init_subclass__(cls, path: str | None = None) -> None:
        if path is not None:  # a subclass of a section keeps its path
            cls.path = path

    def __new__(cls, *values: Any, **named: Any) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in named:
            if name not in known:
                raise InputError(f"config: {cls.explain_unknown(name)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            section: Any = field.default_factory
            if isinstance(given := getattr(self, field.name), dict) and section is not dataclasses.MISSING:
                object.__setattr__(self, field.name, section(**given))

    @classmethod
    def explain_unknown(cls, name: str) -> str:
        """Return that the section has no such setting, and what the user may mean."""
        from jaxopt_llm.config.cli import find_namesakes  # here, because it imports all sections

        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        found, prefix = find_namesakes(name), f"{cls.path}."
        own = [each.removeprefix(prefix) for each in found if each.startswith(prefix)]
        near = own or difflib.get_close_matches(name, known, 1) or found
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
        return f"{cls.path} has no setting {name}; {hint}"

    def problems(self) -> list[str]:
        """List the errors in this section."""
        return self.find_out_of_range()

    def find_out_of_range(self) -> list[str]:
        """List the settings that are outside their bounds."""
        found = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            bounds, value = Metadata(**field.metadata).bounds, getattr(self, field.name)
            if bounds and not isinstance(value, str) and not bounds.include(value):  # a text is a choice such as auto
                found.append(f"{self.path}.{field.name}={value}: must be {bounds}")
        return found
