"""Which tests run: all but the slow ones, a share of the slow ones, or those nearest to a change.

A test file is near to a changed file when it imports it through few others.
"""

import ast
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUICK_SECONDS = 75  # after which --quick starts no test more; what runs then has to end, and the start took its time
FAR = 99


def share_of(items: list[pytest.Item], part: int, parts: int, changed: Iterable[Path]) -> list[pytest.Item]:
    """Return every `parts`-th test, beginning with number `part`, and the tests that a change touches by name: those
    whose own file is changed, or that of the module which their file is named after."""
    touched = set(changed)
    near = {path for path in {item.path for item in items} if path in touched or touched & set(tested_by_name(path))}
    return [item for number, item in enumerate(items) if number % parts == part or item.path in near]


def changed_files() -> list[Path]:
    """Return the files that differ from the last commit or, where none does, those that the last commit changed."""

    def names(*command: str) -> list[str]:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.split("\0")[:-1]

    found = names("diff", "--name-only", "-z", "HEAD") + names("ls-files", "--others", "--exclude-standard", "-z")
    # Of a merge, what it brought; of a shallow clone's only commit, nothing.
    found = found or names("diff-tree", "--no-commit-id", "--name-only", "-r", "-z", "--first-parent", "-m", "HEAD")
    return [ROOT / name for name in found]


def distances(tests: Iterable[Path], changed: Iterable[Path]) -> dict[Path, int]:
    """Return for each test file how far it is from the nearest changed file.

    0 is a test that is changed or is named after a changed module, 1 one that imports or mentions a changed file, and
    one more for every import between. FAR is a test that no path of imports connects with a change.
    """
    imports = {path: imported(path) for path in (*ROOT.glob("jaxopt_llm/**/*.py"), *ROOT.glob("tests/**/*.py"))}
    return {test: _distance(test, set(changed), imports) for test in tests}


def _distance(test: Path, changed: set[Path], imports: Mapping[Path, set[Path]]) -> int:
    if test in changed or changed & set(tested_by_name(test)):
        return 0
    text = test.read_text()
    # Recipes, scripts and documents are not imported: a test names the file or its folder.
    read = [path for path in changed if ROOT / "jaxopt_llm" not in path.parents]
    if any(path.name in text or f"{path.parent.name}/" in text for path in read):
        return 1
    reached, edge, distance = {test}, {test}, 0
    while edge:
        distance += 1
        edge = {each for path in edge for each in imports.get(path, ())} - reached
        if edge & changed:
            return distance
        reached |= edge
    return FAR


def tested_by_name(test: Path) -> list[Path]:
    """Return the modules that a test file is named after: tests/data/test_packing.py, jaxopt_llm/data/packing.py."""
    folder = ROOT / "jaxopt_llm" / test.parent.relative_to(ROOT / "tests")
    name = test.stem.removeprefix("test_")
    return [path for path in folder.glob("*.py") if name == path.stem or name.startswith(f"{path.stem}_")]


def imported(path: Path) -> set[Path]:
    """Return the files of the repository that a file imports, wherever in its text."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    parts = [name.replace(".", "/") for name in names]
    folders = (ROOT, ROOT / "tests", ROOT / "benchmarks")
    candidates = (folder / f"{part}{end}" for part in parts for folder in folders for end in (".py", "/__init__.py"))
    return {candidate for candidate in candidates if candidate.is_file()}
