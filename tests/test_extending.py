"""The worked examples of docs/extending*.md: applied to a copy of the repository, and their tests run there."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / name for name in ("extending.md", "extending_kernels.md")]
TEXT = "".join(page.read_text() for page in PAGES)
BLOCK = re.compile(r'^```(diff|python) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
NAMES = ("reglu", "gated", "every_switch", "jais", "dense", "signum", "half_rate")
MAX_FILES, MAX_LINES = 4, 300  # of a model switch, tests included; of the page


def apply_block(kind: str, file: Path, text: str) -> str:
    """Write a new file, or replace the lines of a diff that begin with " " and "-" by those with " " and "+".

    Return a message if the file has not the lines that the diff quotes.
    """
    if kind == "python":
        assert not file.exists(), file
        file.write_text(text)
        return ""
    lines = text.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    before = file.read_text()
    count = before.count(old)
    if count != 1:
        return f"docs quote lines that {file.name} has {count} times; correct the page:\n{old}"
    file.write_text(before.replace(old, new))
    return ""


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a copy of the repository with all examples of the page."""
    copy = tmp_path_factory.mktemp("extended")
    for name in ("jaxopt_llm", "tests", "configs", "benchmarks", "scripts", "docs", "pyproject.toml", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    wrong = [apply_block(kind, copy / name, text) for kind, name, text in BLOCK.findall(TEXT)]
    assert not any(wrong), "\n".join(filter(None, wrong))
    yield copy
    shutil.rmtree(copy)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_diffs_quote_lines_of_the_repository(extended: Path) -> None:
    """The slow tests run the tests of the examples; a changed line is found by every run."""
    assert "signum" in (extended / "jaxopt_llm" / "step" / "optimizer.py").read_text()


def test_a_model_switch_touches_few_files() -> None:
    page = PAGES[0].read_text()
    assert page.count("\n") <= MAX_LINES
    switches = [section for section in page.split("\n## ") if section.startswith("A model switch")]
    assert len(switches) == 2
    for section in switches:
        files = {name for _, name, _ in BLOCK.findall(section)}
        assert len(files) <= MAX_FILES and any(name.startswith("tests/") for name in files)


@pytest.mark.slow
def test_the_tests_of_the_examples_pass(extended: Path) -> None:
    """All tests that the page names, in one process: it imports JAX once."""
    files = sorted(set(re.findall(r"(tests/\S+\.py)", "\n".join(re.findall(r"pytest ([^`]*)`", TEXT)))))
    assert len(files) == 8
    done = run(extended, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", " or ".join(NAMES), *files)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"^(\S+::\S+).* PASSED", done.stdout, re.MULTILINE)
    for name in NAMES:
        assert any(name in test for test in passed), f"no test of {name} passed"


@pytest.mark.slow
def test_the_examples_are_settings_of_the_commands(extended: Path) -> None:
    switches = (
        "--model.mlp",
        "reglu",
        "--model.attention-gate",
        "head",
        "--optimizer.name",
        "signum",
        "--training.attention",
        "dense",
    )
    staged = ("--mesh.pipeline", "2", "--training.accumulation", "2", "--pipeline.schedule", "half_rate")
    plan = ("-m", "jaxopt_llm.plan", "--config", "quickstart.py", "--gpu", "h100", "--gpus-per-host", "2")
    done = run(extended, *plan, *switches, *staged)
    assert done.returncode == 0, done.stderr
    assert "attention: dense" in done.stdout
    page = run(extended, "scripts/settings_page.py")
    assert page.returncode == 0 and "`reglu`" in (extended / "docs" / "configuration.md").read_text()
