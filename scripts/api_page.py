"""Write docs/api.md: the public names of the package, with their signatures and docstrings.

.venv/bin/python scripts/api_page.py          write the page
.venv/bin/python scripts/api_page.py --check  exit with 1 if the page is out of date
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pages import write_or_check

import jaxopt_llm

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
INTRODUCTION = """# API

The names of the package `jaxopt_llm` for programs. [Train any model](guides/any_model.md) shows how they are used, and
[configuration](configuration.md) lists the settings of a `Config`. This page is generated from signatures and
docstrings by `scripts/api_page.py`.
"""
# What the public functions return, raise or warn of; imported from where they are.
FURTHER = (
    "jaxopt_llm.engine.plan.EnginePlan",
    "jaxopt_llm.engine.search.EngineSearch",
    "jaxopt_llm.engine.checks.EngineWarning",
    "jaxopt_llm.inference.load.Pretrained",
    "jaxopt_llm.core.errors.InputError",
    "jaxopt_llm.core.errors.Preempted",
    "jaxopt_llm.core.errors.TrainingDiverged",
    "jaxopt_llm.core.errors.CheckpointError",
)
# Methods and properties that are meant for users, of the classes that have others too.
MEMBERS = {
    "Config": (),
    "LanguageModel": (
        *("initialize", "logits", "log_probabilities", "hidden", "hidden_with_balance", "head", "weights"),
        "save_pretrained",
    ),
    "Engine": (
        *("step", "evaluate", "gradients", "predict", "learning_rate", "plan", "search", "model", "save", "restore"),
        *("example", "parameters"),
    ),
    "Max": (),
    "Sum": (),
}
LONGEST = 100  # characters of a signature in one line


def show(default: Any) -> str:
    return f'"{default}"' if isinstance(default, str) else repr(default)


def signature(function: Any, name: str) -> str:
    """Return the signature as it is written in the source, without `self`."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    positional, named = node.args.args, node.args.kwonlyargs
    assert not (node.args.posonlyargs or node.args.vararg or node.args.kwarg), f"{name}: not implemented"
    defaults = {each.name: each.default for each in inspect.signature(function).parameters.values()}
    parts = [
        ast.unparse(each)
        + (f" = {show(defaults[each.arg])}" if defaults[each.arg] is not inspect.Parameter.empty else "")
        for each in [*positional, *named]
        if each.arg != "self"
    ]
    parts.insert(len(parts) - len(named), "*") if named else None
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= LONGEST:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def paragraphs(docstring: str) -> Iterator[str]:
    """Yield the lines of a docstring in Google's style as Markdown: each section as a list."""
    section = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if heading := re.fullmatch(r"(Args|Attributes|Raises|Returns):", line):
            section = {"Args": "Arguments"}.get(heading[1], heading[1])
            yield from (f"**{section}**", "")
        elif section and (item := re.match(r"    (\w[\w, ]*): (.*)", line)) and section != "Returns":
            yield f"- `{item[1]}`: {item[2]}"
        else:
            yield f"  {line.strip()}" if section not in ("", "Returns") and line else line.strip()


def describe(function: Any, name: str) -> Iterator[str]:
    yield from ("```text", signature(function, name), "```", "")
    if function.__doc__:
        yield from (*paragraphs(function.__doc__), "")


def members(cls: type) -> Iterator[str]:
    """Yield what a class has itself: properties as a list, then methods."""
    shown = MEMBERS.get(cls.__name__, [name for name in vars(cls) if not name.startswith("_")])
    public = {name: vars(cls)[name] for name in shown}
    getters = {name: getattr(each, "fget", getattr(each, "func", None)) for name, each in public.items()}
    documented = {name: getter.__doc__ for name, getter in getters.items() if getter and getter.__doc__}
    yield from (f"- `{name}`: {' '.join(text.split())}" for name, text in documented.items())
    yield from [""] if documented else []
    for name, each in public.items():
        if inspect.isfunction(each) and each.__doc__:
            yield from (f"### {cls.__name__}.{name}", "", *describe(each, f"{cls.__name__.lower()}.{name}"))


def section(name: str, module: str, value: Any) -> Iterator[str]:
    yield from (f"## {name}", "")
    if inspect.isfunction(value):
        yield from describe(value, f"{module}.{name}")
        return
    yield from (f"`{module}.{name}`", "", *paragraphs(value.__doc__), "", *members(value))


def page() -> str:
    lines = [INTRODUCTION]
    for name in sorted(jaxopt_llm.__all__, key=str.lower):
        lines += section(name, "jaxopt_llm", getattr(jaxopt_llm, name))
    for path in FURTHER:
        module, name = path.rsplit(".", 1)
        lines += section(name, module, getattr(importlib.import_module(module), name))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
