"""Runs with an average of their weights: the commands use it, and say so."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from commands import checkpoint, command, some_text, train

import jaxopt_llm
from jaxopt_llm.core import tree

SAYS = re.compile(r"step \d+ of .*: the average of the trained weights is used \(training\.ema_decay\)\n")
FLOAT32 = ("--precision.compute-dtype", "float32")


SETTINGS = (
    *("--training.ema-decay", 0.5, "--optimizer.learning-rate", 1e-2, "--schedule.decay-steps", 4),
    *("--evaluation.batches", 1000, "--data.held-out", 0.2, "--training.batch-size", 2, "--checkpoint.every", 2),
    *("--mesh.fsdp", 2, "--sharding.zero-stage", 1, *FLOAT32),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ema") / "run"
    done = train(directory, "--training.steps", 4, *SETTINGS, *some_text(directory.parent / "a.jsonl"))
    assert done.returncode == 0, done.stderr
    return directory


def read(directory: Path, step: int, name: str) -> Any:
    return checkpoint(directory, step, (name,))[name]


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, one), other)


def test_the_loss_of_the_average_is_recorded_and_evaluated(run: Path) -> None:
    recorded = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
    told = command("evaluate", "--checkpoint", run)
    found = re.search(r"([\d.]+) nats per token", told.stdout)
    assert found, told.stderr
    assert float(found[1]) == pytest.approx(recorded, abs=1e-4)
    assert SAYS.search(told.stderr)


def test_a_loaded_and_an_exported_model_have_the_average(run: Path, tmp_path: Path) -> None:
    average, masters = read(run, 4, "average"), read(run, 4, "masters")
    assert not np.array_equal(*(jax.tree.leaves(each)[0] for each in (average, masters)))
    assert_equal(jaxopt_llm.load_pretrained(run).params, average)
    assert_equal(jaxopt_llm.load_pretrained(run, step=2).params, read(run, 2, "average"))
    told = command("convert", "export", "--checkpoint", run, "--to", tmp_path / "folder", "--dtype", "float32")
    assert told.returncode == 0 and SAYS.fullmatch(told.stderr), told.stderr
    exported = jaxopt_llm.load_pretrained(tmp_path / "folder")
    expected = dict(tree.leaves_with_path(average))
    for path, leaf in tree.leaves_with_path(exported.params):
        rows = exported.config.vocabulary_size if path.endswith("table") else None  # a folder has no padding
        np.testing.assert_array_equal(leaf[:rows], expected[path][:rows], err_msg=path)


@pytest.mark.slow
def test_a_run_in_two_parts_is_equal_to_the_bit_and_keeps_its_decay(run: Path, tmp_path: Path) -> None:
    data = ("--data.paths", run.parent / "a.jsonl")
    for steps in (2, 4):
        done = train(tmp_path / "parts", "--training.steps", steps, *SETTINGS, *data)
        assert done.returncode == 0, done.stderr
    assert_equal(read(tmp_path / "parts", 4, "average"), read(run, 4, "average"))
    off = train(tmp_path / "parts", "--training.steps", 6, *SETTINGS, *data, "--training.ema-decay", 0)
    assert off.returncode == 2 and "training.ema_decay was 0.5 and is 0.0" in off.stderr


def test_a_run_begins_from_the_average_of_another(run: Path, tmp_path: Path) -> None:
    still = ("--optimizer.learning-rate", 1e-30, "--optimizer.weight-decay", 0, "--training.steps", 1)
    done = train(
        tmp_path / "second", "--model.pretrained", run, *still, *SETTINGS[:2], *some_text(tmp_path / "a.jsonl")
    )
    assert done.returncode == 0, done.stderr
    assert SAYS.search(done.stdout + done.stderr)
    for name in ("masters", "average"):
        assert_equal(read(tmp_path / "second", 1, name), read(run, 4, "average"))


@pytest.mark.slow
def test_adapters_are_averaged_and_exported_so(run: Path, tmp_path: Path) -> None:
    lora = ("--lora.rank", 2, "--training.steps", 3, "--optimizer.learning-rate", 1e-2, *FLOAT32)
    adapted = tmp_path / "adapted"
    done = train(adapted, "--model.pretrained", run, *lora, *SETTINGS[:2], *some_text(tmp_path / "a.jsonl"))
    assert done.returncode == 0, done.stderr
    average, masters = (read(adapted, 3, name) for name in ("average", "masters"))
    expected = {path: leaf for path, leaf in tree.leaves_with_path(average) if path.endswith(("lora_a", "lora_b"))}
    assert expected and expected.keys() == dict(tree.leaves_with_path(average)).keys()
    assert not np.array_equal(*(jax.tree.leaves(each)[-1] for each in (average, masters)))
    loaded = dict(tree.leaves_with_path(jaxopt_llm.load_pretrained(adapted).params))
    for path, leaf in expected.items():
        np.testing.assert_array_equal(loaded[path], leaf, err_msg=path)
