"""Checks that every field is read, that a resume changes only what it may, and that wrong types are found."""

import ast
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxopt_llm.config import Config, cli
from jaxopt_llm.config.cli import KNOWN_AS, find_settings
from jaxopt_llm.config.fields import (
    FIELDS,
    METADATA,
    SEARCHED,
    forbidden_changes,
    replace_fields,
    wrong_types,
)
from jaxopt_llm.config.metadata import AT_LEAST_ONE, Metadata
from jaxopt_llm.core.errors import InputError

pytestmark = pytest.mark.core

PACKAGE = Path(__file__).parent.parent / "jaxopt_llm"
WHOLE_READERS = {"astuple", "asdict"}  # dataclasses.astuple(config.mesh) reads every field of it


class Reads(ast.NodeVisitor):
    """Visitor that collects the (class, field) pairs that the source reads, by the annotations of its objects.

    Reads in methods called `problems` do not count, because those only validate.
    """

    def __init__(self, attributes: dict[tuple[str, str], str]) -> None:
        self.attributes = attributes  # (class, attribute or method) -> annotation of the value or result
        self.scopes: list[dict[str, str]] = [{}]  # name -> annotation, innermost last
        self.found: set[tuple[str, str]] = set()

    def type_of(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), "")
        if isinstance(node, ast.Attribute):
            return self.attributes.get((self.type_of(node.value), node.attr), "")
        return self.type_of(node.func) if isinstance(node, ast.Call) else ""

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
            value = node.value
            # A starred name makes the lengths differ.
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                pairs = [*zip(target.elts, value.elts, strict=True)]
            else:
                pairs = [(target, value)]
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    self.scopes[-1][name.id] = self.type_of(value)
                elif isinstance(name, ast.Attribute):
                    self.attributes.setdefault((self.type_of(name.value), name.attr), self.type_of(value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self.scopes[-1][node.target.id] = annotation(node.annotation)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.found.add((self.type_of(node.value), node.attr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).removeprefix("dataclasses.") in WHOLE_READERS:
            class_name = self.type_of(node.args[0])
            self.found |= {key for key in self.attributes if key[0] == class_name}
        self.generic_visit(node)


def annotation(node: ast.expr) -> str:
    """Return the class that an annotation names: X for `X`, `X | None` and `"X"`."""
    return ast.unparse(node).strip("'\"").removesuffix(" | None")


def unread(sources: Mapping[str, str], fields: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the (class, field) pairs that none of the sources reads. sources: text by file name."""
    trees = {name: ast.parse(source) for name, source in sources.items()}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    attributes = {
        (node.name, each.target.id if isinstance(each.target, ast.Name) else each.target.attr): annotation(
            each.annotation
        )
        for node in classes
        for each in ast.walk(node)
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name | ast.Attribute)
    }
    attributes |= {
        (node.name, each.name): annotation(each.returns)
        for node in classes
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.returns
    }
    reads = Reads(attributes)
    for tree in trees.values():
        reads.scopes = [{}]
        reads.visit(tree)
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
    fields = set(fields_of(Config))
    assert len(fields) == len(FIELDS)
    assert not unread(sources(), fields)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def train(config: Config): print(config.checkpoint.every)", True),
        ("def save(kept: CheckpointConfig): print(kept.every)", True),
        ("class A:\n config: CheckpointConfig\n def save(self): print(self.config.every)", True),
        ("def train(config: Config):\n kept = config.checkpoint\n print(kept.every)", True),
        ("def train(config: Config):\n kept, logged = config.checkpoint, config.logging\n print(kept.every)", True),
        ("def train(config: Config): print(dataclasses.astuple(config.checkpoint))", True),
        ("def train(config: Config): print(config.logging.every)", False),
        ("class CheckpointConfig:\n def problems(self): return self.every < 1", False),
    ],
)
def test_reads_of_a_field_are_found(source: str, found: bool) -> None:
    declared = "class CheckpointConfig:\n every: int\nclass Config:\n checkpoint: CheckpointConfig\n logging: L"
    assert (not unread({"config.py": declared, "a.py": source}, {("CheckpointConfig", "every")})) == found


def test_a_resume_may_change_where_it_runs_but_not_what_it_learns() -> None:
    old = Config()
    elsewhere = replace_fields(old, {"mesh.fsdp": 8, "remat.policy": "full", "training.steps": 7, "checkpoint.keep": 9})
    assert forbidden_changes(old, elsewhere) == []
    other = replace_fields(elsewhere, {"optimizer.learning_rate": 1.0, "run.seed": 3, "model.width": 8})
    allowed = replace_fields(other, {"run.allow_change": ("optimizer.learning-rate",)})
    named = [[each.split(" was ")[0] for each in forbidden_changes(old, new)] for new in (other, allowed)]
    assert named == [["run.seed", "model.width", "optimizer.learning_rate"], ["run.seed", "model.width"]]


def test_a_resume_never_adds_or_drops_a_loss_scale() -> None:
    permission = {"run.allow_change": ("precision.compute_dtype",)}
    narrow = replace_fields(Config(), {"precision.compute_dtype": "float16"} | permission)
    wide = replace_fields(narrow, {"precision.compute_dtype": "float32"})
    assert [len(forbidden_changes(Config(), new)) for new in (wide, narrow)] == [0, 1]
    assert len(forbidden_changes(narrow, wide)) == 1


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
def test_a_value_of_the_wrong_type_is_named(name: str, value: object) -> None:
    assert wrong_types(Config()) == []
    (message,) = wrong_types(replace_fields(Config(), {name: value}))
    assert message.startswith(f"{name}={value!r}: must be ")


def test_help_and_settings_need_no_jax(tmp_path: Path) -> None:
    """JAX takes seconds to import; here it cannot be imported at all."""
    (tmp_path / "jax.py").write_text("raise ImportError('JAX was imported')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    commands = ("train", "plan", "evaluate", "generate", "convert", "prepare", "checkpoint", "report", "completion")
    for arguments in (
        *(["-m", f"jaxopt_llm.{name}", "--help"] for name in commands),
        ["-m", "jaxopt_llm", "chat", "--help"],
        ["-m", "jaxopt_llm", "convert", "export", "--help"],
        ["-c", "from jaxopt_llm.config import cli, fields"],
    ):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=PACKAGE.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), arguments
    refused = subprocess.run(
        [sys.executable, "-m", "jaxopt_llm.train"],
        cwd=PACKAGE.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "JAX was imported" in refused.stderr


def test_metadata_of_a_section_holds_for_its_settings_unless_they_have_their_own() -> None:
    assert METADATA["mesh.fsdp"].resume == "freely"
    assert METADATA["mesh.pipeline"] == Metadata(resume="freely", in_backward=1, bounds=AT_LEAST_ONE)
    assert METADATA["model.width"].resume == "never"
    assert METADATA["optimizer.learning_rate"].resume == "if_allowed"
    of_model = {name for name in FIELDS if name.startswith("model.")}
    not_in_folder = {
        f"model.{name}"
        for name in (
            *("pretrained", "family", "resize_vocabulary", "last_layers", "mtp_layers", "scores"),
            *("moe.balance_loss", "moe.router_z_loss"),
            *("moe.router_bias_rate", "moe.capacity_factor"),
        )
    }
    of_adapter = {f"lora.{name}" for name in ("rank", "alpha", "targets", "rslora", "dora")}
    in_pretrained = {name for name, each in METADATA.items() if each.in_pretrained}
    assert in_pretrained == of_model - not_in_folder | of_adapter


def test_names_of_other_trainers_lead_to_one_setting_each() -> None:
    names = [name for known in KNOWN_AS.values() for name in known]
    assert len(names) == len(set(names)) and KNOWN_AS.keys() <= set(FIELDS)
    assert find_settings("lr") == find_settings("training.lr") == ["optimizer.learning_rate"]
    assert find_settings("output_dir") == ["run.directory"]
    assert find_settings("batch_size") == ["training.batch_size"]  # the last part of a name of ours
    assert find_settings("model.widht") == ["model.width"]
    assert find_settings("xyzzy") == []


BOUNDED = [name for name, metadata in METADATA.items() if metadata.bounds]


@pytest.mark.parametrize("name", BOUNDED)
def test_a_value_outside_the_bounds_of_a_setting_is_refused(name: str) -> None:
    bounds = METADATA[name].bounds
    assert bounds is not None
    limits = ((bounds.minimum, -1), (bounds.maximum, 1), (bounds.above, 0), (bounds.below, 0))
    wrong = [limit + step for limit, step in limits if limit is not None]
    allowed = [limit for limit in (bounds.minimum, bounds.maximum) if limit is not None]
    for value in wrong:
        found = replace_fields(Config(), {"mesh.pipeline": 2, name: value}).problems()
        assert f"{name}={value}: must be {bounds}" in found
    for value in allowed:
        found = replace_fields(Config(), {"mesh.pipeline": 2, name: value}).problems()
        assert not any(f"{name}={value}: must be {bounds}" in each for each in found)


def test_a_recipe_has_a_name_without_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.load_recipe("llama2_70b") == cli.load_recipe("llama2_70b.py")
    with pytest.raises(InputError, match=r"--config llama2_70c: no such file, .*; did you mean llama2_70b\.py\?$"):
        cli.load_recipe("llama2_70c")
    (tmp_path / "configs").mkdir()
    recipe = "from jaxopt_llm.config import *\ndef get_config():\n    return Config(run=RunConfig('own'))\n"
    (tmp_path / "configs" / "llama2_70b.py").write_text(recipe)
    assert cli.load_recipe("llama2_70b").run.directory == "own"


def test_what_changes_least_of_what_is_learned_is_proposed_first() -> None:
    assert list(SEARCHED) == [
        *("training.attention", "optimizer.state_dtype", "precision.reduce_dtype", "precision.compute_dtype"),
        *("optimizer.in_backward", "sharding.int8_gathers", "sharding.data_gradients"),
        *("sharding.fsdp_gradients", "training.local_steps", "sharding.expert_room"),
    ]


def test_a_new_setting_is_written_in_one_place(tmp_path: Path) -> None:
    """A field is added to a copy of the package: its flag, type check, metadata, JSON and page follow from it."""
    for folder in ("jaxopt_llm", "configs", "scripts", "docs"):
        shutil.copytree(PACKAGE.parent / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    model = tmp_path / "jaxopt_llm" / "config" / "model.py"
    before = "    width: int = "
    assert model.read_text().count(before) == 1
    field = '    wheels: int = setting(4, resume="never")\n    """Number of wheels."""\n'
    model.write_text(model.read_text().replace(before, field + before))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    train = ("-m", "jaxopt_llm.train", "--config", "quickstart.py")
    assert "Number of wheels. (default: 4)" in run(*train, "--help").stdout
    shown = run(*train, "--model.wheels", "3", "--print-config")
    assert json.loads(shown.stdout)["model"]["wheels"] == 3
    refused = run(*train, "--run.allow-change", "model.wheels")
    assert refused.returncode == 2 and "model.wheels" in refused.stderr
    script = "from jaxopt_llm.config import Config, fields as f; c = Config()\n"
    script += "print(f.forbidden_changes(c, f.replace_fields(c, {'model.wheels': 5})), f.wrong_types("
    script += "f.replace_fields(c, {'model.wheels': 'x'})))"
    checked = run("-c", script).stdout
    assert "model.wheels was 4 and is 5" in checked and "model.wheels='x'" in checked
    assert run("scripts/settings_page.py").returncode == 0
    assert (
        "| `wheels` | integer; default `4`; resume: no | Number of wheels. |"
        in (tmp_path / "docs/configuration.md").read_text()
    )


def test_a_section_within_a_section_may_be_a_dict() -> None:
    config = Config(model={"width": 64, "moe": {"experts": 4}})  # type: ignore[arg-type]
    assert (config.model.width, config.model.moe.experts) == (64, 4)
    with pytest.raises(InputError, match=r"config: model\.moe has no setting expert; did you mean experts"):
        Config(model={"moe": {"expert": 4}})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero_stage": 3}, r"no section zero_stage; zero_stage is a setting of sharding, as in Config\(sharding=dict"),
        ({"modle": 1}, "no section modle; did you mean model"),
        ({"xyzzy": 1}, "no section xyzzy; the sections are run, model, "),
    ],
)
def test_a_configuration_names_the_section_of_a_setting(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Config(**given)
