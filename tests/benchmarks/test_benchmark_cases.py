"""Command line of the benchmarks that compile named cases: which rows a file keeps."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from cases import run_cases

from jaxopt_llm.core.errors import InputError

pytestmark = pytest.mark.core
OTHER = "0.0.1"  # a version of JAX


def save(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.write_text(json.dumps({"jax": jax.__version__, "rows": list(rows)}))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the cases that were computed. The settings of JAX stay as they are."""
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    return []


def run(file: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch, *only: str) -> dict[str, str]:
    """Return the rows of the file after a run of two cases, or of those that `only` names."""

    def compute(name: str) -> dict[str, str]:
        computed.append(name)
        return {"case": name, "by": "this run"}

    given = ["--only", *only] if only else []
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json", str(file), *given])
    cases = {name: (lambda name=name: compute(name)) for name in ("first", "second")}
    assert run_cases("", cases, "", lambda row: row["case"], save) == 0
    return {row["case"]: row["by"] for row in json.loads(file.read_text())["rows"]}


def write(file: Path, version: str, *names: str) -> Path:
    file.write_text(json.dumps({"jax": version, "rows": [{"case": name, "by": "a file"} for name in names]}))
    return file


def test_the_other_rows_of_the_file_stay(tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "rows.json", jax.__version__, "first", "second", "a case of the past")
    assert run(file, computed, monkeypatch, "second") == {"first": "a file", "second": "this run"}
    assert computed == ["second"]


def test_rows_of_another_version_of_jax_are_not_relabelled(
    tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "rows.json", OTHER, "first", "second")
    with pytest.raises(InputError, match=f"its rows are of jax {OTHER}, and this is jax .*: leave out --only, or name"):
        run(file, computed, monkeypatch, "second")
    assert computed == []
    assert run(file, computed, monkeypatch) == {"first": "this run", "second": "this run"}
