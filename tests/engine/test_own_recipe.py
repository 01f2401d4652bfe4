"""Recipes with a model of their own, through the commands `train` and `plan`."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from commands import ROOT, command, metrics, start, start_python
from gates import GATED, Gate, finish
from marks import slow
from ports import free_address
from test_engine_processes import losses

from jaxopt_llm.config import Config, cli
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.batches import read_example
from jaxopt_llm.engine.fit import make_engine

RECIPE = """
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxopt_llm import Config

class Network(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))

def model():
    return Network(nnx.Rngs(0))

def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

def data(step):
    x = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    return {"x": x, "y": np.abs(x).mean(1, keepdims=True)}

held_out = [data(1000)]

def get_config():
    return Config(
        training=dict(steps=4),
        optimizer=dict(learning_rate=1e-2),
        schedule=dict(warmup_steps=0),
        precision=dict(compute_dtype="float32"),
        logging=dict(every=1, tensorboard=False),
    )
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(RECIPE)
    return file


def test_train_trains_the_model_of_a_recipe_and_continues_it(recipe: Path, tmp_path: Path) -> None:
    run = ("--config", recipe, "--run.directory", tmp_path / "run")
    done = command("train", *run, "--mesh.fsdp", 2)
    assert done.returncode == 0 and "321 parameters on 2 cpu device(s)" in done.stdout, done.stderr
    done = command("train", *run, "--mesh.fsdp", 4, "--training.steps", 6)
    assert "continues from step 4" in done.stdout, done.stderr
    records = metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1]["eval_loss"] < records[3]["eval_loss"] < records[0]["loss"]
    assert records[-1]["learning_rate"] == pytest.approx(1e-3)  # the schedule ends at step 4


@pytest.mark.slow
def test_processes_train_the_model_of_a_recipe(recipe: Path, tmp_path: Path) -> None:
    command("train", "--config", recipe, "--mesh.fsdp", 4, "--run.directory", tmp_path / "alone")
    job = ("--distributed.coordinator", free_address(), "--distributed.processes", 2, "--mesh.fsdp", 4)
    run = ("--config", recipe, "--run.directory", tmp_path / "together")
    for process in [start("train", *run, *job, "--distributed.process-id", index) for index in range(2)]:
        finish(process)
    np.testing.assert_allclose(losses(tmp_path / "together"), losses(tmp_path / "alone"), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["jaxopt_llm.engine.fit:read_example", "jaxopt_llm.engine.fit:make_batches"])
def test_a_job_ends_if_one_process_stops_in_its_preparation(function: str, recipe: Path, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", function)
    job = ("--distributed.coordinator", free_address(), "--distributed.processes", 2, "--mesh.fsdp", 2)
    run = ("--config", recipe, "--run.directory", tmp_path / "run", "--watchdog.long-floor-seconds", 20)
    processes = [
        start_python("-c", GATED, json.dumps(gates), "train", *run, *job, "--distributed.process-id", index)
        for index, gates in enumerate(([], [gate.told]))
    ]
    for process in processes:
        _, stderr = finish(process, 5)
        named = r"^error: process 1 \(\S+\) of 2 makes no progress: it is in phase prepare of step 0 for"
        assert re.search(named, stderr, re.MULTILINE), stderr


def test_warnings_are_lines(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = cli.run_recipe(str(recipe))
    make_engine(replace(found, config=Config(mesh={"fsdp": 8})))  # type: ignore[arg-type]
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("warning: 2 of 2 products with parameters meet float32 arrays")


@pytest.mark.slow
def test_plan_compiles_the_step_of_a_recipe(recipe: Path) -> None:
    done = command("plan", "--config", recipe, "--gpu", "h100", "--hosts", 8, "--rows", 64, "--json")
    plan = json.loads(done.stdout)
    assert (plan["rows"], plan["hosts"], plan["gpus_per_host"], plan["fits"]) == (64, 8, 8, True)
    assert plan["parameters"] == 321


@pytest.mark.parametrize(
    ("added", "arguments", "message"),
    [
        ("del loss", (), "it defines a model and data, and lacks a loss: loss(model, batch)"),
        ("del data", (), "it defines a model and a loss, and lacks data"),
        ("jnp.zeros(3)", ("--mesh.fsdp", 2), "it opens a device of JAX too early; make arrays inside of functions"),
        *slow(
            ("", ("--training.epochs", 2), "an engine does not read training.epochs"),
            ("", ("--mesh.fsdp", 3), "example: 16 rows are not divisible by mesh.fsdp=3"),
            ("data = iter([data(0)])", (), "data: it can be read only once, so define an example"),
        ),
    ],
    ids=["no loss", "no data", "early arrays", "epochs", "rows", "iterator"],
)
def test_what_train_refuses(recipe: Path, tmp_path: Path, added: str, arguments: tuple[Any, ...], message: str) -> None:
    recipe.write_text(f"{RECIPE}\n{added}\n")
    done = command("train", "--config", recipe, "--run.directory", tmp_path / "run", *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--hosts", 8),
            "plan: a batch of 16 rows is not divisible by training.accumulation=1 × 64 GPUs along data and",
        ),
        (("--search", "--write", "found.py"), "--write: only for recipes of the decoder"),
    ],
)
def test_what_plan_refuses(recipe: Path, arguments: tuple[Any, ...], message: str) -> None:
    done = command("plan", "--config", recipe, "--gpu", "h100", *arguments)
    assert done.returncode == 2 and message in done.stderr


def test_commands_of_the_decoder_refuse_such_a_recipe(recipe: Path) -> None:
    with pytest.raises(InputError, match="it defines a model of its own, which only the commands train and plan"):
        cli.load_recipe(str(recipe))
    done = command("plan", "--config", ROOT / "configs/quickstart.py", "--rows", 8)
    assert done.returncode == 2 and "--rows: this recipe has --training.batch-size" in done.stderr


def rows_of(step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {"x": np.zeros((len(rows), 3), np.float32)}


@pytest.mark.parametrize(
    ("data", "shapes"),
    [
        (lambda step: {"x": np.zeros((2, 3), np.float32)}, [(2, 3)]),
        (rows_of, [(8, 3)]),
        ([{"x": [0.5, 1.0], "label": 3, "name": "first"}], [(8,), (8, 2)]),  # keys in order: label, x
        ([(np.zeros(4), 1)], [(8, 4), (8,)]),
    ],
)
def test_the_example_is_the_first_batch_of_the_data(data: Any, shapes: Any) -> None:
    assert [leaf.shape for leaf in jax.tree.leaves(read_example(data, rows=8))] == shapes


def test_an_iterable_gives_its_first_batch_again() -> None:
    class Stream:
        def __iter__(self) -> Iterator[np.ndarray]:
            return iter([np.zeros(2), np.ones(2)])

    assert read_example(Stream(), rows=8).tolist() == [0, 0]
