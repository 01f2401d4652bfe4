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
    in_backward: the only value that `optimizer.in_backward` works with. None: any value.
    """

    resume: Resume = "if_allowed"
    in_pretrained: bool = False
    search: tuple[Any, ...] = ()
    search_rank: int = 0
    in_backward: Any = None


def setting(default: T, **metadata: Any) -> T:
    """Return a field of a section with a default value and some `Metadata`."""
    return dataclasses.field(default=default, metadata=metadata)


def section(default_factory: Callable[[], T], **metadata: Any) -> T:
    """Return a section of `Config` with metadata that all its settings share."""
    return dataclasses.field(default_factory=default_factory, metadata=metadata)


def find_below_one(section_name: str, values: Any, *names: str) -> list[str]:
    """List the settings of a section, among `names`, that are below 1 and must not be."""
    return [
        f"{section_name}.{name}={getattr(values, name)}: must be at least 1"
        for name in names
        if getattr(values, name) < 1
    ]
