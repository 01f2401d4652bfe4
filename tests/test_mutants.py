"""The mutants as data: each fits the package and names a test that there is. scripts/mutants tries them."""

from collections import Counter
from pathlib import Path

import pytest
from mutation import Mutant, load

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxopt_llm"
MUTANTS = {each.name: each for each in load()}
LEAST, LEAST_OF_A_ROOM = 50, 4

ENTRY = """
[[mutant]]
name = "a"
file = "b.py"
old = "x = 1"
new = "x = 2"
test = "test_b.py::test_b[1]"
why = "c"
"""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fits_the_package(name: str) -> None:
    assert MUTANTS[name].problems(ROOT) == []


def test_every_room_has_some() -> None:
    assert len(MUTANTS) >= LEAST
    found = Counter((ROOT / each.file).parent for each in MUTANTS.values())
    rooms = {path.parent for path in PACKAGE.rglob("*.py")}
    assert {room for room in rooms if found[room] < LEAST_OF_A_ROOM} == set()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ENTRY.replace('why = "c"', ""), "a: the fields are file, name, new, old, test"),
        (f"{ENTRY}more = 1", "a: the fields are file, more, name"),
        (ENTRY + ENTRY, "two mutants are named a"),
    ],
    ids=["without a field", "with another", "one name twice"],
)
def test_wrong_entries_are_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text(ENTRY)
    assert [each.name for each in load(tmp_path)] == ["a"]
    (tmp_path / "some.toml").write_text(content)
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


def test_the_text_stands_once() -> None:
    mutant = Mutant("a", "b.py", "x = 1", "x = 2", "test_b.py::test_b", "c")
    assert mutant.apply("y = 0\nx = 1\n") == "y = 0\nx = 2\n"
    for text in ("y = 0\n", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match=f"stands there {text.count('x')} times"):
            mutant.apply(text)


def test_what_is_wrong_with_a_mutant_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "test_b.py").write_text("def test_b():\n    pass\n")

    def problems(**fields: str) -> list[str]:
        given = {"file": "b.py", "old": "x = 1", "new": "x = 2", "test": "test_b.py::test_b[1]", **fields}
        return Mutant(name="a", why="c", **given).problems(tmp_path)

    assert problems() == []
    assert problems(file="c.py") == ["c.py: no such file"]
    assert problems(new="x = 1") == ["changes nothing"]
    assert "no Python" in problems(new="x = ")[0]
    assert problems(test="test_b.py::test_c") == ["no such test: test_b.py::test_c"]
