"""The mutants as data: each fits the package and names a test that there is. scripts/mutants tries them."""

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from conftest import COLLECTED
from mutation import Mutant, find_place, load

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxopt_llm"
MUTANTS = {each.name: each for each in load()}
LEAST_OF_A_ROOM = 4

ENTRY = """
[[mutant]]
name = "a"
where = "b.f"
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
    files = (find_place(ROOT, each.where)[0] for each in MUTANTS.values())
    found = Counter(room(file) for file in files if PACKAGE in file.parents)
    rooms = {room(path) for path in PACKAGE.rglob("*.py")}
    assert {each for each in rooms if found[each] < LEAST_OF_A_ROOM} == set()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (ENTRY.replace('why = "c"', ""), "a: the fields are name, new, old, test, where"),
        (f"{ENTRY}more = 1", "a: the fields are more, name"),
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


CODE = """
TABLE = {"a": 1}

class Shape:
    size: int = 1

    @property
    def area(self):
        return 1

def outer():
    def area():
        return 1 + 1
    return 1
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The root of a repository with a package of two files, a test and a script."""
    for name in ("jaxopt_llm/a/one.py", "jaxopt_llm/two.py", "tests/a/test_one.py", "scripts/run"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "jaxopt_llm/a/one.py").write_text(CODE)
    (tmp_path / "jaxopt_llm/two.py").write_text("def outer():\n    return 1\n")
    (tmp_path / "tests/a/test_one.py").write_text("def test_b():\n    pass\n")
    (tmp_path / "scripts/run").write_text("exit 1")
    return tmp_path


@pytest.mark.parametrize(
    ("where", "old", "said"),
    [
        ("TABLE", "1", ""),
        ("Shape.size", "1", ""),
        ("Shape.area", "@property", ""),
        ("outer.area", "return 1", ""),
        ("two.outer", "1", ""),
        ("jaxopt_llm.two.outer", "1", ""),
        ("scripts/run", "1", ""),
        ("area", "1", "names jaxopt_llm.a.one.Shape.area, jaxopt_llm.a.one.outer.area"),
        ("outer", "1", "names jaxopt_llm.a.one.outer, jaxopt_llm.two.outer"),
        ("wo.outer", "1", "names nothing"),
        ("scripts/walk", "1", "scripts/walk: no such file"),
        ("outer.area", "1", "occurs 2 times"),
        ("Shape.area", "size", "occurs 0 times"),
    ],
)
def test_a_definition_is_found_by_its_name_and_the_text_inside_it(
    where: str, old: str, said: str, package: Path
) -> None:
    mutant = Mutant("a", where, old, "BROKEN", "test_one.py::test_b", "c")
    if said:
        with pytest.raises(ValueError, match=re.escape(said)):
            mutant.apply(package)
        return
    file, broken = mutant.apply(package)
    assert broken.count("BROKEN") == 1 and broken.replace("BROKEN", old) == file.read_text()
    if where == "outer.area":
        assert "BROKEN + 1" in broken, "the text outside is changed"


def test_the_named_cases_are_collected(request: pytest.FixtureRequest) -> None:
    """A test that was renamed, or a case whose parameters changed, is found without running it. The cases of files that
    this run did not collect are not looked up."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single tests are named: their files are not collected as a whole")
    collected = request.config.stash[COLLECTED]
    files, ids = {each.split("::")[0] for each in collected}, collected | {each.split("[")[0] for each in collected}
    named = {each.name: each.node_id(ROOT) for each in MUTANTS.values()}
    assert [name for name, test in named.items() if test.split("::")[0] in files and test not in ids] == []


# ---- The command.

VALUE = "def value():\n    return 1\n"
TEST = """
import pytest
from jaxopt_llm.value import value

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
    write_package(tmp_path, TEST)
    mutant = Mutant("a", "value", "return 1", "return 0", f"test_value.py::{test}", "c")
    assert command.try_one(mutant, tmp_path) == verdict
    assert (tmp_path / "jaxopt_llm/value.py").read_text() == VALUE, "the break stays"


def write_package(root: Path, test: str) -> None:
    for name, text in {"jaxopt_llm/__init__.py": "", "jaxopt_llm/value.py": VALUE, "tests/test_value.py": test}.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)


def test_a_test_that_hangs_is_stopped(command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TIMEOUT_SECONDS", 2)
    write_package(tmp_path, "import time\n\n\ndef test():\n    time.sleep(300)\n")
    mutant = Mutant("a", "value", "return 1", "return 0", "test_value.py::test", "c")
    assert command.try_one(mutant, tmp_path) == "NOT RUN"


def test_what_is_wrong_with_a_mutant_is_named(package: Path) -> None:
    def problems(**fields: str) -> list[str]:
        given = {
            "where": "Shape.area",
            "old": "return 1",
            "new": "return 2",
            "test": "test_one.py::test_b[1]",
            **fields,
        }
        return Mutant(name="a", why="c", **given).problems(package)

    assert problems() == []
    assert "names nothing" in problems(where="other")[0]
    assert problems(new="return 1") == ["changes nothing"]
    assert "no Python" in problems(new="return (")[0]
    assert problems(test="test_one.py::test_c") == ["no such test: test_one.py::test_c"]
    assert problems(test="test_two.py::test_b") == ["no such test: test_two.py::test_b"]
