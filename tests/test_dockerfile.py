"""The image, as far as it can be checked without an engine that builds images."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from commands import ROOT

# Instructions, with continued lines joined.
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
STEPS = [line.split(maxsplit=1) for line in LINES if line and not line.startswith("#")]


def steps(name: str) -> list[str]:
    return [rest for instruction, rest in STEPS if instruction == name]


def copied_sources() -> list[str]:
    return [source for copy in steps("COPY") for source in shlex.split(copy)[:-1]]


def test_the_package_builds_from_what_is_copied(tmp_path: Path) -> None:
    kept = (ROOT / ".dockerignore").read_text().split()
    for copy in steps("COPY"):
        *sources, target = shlex.split(copy)
        for source in sources:
            assert f"!{source}" in kept, f"{source} is in .dockerignore"
            to = tmp_path / "image" / target
            to.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, to)
    wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, tmp_path / "image")
    built = subprocess.run(wheel, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as file:
        assert {"jaxopt_llm/__main__.py", "jaxopt_llm/configs/quickstart.py"} <= set(file.namelist())


def test_its_commands_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (install,) = (step for step in steps("RUN") if step.startswith("pip install"))
    arguments = shlex.split(install)
    extra = re.fullmatch(r"\.\[(\w+)\]", arguments[-1])
    assert extra and extra[1] in project["optional-dependencies"]
    assert arguments[arguments.index("--constraint") + 1] in copied_sources()
    (entry,) = json.loads(steps("ENTRYPOINT")[0])
    assert entry in project["scripts"]
    assert steps("USER") == ["trainer"] and any("--uid 1000 trainer" in step for step in steps("RUN"))


def test_kubernetes_runs_the_image() -> None:
    text = (ROOT / "scripts/kubernetes-jobset.yaml").read_text()
    tag = re.search(r"docker build --tag (\S+) \.", (ROOT / "Dockerfile").read_text())
    assert tag and f"image: {tag[1]}\n" in text
    arguments = "".join(f"                    - {word}\n" for word in ("supervise", "--", "train"))
    assert "command:" not in text and f"args:\n{arguments}" in text  # arguments of the entry point
    assert "fsGroup: 1000" in text
