"""The functions and files that docs/architecture.md names exist."""

import ast
import re
from pathlib import Path

import pytest
from commands import ROOT

PACKAGE = ROOT / "jaxopt_llm"
NAMES = re.compile(r"`((?:\w+/)*\w+\.py)(?::\s(\w+(?:\.\w+)*))?`")  # `file.py` or `file.py: name`
FURTHER = re.compile(r",\s`(?!\w+\.py)(\w+(?:\.\w+)*)`")  # further names of the same file: `file.py: name`, `name`


def list_names(path: Path) -> set[str]:
    """Return the functions, classes and constants of a module, and the methods of its classes as Class.method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


MODULES = {path.relative_to(PACKAGE).as_posix(): list_names(path) for path in PACKAGE.rglob("*.py")}


def find_wrong(text: str) -> list[str]:
    """Return what a text names that does not exist: files, and functions of the files before them."""
    wrong = []
    for found in NAMES.finditer(text):
        file, name = found.groups()
        # A bare file name is in the folder named before it.
        holders = [names for module, names in MODULES.items() if module == file or module.endswith(f"/{file}")]
        if not holders:
            wrong.append(file)
        if name is None:
            continue
        listed, end = [name], found.end()
        while further := FURTHER.match(text, end):
            listed.append(further[1])
            end = further.end()
        wrong += [f"{file}: {each}" for each in listed if not any(each in names for names in holders)]
    return wrong


def test_functions_that_are_named_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    assert len([found for found in NAMES.finditer(text) if found[2]]) > 50
    # An example of the form, and a file of the tests.
    assert [each for each in find_wrong(text) if each not in ("file.py", "file.py: name", "tests/test_floors.py")] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`run/loop.py: run_steps`, `Steps.run`, `decoder.py: Decoder`", []),
        ("`run/loop.py: run_step`", ["run/loop.py: run_step"]),
        ("`run/loop.py: run_steps`, `Steps.walk`", ["run/loop.py: Steps.walk"]),
        ("see `run/lop.py`", ["run/lop.py"]),
    ],
)
def test_a_name_that_does_not_exist_is_found(text: str, wrong: list[str]) -> None:
    assert find_wrong(text) == wrong
