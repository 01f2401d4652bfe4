"""Access to settings by dotted name, such as `training.steps`: values, metadata, type checks, comparison and JSON."""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

from jaxopt_llm.config.metadata import Metadata
from jaxopt_llm.config.run import Config
from jaxopt_llm.core import json_files

T = TypeVar("T")

UNIONS = (typing.Union, types.UnionType)  # `A | B` has either of these origins in Python up to 3.13


def walk_fields(
    config_type: Any, prefix: str = "", inherited: dict[str, Any] | None = None
) -> Iterator[tuple[str, Any, Metadata]]:
    """Yield the dotted name, the type and the metadata of each setting of a configuration class, in order."""
    hints = typing.get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        hint, name, metadata = hints[field.name], f"{prefix}{field.name}", {**(inherited or {}), **field.metadata}
        if dataclasses.is_dataclass(hint):
            yield from walk_fields(hint, f"{name}.", metadata)
        else:
            yield name, hint, Metadata(**metadata)


METADATA = {name: metadata for name, _, metadata in walk_fields(Config)}
FIELDS = list(METADATA)
# The settings that `plan --search` may try if `--allow` names them, with their values from wide to narrow.
SEARCHED = {
    name: METADATA[name].search
    for name in sorted(METADATA, key=lambda name: METADATA[name].search_rank)
    if METADATA[name].search
}
# The values that `optimizer.in_backward` requires: any other value of these settings needs all gradients at once.
WITH_IN_BACKWARD = {
    name: metadata.in_backward for name, metadata in METADATA.items() if metadata.in_backward is not None
}


def get_field(section: Any, name: str) -> Any:
    """Return a setting of a configuration, or of a section of one, by its dotted name in it."""
    return functools.reduce(getattr, name.split("."), section)


def replace_fields(section: T, values: dict[str, Any]) -> T:
    """Return a configuration, or a section of one, with some settings replaced, by their dotted names in it."""
    for name, value in values.items():
        section = _replace(section, name.split("."), value)
    return section


def _replace(section: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    return dataclasses.replace(section, **{first: _replace(getattr(section, first), rest, value) if rest else value})


def shared_fields(config: Config) -> dict[str, Any]:
    """Return the settings that must be equal in all processes of a job: all except `distributed.process_id`."""
    return {name: get_field(config, name) for name in FIELDS if name != "distributed.process_id"}


def forbidden_changes(old: Config, new: Config) -> list[str]:
    """List the changes between two configurations that a resumed run must not make."""
    allowed = normalize_names(new.run.allow_change)
    return [
        f"{name} was {get_field(old, name)} and is {get_field(new, name)}"
        for name, metadata in METADATA.items()
        if metadata.resume != "freely"
        and not (name in allowed and can_allow(name, old, new))
        and get_field(old, name) != get_field(new, name)
    ]


def can_allow(name: str, old: Config, new: Config) -> bool:
    """Return whether `run.allow_change` can permit this change: a checkpoint has the same arrays after it."""
    changes_scale = name == "precision.compute_dtype" and old.precision.scales_loss != new.precision.scales_loss
    return METADATA[name].resume != "never" and not changes_scale


def list_changes(old: Config, new: Config) -> list[str]:
    """List the settings that differ between two configurations, without settings of the machine and of the resume."""
    ignored = ("run.directory", "run.allow_change", "distributed.")
    names = (name for name in FIELDS if not name.startswith(ignored))
    return [name for name in names if get_field(old, name) != get_field(new, name)]


def normalize_names(names: tuple[str, ...]) -> list[str]:
    """Return names of settings, which may be spelt with dashes like flags, with underscores."""
    return [name.replace("-", "_") for name in names]


def to_json(config: Config) -> str:
    """Return the configuration as JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(text: str | bytes) -> Config:
    """Return the configuration that `to_json` wrote.

    Raises:
        TypeError: the JSON is not a configuration of this version.
    """

    def build(hint: Any, value: Any) -> Any:
        is_section = dataclasses.is_dataclass(hint)
        if not is_section:
            return tuple(value) if isinstance(value, list) else value
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is not a {hint.__name__}")
        hints = typing.get_type_hints(hint)
        return hint(**{name: build(hints.get(name), each) for name, each in value.items()})

    config: Config = build(Config, json_files.parse_settings(text))
    if wrong := wrong_types(config):
        raise TypeError("; ".join(wrong))
    return config


def wrong_types(config: Any, prefix: str = "") -> list[str]:
    """List the settings whose value does not have the declared type. Python does not check the types of a recipe."""
    found = []
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(hint) and isinstance(value, hint):  # type: ignore[arg-type]
            found += wrong_types(value, f"{prefix}{name}.")
        elif not has_type(value, hint):
            found.append(f"{prefix}{name}={value!r}: must be {describe_type(hint)}")
    return found


def has_type(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in UNIONS:
        return any(has_type(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(has_type(item, typing.get_args(hint)[0]) for item in value)
    if hint is int:
        return type(value) is int and abs(value) < 2**31  # device programs use int32
    if hint is float:  # 0 or a normal number of float32: a device program would read 1e-320 as 0
        return type(value) in (int, float) and (value == 0 or 2.0**-126 <= abs(value) < 2.0**128)
    return type(value) is hint


def describe_type(hint: Any, sequence: str = "a tuple") -> str:
    """Return the values of a type in words. sequence: what the user writes for a tuple."""
    if typing.get_origin(hint) in UNIONS:
        return ", or ".join(describe_type(option, sequence) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"{sequence}, each {describe_type(typing.get_args(hint)[0])}"
    words = {
        int: "a whole number below 2**31, such as 1000",
        float: "0 or a normal float32 number, such as 0.001",
        bool: "True or False",
        str: "text",
    }
    return words.get(hint, f"a {hint.__name__}")
