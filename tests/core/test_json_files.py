"""The one reader of JSON: whatever a file holds, one error that names it."""

import ast
import os
from pathlib import Path
from typing import Any

import pytest

from jaxopt_llm.core import json_files
from jaxopt_llm.core.errors import CheckpointError, InputError

PACKAGE = Path(json_files.__file__).parent.parent
# Arguments of a tool call are text of a row, and may be no JSON.
PARSERS = {"core/json_files.py", "data/tokens/turns.py"}


DEEP = ("[" * 100_000, '{"a":' * 100_000, "[" * 101 + "]" * 101)


@pytest.mark.parametrize("text", [*DEEP, "9" * 5000, b"\xff", "", "[1"], ids=range(7))
def test_every_problem_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        json_files.parse(text)


def test_depth_is_counted_in_the_value() -> None:
    assert json_files.parse("[" * 100 + "]" * 100)
    assert json_files.parse('"' + "[" * 1000 + '"') == "[" * 1000
    assert len(json_files.parse(f"[{','.join(['[]'] * 1000)}]")) == 1000
    assert json_files.parse_prefix("x" + "[" * 100 + "]" * 100, 1)[1] == 201
    for text in ("[" * 101 + "]" * 101, "[" * 10_000):
        with pytest.raises(ValueError, match="nested more than 100 deep"):
            json_files.parse_prefix(text, 0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ("[1e999]", "1e999 is not a finite number"),
        ('["\\ud800"]', "surrogates not allowed"),
        ('["\\uD800"]', "surrogates not allowed"),
    ],
)
def test_settings_are_stricter_than_data(text: str, problem: str) -> None:
    json_files.parse(text)
    with pytest.raises(ValueError, match=problem):
        json_files.parse_settings(text)
    assert json_files.parse_settings('["\\ud83d\\ude42"]') == ["🙂"]


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"\xff\xfe{}", b"[]", None], ids=repr)
def test_an_error_is_one_line_with_the_path(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        json_files.read_object(file, "restore it", CheckpointError)
    assert str(file) in str(raised.value) and "\n" not in str(raised.value)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(json_files.MAX_BYTES + 1)
    with pytest.raises(InputError, match="a.json: .*more than 134,217,728 bytes"):
        json_files.read(tmp_path / "a.json", "restore it")


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    (tmp_path / "b.json").symlink_to(tmp_path / "a.json")
    for name in ("a.json", "b.json"):
        with pytest.raises(InputError, match=f"{name}: a pipe"):
            json_files.read(tmp_path / name, "restore it")
    with pytest.raises(InputError, match="/dev/zero: a device"):
        json_files.read(Path("/dev/zero"), "restore it")


def parses_json(node: ast.AST) -> bool:
    """Return whether a node is json.loads, json.load or json.JSONDecoder."""
    names: Any = {"load", "loads", "JSONDecoder"}
    if isinstance(node, ast.ImportFrom):
        return node.module == "json"
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "json"
        and (node.attr in names)
    )


def test_no_other_module_parses_json() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(map(parses_json, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == PARSERS
