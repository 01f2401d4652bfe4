"""A mutant: one small break of a definition, and the test that must fail because of it.

Definitions and tests are found by their names, wherever their files are, so that a mutant survives a move.
"""

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = Path(__file__).parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    name: str
    where: str  # the function, class or assigned name to break (see find_place), or a file: scripts/slurm.sbatch
    old: str  # text that occurs exactly once there
    new: str  # text to put in its place
    test: str  # test that must fail, without the folder of its file; without parameters, one of its cases must
    why: str  # what a user would lose if the break went unseen

    def apply(self, root: Path) -> tuple[Path, str]:
        """Return the file to break and its text with the break in it.

        Raises:
            ValueError: `where` is nowhere or ambiguous, or `old` does not occur there exactly once.
        """
        file, begin, end = find_place(root, self.where)
        text = file.read_text()
        place = text[begin:end]
        if (count := place.count(self.old)) != 1:
            raise ValueError(f"{self.where}: the text to replace occurs {count} times, must occur once: {self.old!r}")
        return file, text[:begin] + place.replace(self.old, self.new) + text[end:]

    def node_id(self, root: Path) -> str:
        """Return the test as pytest names it: tests/data/test_a.py::test_b for test_a.py::test_b.

        Raises:
            ValueError: there is no such file of tests.
        """
        file, _, test = self.test.partition("::")
        found = files_of_tests(root).get(file)
        if not found:
            raise ValueError(f"no such test: {self.test}")
        return f"{found.relative_to(root)}::{test}"

    def problems(self, root: Path) -> list[str]:
        """Return what is wrong with the mutant, without running its test."""
        found = []
        try:
            file, broken = self.apply(root)
            if self.old == self.new:
                found.append("changes nothing")
            if file.suffix == ".py":
                ast.parse(broken)
        except ValueError as error:
            found.append(str(error))
        except SyntaxError as error:
            found.append(f"the broken file is no Python: {error}")
        file_name, _, test = self.test.partition("::")
        path, name = files_of_tests(root).get(file_name), test.split("[")[0].split("::")[-1]
        if not path or f"def {name}(" not in path.read_text():
            found.append(f"no such test: {self.test}")
        return found


def load(folder: Path = FOLDER) -> list[Mutant]:
    """Read the mutants of all `*.toml` files of a folder.

    Raises:
        ValueError: an entry lacks a field or has another one, or two have one name.
    """
    mutants = []
    for file in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(file.read_text()).get("mutant", []):
            if set(entry) != {field.name for field in fields(Mutant)}:
                raise ValueError(f"{file.name}: {entry.get('name')}: the fields are {', '.join(sorted(entry))}")
            mutants.append(Mutant(**entry))
    names = [each.name for each in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two mutants are named {' and '.join(twice)}")
    return mutants


def find_place(root: Path, where: str) -> tuple[Path, int, int]:
    """Return the file of a definition, and where in its text the definition begins and ends.

    where: its name as `function`, `Class.method`, `function.inner` or `TABLE`, with as much of its module in front
    as makes it unique in the package: `guard.judge_step`. A path names a whole file.

    Raises:
        ValueError: there is no such definition or file, or there are several.
    """
    if "/" in where:
        if not (root / where).is_file():
            raise ValueError(f"{where}: no such file")
        return root / where, 0, len((root / where).read_text())
    named = definitions(root).get(where.split(".")[-1], [])
    found = [each for each in named if f".{each[0]}".endswith(f".{where}")]
    if len(found) != 1:
        names = ", ".join(name for name, *_ in found) or "nothing"
        raise ValueError(f"{where} must name one definition of the package, names {names}")
    return found[0][1:]


@functools.cache
def definitions(root: Path) -> dict[str, list[tuple[str, Path, int, int]]]:
    """Return the definitions of the package by their last name: dotted name, file, begin and end in its text."""
    found: dict[str, list[tuple[str, Path, int, int]]] = {}
    for file in sorted((root / "jaxopt_llm").rglob("*.py")):
        text = file.read_text()
        lines = [0]  # where each line begins
        for line in text.splitlines(keepends=True):
            lines.append(lines[-1] + len(line))
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for name, first, last in _walk(ast.parse(text), module):
            found.setdefault(name.rpartition(".")[2], []).append((name, file, lines[first - 1], lines[last]))
    return found


def _walk(parent: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the first and the last line of each definition inside a node."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name = f"{prefix}.{node.name}"
            yield name, min(each.lineno for each in (node, *node.decorator_list)), node.end_lineno or node.lineno
            yield from _walk(node, name)
            continue
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and not isinstance(parent, FUNCTIONS):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield f"{prefix}.{target.id}", node.lineno, node.end_lineno or node.lineno
        yield from _walk(node, prefix)


@functools.cache
def files_of_tests(root: Path) -> dict[str, Path]:
    """Return the files of tests by name. Pytest requires that no two have the same."""
    return {file.name: file for file in (root / "tests").rglob("test_*.py")}
