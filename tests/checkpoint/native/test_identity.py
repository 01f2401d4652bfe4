"""Tests of the identity of a run: what a checkpoint records, and that another run's checkpoint is refused by name."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from commands import some_text, train

from jaxopt_llm.checkpoint.native import identity
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.native.step_directories import read_record
from jaxopt_llm.config import CheckpointConfig, Config, fields
from jaxopt_llm.core.errors import CheckpointError
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS

OWN = identity.Identity("0123", ("first", "second"), "corpus")


def save(directory: Path, step: int, whose: identity.Identity | None) -> None:
    with Checkpoints(directory, CheckpointConfig(keep=9), identity=whose) as checkpoints:
        checkpoints.save(step, {"masters": {"w": jnp.zeros(3)}}, {})


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (dataclasses.replace(OWN, run="4567"), "belongs to run 4567, and its directory to run 0123"),
        (dataclasses.replace(OWN, corpus="another"), r"another corpus \(SHA-256 another\)"),
        (dataclasses.replace(OWN, configurations=("third",)), r"configuration \(SHA-256 third\)"),
        (None, "belongs to no run, and its directory to run 0123"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(
    other: identity.Identity | None, named: str, tmp_path: Path
) -> None:
    """Check also that it is not set aside, and that a reader of any run reads it."""
    save(tmp_path, 1, OWN)
    save(tmp_path, 2, other)
    with Checkpoints(tmp_path, CheckpointConfig(), identity=OWN) as checkpoints:
        with pytest.raises(CheckpointError, match=named):
            checkpoints.latest_verified_step()
        shutil.rmtree(tmp_path / "2")
        assert checkpoints.latest_verified_step() == 1
    save(tmp_path, 2, other)
    assert Checkpoints(tmp_path).latest_verified_step() == 2


def test_a_checkpoint_of_an_earlier_start_with_another_configuration_is_accepted(tmp_path: Path) -> None:
    save(tmp_path, 1, dataclasses.replace(OWN, configurations=("first",)))
    assert Checkpoints(tmp_path, identity=OWN).latest_verified_step() == 1


def test_only_settings_that_a_resume_must_not_change_enter_the_hash() -> None:
    config = Config()
    freely = fields.replace_fields(config, {"run.directory": "elsewhere", "mesh.fsdp": 8, "training.steps": 7})
    assert identity.hash_config(freely) == identity.hash_config(config)
    for name, value in {"optimizer.learning_rate": 1.0, "training.ema_decay": 0.5}.items():
        changed = fields.replace_fields(config, {name: value})
        assert identity.hash_config(changed) != identity.hash_config(config)


def test_a_directory_without_a_checkpoint_begins_a_new_run(tmp_path: Path) -> None:
    config, changed = Config(), fields.replace_fields(Config(), {"optimizer.learning_rate": 1.0})
    first = identity.identify_run(tmp_path, config, SINGLE_PROCESS, "corpus")
    identity.write_identity(tmp_path, first)
    assert identity.identify_run(tmp_path, config, SINGLE_PROCESS, "corpus").run != first.run
    save(tmp_path / "checkpoints", 1, first)
    assert identity.identify_run(tmp_path, config, SINGLE_PROCESS, "corpus") == first
    continued = identity.identify_run(tmp_path, changed, SINGLE_PROCESS, "corpus")
    assert continued.run == first.run
    assert continued.configurations == (*first.configurations, identity.hash_config(changed))
    (tmp_path / identity.RUN_FILE).unlink()
    with pytest.raises(CheckpointError, match="run.json does not name the run of the checkpoints beside it"):
        identity.identify_run(tmp_path, config, SINGLE_PROCESS, "corpus")


def test_a_run_refuses_a_checkpoint_copied_from_another_run(tmp_path: Path) -> None:
    """The two runs have the same settings and the same data."""
    text = some_text(tmp_path / "text.jsonl")
    for name in ("one", "other"):
        done = train(tmp_path / name, *text, "--training.steps", 2)
        assert done.returncode == 0, done.stderr
    ids = [identity.read_identity(tmp_path / name) for name in ("one", "other")]
    record = read_record(tmp_path / "one" / "checkpoints" / "2")["identity"]
    corpus = json.loads((tmp_path / "one" / "corpus.json").read_text())["sha256"]
    assert record == {"run": ids[0].run, "config_sha256": ids[0].configurations[0], "corpus_sha256": corpus}
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "2")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "2", tmp_path / "one" / "checkpoints" / "2")
    refused = train(tmp_path / "one", *text, "--training.steps", 3)
    assert refused.returncode == 4
    assert f"belongs to run {ids[1].run}, and its directory to run {ids[0].run}" in refused.stderr
