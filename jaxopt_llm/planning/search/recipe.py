"""Recipe files: writing a configuration as the Python file that `--config` reads."""

import dataclasses
import json
import textwrap
from typing import Any

from jaxopt_llm.config import Config, fields
from jaxopt_llm.config.unread import find_unread

LINE_WIDTH = 120


def drop_unread(config: Config) -> Config:
    """Return a configuration without the settings of a placement that its mesh does not read, such as `pipeline`."""
    unread = [name for name in find_unread(config) if name.startswith(("pipeline.", "sharding."))]
    return fields.replace_fields(config, {name: fields.get_field(Config(), name) for name in unread})


def format_recipe(config: Config, docstring: str) -> str:
    """Return the text of a recipe file with the fields that differ from the defaults, section by section."""
    escaped = docstring.strip().replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    lines = [
        *f'"""{escaped}\n"""'.splitlines(),
        "",
        _format_import(sorted(_find_classes(config), key=str.lower)),
        "",
        "",
        "def get_config() -> Config:",
        *textwrap.indent("return " + _format_value(config, indent=4, prefix=len("return ")), "    ").splitlines(),
    ]
    return "\n".join(lines) + "\n"


def _find_classes(section: Any) -> set[str]:
    """Return the names of the classes that the recipe constructs."""
    nested = [value for value in _list_changes(section).values() if dataclasses.is_dataclass(value)]
    return {type(section).__name__}.union(*map(_find_classes, nested))


def _format_import(names: list[str]) -> str:
    one_line = f"from jaxopt_llm.config import {', '.join(names)}"
    if len(one_line) <= LINE_WIDTH:
        return one_line
    return "from jaxopt_llm.config import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _list_changes(section: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults, by name."""
    default = type(section)()
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _format_literal(value: Any) -> str:
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case bool() | float():
            return repr(value)
        case int():
            return f"{value:_}" if abs(value) >= 10_000 else str(value)
        case _:
            return f"({', '.join(map(_format_literal, value))}{',' if len(value) == 1 else ''})"


def _format_value(value: Any, indent: int, prefix: int) -> str:
    """Return a Python expression for the value, on one line if it fits.

    Args:
        indent: indentation of the line that it starts on.
        prefix: number of characters before it on that line.
    """
    if not dataclasses.is_dataclass(value):
        return _format_literal(value)
    name = type(value).__name__
    changes = _list_changes(value)
    arguments = {field: _format_value(each, indent + 4, len(field) + 1) for field, each in changes.items()}
    one_line = f"{name}({', '.join(f'{field}={each}' for field, each in arguments.items())})"
    nested = any(dataclasses.is_dataclass(each) for each in changes.values())
    if not nested and indent + prefix + len(one_line) < LINE_WIDTH:
        return one_line
    inner = "".join(f"{field}={each},\n" for field, each in arguments.items())
    return f"{name}(\n{textwrap.indent(inner, '    ')})"
