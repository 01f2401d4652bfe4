"""A mutant: one small break of the package, and the test that must fail because of it."""

import ast
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # of the package or of docs/, from the root of the repository
    old: str  # text that stands exactly once in the file
    new: str  # text to put in its place
    test: str  # node id of the test that must fail; without parameters, one of its cases must
    why: str  # what a user would lose if the break went unseen

    def apply(self, text: str) -> str:
        """Return the file's text with the break in it.

        Raises:
            ValueError: `old` is not in the text, or is there more than once.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file}: the text to replace stands there {count} times, must be once: {self.old!r}")
        return text.replace(self.old, self.new)

    def problems(self, root: Path) -> list[str]:
        """Return what is wrong with the mutant, without running its test."""
        if not (root / self.file).is_file():
            return [f"{self.file}: no such file"]
        found = []
        try:
            broken = self.apply((root / self.file).read_text())
            if self.old == self.new:
                found.append("changes nothing")
            if self.file.endswith(".py"):
                ast.parse(broken)
        except ValueError as error:
            found.append(str(error))
        except SyntaxError as error:
            found.append(f"the broken file is no Python: {error}")
        path, _, test = self.test.partition("::")
        name = test.split("[")[0].split("::")[-1]
        if not (root / path).is_file() or f"def {name}(" not in (root / path).read_text():
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
