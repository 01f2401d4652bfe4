"""The installed package: the wheel has the recipes, and `jaxopt-llm` runs every command."""

import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from commands import ROOT, TINY

from jaxopt_llm.__main__ import COMMANDS


def run(*command: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    whole = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    arguments = [str(each) for each in command]
    return subprocess.run(arguments, cwd=folder, env=whole, capture_output=True, text=True, timeout=600)


def build(*arguments: object, folder: Path) -> None:
    done = run(sys.executable, "-m", "pip", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if not name.endswith("RECORD")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the files that git knows, so that no earlier build takes part."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build("wheel", "--quiet", "--no-deps", "--wheel-dir", out, ".", folder=source)
    return next(out.glob("*.whl"))


def test_the_wheel_has_the_recipes_and_trains_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    files = contents(wheel)
    recipes = {f"jaxopt_llm/configs/{path.name}" for path in (ROOT / "configs").iterdir() if path.is_file()}
    assert recipes == {name for name in files if name.startswith("jaxopt_llm/configs/")}
    tables = {"kernels/attention_measured.json", "planning/search/grouped_matmul_measured.json"}
    assert {"jaxopt_llm/py.typed", *(f"jaxopt_llm/{table}" for table in tables)} <= files.keys()
    assert not any(name.startswith(("tests/", "configs/", "build/", "setup")) for name in files)

    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    build("install", "--quiet", "--no-deps", "--target", installed, wheel, folder=tmp_path)
    here = {"folder": empty, "PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"}
    where = run(sys.executable, "-c", "import jaxopt_llm; print(jaxopt_llm.__file__)", **here)
    assert where.stdout.startswith(str(installed))
    printed = run(sys.executable, "-m", "jaxopt_llm.train", "--config", "10b.py", "--print-config", **here)
    assert printed.returncode == 0 and '"directory": "runs/10b"' in printed.stdout, printed.stderr
    tiny = [f"--{name}={value}" for name, value in TINY.items()]
    trained = run(
        installed / "bin/jaxopt-llm", "train", "--config", "quickstart.py", *tiny, "--training.steps=1", **here
    )
    assert trained.returncode == 0, trained.stderr
    assert (empty / "runs/quickstart/checkpoints/1").is_dir()


@pytest.mark.slow
def test_a_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    done = run(sys.executable, "-m", "build", "--sdist", "--outdir", source, ROOT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    build("wheel", "--quiet", "--no-deps", "--wheel-dir", out, next(source.glob("*.tar.gz")), folder=tmp_path)
    assert contents(next(out.glob("*.whl"))) == contents(wheel)


@pytest.mark.slow
def test_one_command_has_all_of_them(tmp_path: Path) -> None:
    def started(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "jaxopt_llm", *arguments)
        return run(*command, folder=tmp_path, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")

    assert all(f"  {name} " in started("--help").stdout for name in COMMANDS)
    assert started("--version").stdout == f"jaxopt_llm {metadata.version('jaxopt_llm')}\n"
    unknown = started("trian")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1) and "choose one of train, " in unknown.stderr
    # The arguments and the exit code are those of the module.
    failed = started("train", "--config", "none.py")
    assert failed.returncode == 2 and failed.stderr.startswith("error: --config none.py: no such file")
    assert started("train", "--help").stdout.startswith("usage: jaxopt-llm train ")
    asked = started("chat", "--checkpoint", str(tmp_path / "none"))
    assert asked.returncode == 2 and "not a run directory" in asked.stderr
    modules = {path.stem for path in (ROOT / "jaxopt_llm").glob("*.py")} - {"__init__", "__main__"}
    assert {module for module, _, _ in COMMANDS.values()} == modules | {"checkpoint"}
