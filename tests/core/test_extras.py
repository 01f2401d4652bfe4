"""The command in messages that name an extra works from a clone and beside an installed wheel."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from commands import ROOT

from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import describe_install


def test_a_clone_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert describe_install("plan") == f"pip install -e '{ROOT}[plan]'"
    monkeypatch.chdir(ROOT)
    assert describe_install("plan") == "pip install -e '.[plan]'"


def test_an_installed_wheel_is_named_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip takes the extras of a distribution that is installed from its metadata, although no registry has it."""
    monkeypatch.setattr(errors, "_HOLDER", tmp_path)
    assert describe_install("report") == "pip install 'jaxopt_llm[report]'"
    wheel = tmp_path / "jaxopt_llm-0.1.0.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: jaxopt_llm\nVersion: 0.1.0\nProvides-Extra: report\n"
        'Requires-Dist: packaging; extra == "report"\n'
    )
    (wheel / "INSTALLER").write_text("pip\n")
    (wheel / "RECORD").write_text("")
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "jaxopt_llm[report]"]
    if subprocess.run([*pip[:3], "--version"], capture_output=True, check=False).returncode:
        pytest.skip("this environment has no pip")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(pip, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "Requirement already satisfied: packaging" in done.stdout, done.stderr


def test_every_message_asks_for_the_command_and_for_an_extra_that_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = set[str]()
    for file in (ROOT / "jaxopt_llm").rglob("*.py"):
        text = file.read_text()
        assert "jaxopt_llm[" not in text or file.name == "errors.py", f"{file}: use describe_install"
        calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        named = (call for call in calls if ast.unparse(call.func).split(".")[-1] == "describe_install")
        asked |= {ast.literal_eval(call.args[0]) for call in named}
    assert asked == {"lm-eval", "plan", "report", "serve", "triton"} <= project["optional-dependencies"].keys()
