"""A field that nothing reads is a promise that nothing keeps; and which of them a resume may change."""

import ast
import dataclasses
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from jaxopt_llm.config import FIELDS, TrainConfig, changed, differences, wrong_types

pytestmark = pytest.mark.core

PACKAGE = Path(__file__).parent.parent / "jaxopt_llm"
WHOLE_READERS = {"astuple", "asdict"}  # dataclasses.astuple(config.mesh) reads every field of it


class Reads(ast.NodeVisitor):
    """Which (class, field) the source reads, of objects whose class its annotations tell.

    What validates does not count: methods called `problems`, and config.py but for what a resume compares.
    """

    def __init__(self, attributes: Mapping[tuple[str, str], str]) -> None:
        self.attributes = attributes  # (class, attribute) -> annotation
        self.scopes: list[dict[str, str]] = [{}]  # name -> annotation, innermost last
        self.found: set[tuple[str, str]] = set()

    def type_of(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), "")
        if isinstance(node, ast.Attribute):
            return self.attributes.get((self.type_of(node.value), node.attr), "")
        return ""

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scopes.append({"self": node.name})
        self.generic_visit(node)
        self.scopes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name != "problems":
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            self.scopes.append({each.arg: annotation(each.annotation) for each in arguments if each.annotation})
            self.generic_visit(node)
            self.scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.scopes[-1][target.id] = self.type_of(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self.scopes[-1][node.target.id] = annotation(node.annotation)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.found.add((self.type_of(node.value), node.attr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).removeprefix("dataclasses.") in WHOLE_READERS:
            of = self.type_of(node.args[0])
            self.found |= {key for key in self.attributes if key[0] == of}
        self.generic_visit(node)


def annotation(node: ast.expr) -> str:
    """The class that an annotation names, of `X`, `X | None` and `"X"`."""
    return ast.unparse(node).strip("'\"").removesuffix(" | None")


def unread(sources: Mapping[str, str], fields: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those of `fields`, (class, field), that none of the sources, by file name, reads."""
    trees = {name: ast.parse(source) for name, source in sources.items()}
    attributes = {
        (node.name, each.target.id): annotation(each.annotation)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    reads = Reads(attributes)
    for name, tree in trees.items():
        for node in tree.body:
            if name != "config.py" or (isinstance(node, ast.FunctionDef) and node.name == "differences"):
                reads.visit(node)
    return fields - reads.found


def fields_of(config_type: type) -> Iterator[tuple[str, str]]:
    hints = typing.get_type_hints(config_type)
    for each in dataclasses.fields(config_type):
        if dataclasses.is_dataclass(hints[each.name]):
            yield from fields_of(hints[each.name])
        else:
            yield config_type.__name__, each.name


def sources() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_every_field_is_read() -> None:
    fields = set(fields_of(TrainConfig))
    assert len(fields) == len(FIELDS)
    nowhere = unread(sources(), fields)
    assert not nowhere


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def train(config: TrainConfig): print(config.checkpoint.every)", True),
        ("def save(kept: CheckpointConfig): print(kept.every)", True),
        ("class A:\n config: CheckpointConfig\n def save(self): print(self.config.every)", True),
        ("def train(config: TrainConfig):\n kept = config.checkpoint\n print(kept.every)", True),
        ("def train(config: TrainConfig): print(dataclasses.astuple(config.checkpoint))", True),
        ("def train(config: TrainConfig): print(config.logging.every)", False),
        ("class CheckpointConfig:\n def problems(self): return self.every < 1", False),
    ],
)
def test_what_counts_as_read(source: str, found: bool) -> None:
    declared = "class CheckpointConfig:\n every: int\nclass TrainConfig:\n checkpoint: CheckpointConfig\n logging: L"
    assert (not unread({"config.py": declared, "a.py": source}, {("CheckpointConfig", "every")})) == found


def test_a_resume_may_change_where_it_runs_and_not_what_it_learns() -> None:
    old = TrainConfig()
    elsewhere = changed(old, {"mesh.fsdp": 8, "remat.policy": "full", "training.steps": 7, "checkpoint.keep": 9})
    assert differences(old, elsewhere) == []
    other = changed(elsewhere, {"optimizer.learning_rate": 1.0, "run.seed": 3, "model.width": 8})
    allowed = changed(other, {"run.allow_change": ("optimizer.learning-rate",)})
    named = [[each.split(" was ")[0] for each in differences(old, new)] for new in (other, allowed)]
    assert named == [["run.seed", "model.width", "optimizer.learning_rate"], ["run.seed", "model.width"]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("training.steps", True),
        ("training.steps", 2.0),
        ("training.steps", 2**31),
        ("optimizer.learning_rate", "1"),
        ("optimizer.learning_rate", True),
        ("optimizer.learning_rate", 1e-320),
        ("optimizer.name", "adam"),
        ("data.paths", "a.txt"),
        ("data.paths", (1,)),
        ("run.deterministic", 1),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_named(name: str, value: object) -> None:
    assert wrong_types(TrainConfig()) == []
    (said,) = wrong_types(changed(TrainConfig(), {name: value}))
    assert said.startswith(f"{name}={value!r}: must be ")
