"""The order of the folders: a module imports from its own folder and from folders below it only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxopt_llm"
FLOORS = (
    ("core",),
    ("config",),
    ("kernels",),
    ("compiler",),
    ("distributed",),
    ("supervision",),
    ("parallel",),
    ("model",),
    ("data/reading", "data/tokens", "data/rows", "checkpoint", "observe", "execution"),
    ("step",),
    ("run",),
    ("inference",),
    ("planning",),
    ("engine",),
    (
        "train",
        "evaluate",
        "generate",
        "serve",
        "prepare",
        "plan",
        "convert",
        "report",
        "import_config",
        "supervise",
        "checkpoint/__main__",
    ),
    ("__main__",),
    ("completion",),
)
DATA = ("data/reading", "data/tokens", "data/rows")  # rooms of one floor, each of which imports those before it
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def room(module: str) -> str:
    """jaxopt_llm.model.layers -> model, and jaxopt_llm.data.rows.packing -> data/rows"""
    first, *more = module.split(".")[1:]
    return f"{first}/{more[0]}" if first == "data" else first


def own_room(path: Path) -> str:
    """A folder's __main__ is a command: it stands above the folder, at whose name it is called."""
    relative = path.relative_to(PACKAGE).with_suffix("")
    return str(relative) if path.name == "__main__.py" else room(".".join(("jaxopt_llm", *relative.parts)))


def imported(path: Path) -> set[str]:
    """Folders of this package that a module imports, wherever in its text."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {room(name) for name in names if name.startswith("jaxopt_llm.")}
    return rooms


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_go_down(path: Path) -> None:
    own = own_room(path)
    before = DATA[: DATA.index(own)] if own in DATA else ()
    above = {other for other in imported(path) - {own, *before} if FLOOR[other] >= FLOOR[own]}
    assert not above, f"{own} (floor {FLOOR[own]}) imports {above}"


def test_every_room_has_a_floor() -> None:
    rooms = {own_room(path) for path in MODULES}
    assert rooms == set(FLOOR)
