"""A configuration as a recipe: the Python file that `--config` takes."""

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from jaxopt_llm.config import TrainConfig

WIDTH = 120  # of a line


def source(config: TrainConfig, docstring: str) -> str:
    """The file's text: what differs from the defaults, section by section. docstring: its text."""
    sections = list(_changed(config))
    imports = {TrainConfig.__module__: {TrainConfig.__name__}}
    for name in sections:
        kind = type(getattr(config, name))
        imports.setdefault(kind.__module__, set()).add(kind.__name__)
    lines = [
        *_docstring(docstring),
        "",
        *(f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())),
        "",
        "",
        "def get_config() -> TrainConfig:",
        *textwrap.indent("return " + _expression(config, indent=4, before=len("return ")), "    ").splitlines(),
    ]
    return "\n".join(lines) + "\n"


def _docstring(text: str) -> Iterator[str]:
    escaped = text.strip().replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    yield from f'"""{escaped}\n"""'.splitlines()


def _changed(section: Any) -> dict[str, Any]:
    """Fields whose value is not the default's, by name."""
    default = type(section)()
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _literal(value: Any) -> str:
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case bool() | float():
            return repr(value)
        case int():
            return f"{value:_}" if abs(value) >= 10_000 else str(value)
        case _:
            return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"


def _expression(value: Any, indent: int, before: int) -> str:
    """Python that makes the value, on one line where it fits. before: characters on its line in front of it."""
    if not dataclasses.is_dataclass(value):
        return _literal(value)
    name = type(value).__name__
    arguments = {field: _expression(each, indent + 4, len(field) + 1) for field, each in _changed(value).items()}
    one_line = f"{name}({', '.join(f'{field}={each}' for field, each in arguments.items())})"
    nested = any(dataclasses.is_dataclass(each) for each in _changed(value).values())
    if not nested and indent + before + len(one_line) < WIDTH:
        return one_line
    inner = "".join(f"{field}={each},\n" for field, each in arguments.items())
    return f"{name}(\n{textwrap.indent(inner, '    ')})"
