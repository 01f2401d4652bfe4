"""Selection of tests: all except the slow ones, a share of the slow ones, or those nearest to a change.

A test file is near a changed file if it imports that file through few others.
"""

import ast
import contextlib
import functools
import re
import subprocess
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
QUICK_SECONDS = 75  # after which --quick starts no more tests; the start and the last tests take time, too
FAR = 99
CONFTEST = ROOT / "tests/conftest.py"
COMMANDS = {"train", "generate", "evaluate", "plan", "prepare", "convert", "checkpoint"}
MOST_BROUGHT = 48  # a change brings at most one in 48 of the slow tests, in addition to the part of the run
EXPENSIVE = ROOT / "tests/expensive.txt"
EXPENSIVE_SECONDS = 1.0  # of a CPU
# Each run has these, whatever they take: a minute of faults in a job of several processes, and the loss by `evaluate`.
NEVER_SLOW = {
    "tests/runs/test_chaos.py::test_a_killed_process_and_a_damaged_checkpoint",
    "tests/test_evaluate.py::test_the_held_out_split_has_the_loss_that_the_run_measured",
}


def read_expensive() -> set[str]:
    """Return the node ids of the tests that were measured to be expensive. They are slow, like the marked ones."""
    return {line.split(maxsplit=1)[1] for line in EXPENSIVE.read_text().splitlines() if not line.startswith("#")}


def write_expensive(seconds: Mapping[str, float]) -> None:
    """Write the list of expensive tests, without NEVER_SLOW. seconds: CPU time of each test of a whole run."""
    expensive = {test: used for test, used in seconds.items() if used >= EXPENSIVE_SECONDS and test not in NEVER_SLOW}
    lines = [f"{used:6.1f} {test}" for test, used in sorted(expensive.items())]
    heading = (
        f"# CPU seconds of the tests that take {EXPENSIVE_SECONDS:g} or more, by scripts/test --measure: slow tests."
    )
    EXPENSIVE.write_text("\n".join([heading, *lines]) + "\n")


def share_of(
    items: list[pytest.Item], part: int, parts: int, changed: Iterable[Path]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return part `part` of `parts` parts of the tests, and the tests that a change touches by name.

    A change touches a test by name if it changes the test's file or a module that the file is named after. The part of
    a test depends only on its name, so a new test does not move other tests. A change to many files would select all
    tests. Therefore it brings at most one in MOST_BROUGHT; the second list has the touched tests that are left out.
    """
    touched = set(changed)
    near = {path for path in {item.path for item in items} if path in touched or touched & set(tested_by_name(path))}
    own = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part]
    others = [item for item in items if item not in own and item.path in near]
    room = len(items) // MOST_BROUGHT
    if len(others) <= room:
        return own + others, []
    brought = [others[number * len(others) // room] for number in range(room)]
    return own + brought, [item for item in others if item not in brought]


def changed_files() -> list[Path]:
    """Return the files that differ from the last commit or, if there are none, those that the last commit changed."""

    def names(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.split("\0")[:-1]

    found = names("diff", "--name-only", "-z", "HEAD") + names("ls-files", "--others", "--exclude-standard", "-z")
    # For a merge, these are the files that it brought in. The only commit of a shallow clone has none.
    found = found or names("diff-tree", "--no-commit-id", "--name-only", "-r", "-z", "--first-parent", "-m", "HEAD")
    return [ROOT / name for name in found]


def distances(tests: Iterable[Path], changed: Iterable[Path]) -> dict[Path, int]:
    """Return the distance of each test file from the nearest changed file.

    The distance is 0 if the test is changed or is named after a changed module, and 1 if it imports or mentions a
    changed file; every import in between adds 1. It is FAR if no path of imports connects the test with a change.
    """
    imports = {path: imported(path) for path in (*ROOT.glob("jaxopt_llm/**/*.py"), *ROOT.glob("tests/**/*.py"))}
    # A module may read data files in its folder.
    beside = {each for path in changed if path.suffix != ".py" for each in path.parent.glob("*.py")}
    touched = {*changed, *(each for each in beside if each in imports)}
    return {test: _distance(test, touched, imports) for test in tests}


def _distance(test: Path, changed: set[Path], imports: Mapping[Path, set[Path]]) -> int:
    if test in changed or changed & set(tested_by_name(test)):
        return 0
    if changed & {ROOT / "pyproject.toml", CONFTEST, *imports.get(CONFTEST, ())} - set(ROOT.glob("jaxopt_llm/**/*.py")):
        return 1
    text = test.read_text()
    # Recipes, scripts and documents are not imported; a test names the file or its folder.
    read = [path for path in changed if ROOT / "jaxopt_llm" not in path.parents]
    if any(_names(text, path) for path in read):
        return 1
    reached, edge, distance = {test}, {test}, 0
    while edge:
        distance += 1
        edge = {each for path in edge for each in imports.get(path, ())} - reached
        if edge & changed:
            return distance
        reached |= edge
    return FAR


def _names(text: str, path: Path) -> bool:
    """Return whether a text names a file or its folder.

    A name without a suffix, such as a script's, counts only together with its folder: "test" and "run" are words.
    """
    folder = path.parent.name
    if not path.suffix:
        return f"{folder}/{path.name}" in text or f'"{folder}" / "{path.name}"' in text
    return path.name in text or f"{folder}/" in text


def tested_by_name(test: Path) -> list[Path]:
    """Return the modules that a test file is named after: data/rows/packing.py for tests/data/rows/test_packing.py."""
    folder = ROOT / "jaxopt_llm" / test.parent.relative_to(ROOT / "tests")
    name = test.stem.removeprefix("test_")
    return [path for path in folder.glob("*.py") if name == path.stem or name.startswith(f"{path.stem}_")]


@functools.cache
def imported(path: Path) -> set[Path]:
    """Return the files of the repository that a file imports, anywhere in its text.

    Tests also start programs, so modules and commands that the strings of a test name count, too.
    """
    names = _imported_names(path.read_text(), strings=ROOT / "tests" in path.parents)
    parts = [name.replace(".", "/") for name in names]
    folders = (ROOT, ROOT / "tests/support", ROOT / "tests/mutants", ROOT / "benchmarks")
    candidates = (folder / f"{part}{end}" for part in parts for folder in folders for end in (".py", "/__init__.py"))
    return {candidate for candidate in candidates if candidate.is_file()}


def _imported_names(program: str, strings: bool) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"jaxopt_llm\.[\w.]+", node.value))
            if node.value in COMMANDS:
                names |= {f"jaxopt_llm.{node.value}", f"jaxopt_llm.{node.value}.__main__"}
            if "import jaxopt_llm" in node.value or "from jaxopt_llm" in node.value:
                with contextlib.suppress(SyntaxError):  # the string is not a Python program
                    names |= _imported_names(node.value, strings)
    return names
