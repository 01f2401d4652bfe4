"""Write docs/configuration.md: every setting with its type, its default and its description.

    .venv/bin/python scripts/settings_page.py          write the page
    .venv/bin/python scripts/settings_page.py --check  exit with 1 if the page is out of date

The descriptions are the string literals below the fields in jaxopt_llm/config/.
"""

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pages import write_or_check

from jaxopt_llm.config import Config, fields

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
INTRODUCTION = """# Configuration

Every setting of `jaxopt_llm`, by section. A recipe sets them in Python, the command line overrides them:
`--optimizer.learning-rate 1e-4`; values of a list are separated by spaces. `--print-config` prints and checks the whole
configuration and starts nothing. This page is generated from the field descriptions in `jaxopt_llm/config/` by
`scripts/settings_page.py`.

**Resume** says whether a resumed run may change a setting: *yes*; *named*: only if `run.allow_change` names it, because
it alters what the model learns; *no*: it shapes the arrays of a checkpoint.
"""
RESUME = {"freely": "yes", "if_allowed": "named", "never": "no"}


def descriptions(section: type) -> dict[str, str]:
    """Return the string literal below each field of a dataclass."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, literal in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(literal, ast.Expr):
            found[ast.unparse(field.target)] = " ".join(ast.literal_eval(literal.value).split())
    return found


def type_name(hint: Any) -> str:
    """Return the type of a setting as the table shows it."""
    if typing.get_origin(hint) is typing.Literal:
        return " \\| ".join(f"`{value}`" for value in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"list of {type_name(typing.get_args(hint)[0])}"
    if typing.get_args(hint):
        return " or ".join(map(type_name, typing.get_args(hint)))
    return {int: "integer", float: "number", bool: "True \\| False", str: "text"}[hint]


def default_value(value: Any) -> str:
    if value in ("", ()):
        return "empty"
    return f"`{' '.join(map(str, value))}`" if isinstance(value, tuple) else f"`{value}`"


def rows(section: type, name: str) -> Iterator[str]:
    """Yield the lines of a section; nested sections come last."""
    hints, texts, nested = typing.get_type_hints(section), descriptions(section), []
    yield f"\n## {name}\n"
    if section.__doc__ and not section.__doc__.startswith(f"{section.__name__}("):
        yield f"{' '.join(section.__doc__.split())}\n"
    yield "| setting | values | description |"
    yield "|---|---|---|"
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(hints[field.name]):
            nested.append((hints[field.name], f"{name}.{field.name}"))
            continue
        metadata = fields.METADATA[f"{name}.{field.name}"]
        kind = ", ".join(filter(None, (type_name(hints[field.name]), str(metadata.bounds or ""))))
        text = texts[field.name].replace("|", "\\|")
        default = default_value(field.default)
        yield f"| `{field.name}` | {kind}; default {default}; resume: {RESUME[metadata.resume]} | {text} |"
    for each in nested:
        yield from rows(*each)


def page() -> str:
    sections = typing.get_type_hints(Config)
    lines = [line for name, section in sections.items() for line in rows(section, name)]
    return INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
