"""The mutants as data: each fits the package and names a test that there is. scripts/mutants tries them."""

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from conftest import COLLECTED
from mutation import Mutant, load

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxopt_llm"
MUTANTS = {each.name: each for each in load()}
LEAST, LEAST_OF_A_ROOM = 150, 4

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


def room(path: Path) -> str:
    """The package's own folder that a file is in; the commands have none."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def test_every_room_has_some() -> None:
    assert len(MUTANTS) >= LEAST
    files = (ROOT / each.file for each in MUTANTS.values())
    found = Counter(room(file) for file in files if PACKAGE in file.parents)
    rooms = {room(path) for path in PACKAGE.rglob("*.py")}
    assert {each for each in rooms if found[each] < LEAST_OF_A_ROOM} == set()


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


def test_the_named_cases_are_collected(request: pytest.FixtureRequest) -> None:
    """A test that was renamed, or a case whose parameters changed, is found without running it. The cases of files that
    this run did not collect are not looked up."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single tests are named: their files are not collected as a whole")
    collected = request.config.stash[COLLECTED]
    files, ids = {each.split("::")[0] for each in collected}, collected | {each.split("[")[0] for each in collected}
    assert [each.name for each in MUTANTS.values() if each.test.split("::")[0] in files and each.test not in ids] == []


# ---- The command.

TEST = """
import pytest
from value import value

@pytest.fixture
def made():
    return 1 / value()

def test_value():
    assert value() == 1

def test_made(made):
    assert value() >= 0

def test_sign():
    assert value() > -1

@pytest.mark.skip
def test_skipped():
    pass
"""


@pytest.fixture(scope="module")
def command() -> ModuleType:
    found = importlib.util.spec_from_file_location("mutants_command", ROOT / "tests/mutants/__main__.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ("test_value", "killed"),
        ("test_sign", "SURVIVED"),
        ("test_made", "NOT RUN"),  # its set-up fails, before it sees anything
        ("test_other", "NOT RUN"),
        ("test_skipped", "skipped"),
    ],
)
def test_the_verdict_on_a_mutant(test: str, verdict: str, command: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "value.py").write_text("def value():\n    return 1\n")
    (tmp_path / "test_value.py").write_text(TEST)
    mutant = Mutant("a", "value.py", "return 1", "return 0", f"test_value.py::{test}", "c")
    assert command.try_one(mutant, tmp_path) == verdict
    assert (tmp_path / "value.py").read_text() == "def value():\n    return 1\n", "the break stays"


def test_a_test_that_hangs_is_stopped(command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TIMEOUT_SECONDS", 2)
    (tmp_path / "value.py").write_text("def value():\n    return 1\n")
    (tmp_path / "test_value.py").write_text(
        "import time\nfrom value import value\n\n\ndef test():\n    time.sleep(300)\n"
    )
    mutant = Mutant("a", "value.py", "return 1", "return 0", "test_value.py::test", "c")
    assert command.try_one(mutant, tmp_path) == "NOT RUN"


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
