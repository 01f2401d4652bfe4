"""Tests of the identity of the runs of an engine: save, restore and fit."""

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxopt_llm
from jaxopt_llm.checkpoint.native.identity import read_identity
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import CheckpointError, InputError

BATCH = np.ones((8, 1), np.float32)


def make_engine() -> jaxopt_llm.Engine:
    config = Config(
        mesh={"fsdp": 8},  # type: ignore[arg-type]
        precision={"compute_dtype": "float32"},  # type: ignore[arg-type]
        logging={"tensorboard": False},  # type: ignore[arg-type]
    )

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean((batch * model["w"] - 1) ** 2)

    return jaxopt_llm.initialize(lambda: {"w": jnp.ones(8)}, loss, BATCH, config, optax.sgd(0.1))


def test_two_engines_do_not_mix_their_checkpoints(tmp_path: Path) -> None:
    """An engine that restored a run continues that run, and may save into its directory."""
    one, other = make_engine(), make_engine()
    one.save(tmp_path)
    other.step(BATCH)
    with pytest.raises(CheckpointError, match=f"holds checkpoints of run {read_identity(tmp_path).run}"):
        other.save(tmp_path)
    assert other.restore(tmp_path) == 0
    other.step(BATCH)
    other.save(tmp_path)
    assert one.restore(tmp_path) == 1


def test_restore_refuses_a_checkpoint_that_was_copied_from_another_run(tmp_path: Path) -> None:
    make_engine().save(tmp_path / "one")
    other = make_engine()
    other.step(BATCH)
    other.save(tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "1", tmp_path / "one" / "checkpoints" / "1")
    with pytest.raises(CheckpointError, match=f"belongs to run {read_identity(tmp_path / 'other').run}"):
        make_engine().restore(tmp_path / "one")


def test_fit_refuses_a_checkpoint_that_was_copied_from_another_run(tmp_path: Path) -> None:
    """An engine that fit has trained continues the run of fit."""
    for name, steps in (("one", 1), ("other", 2)):
        engine = jaxopt_llm.fit(make_engine(), [BATCH], steps, tmp_path / name)
    engine.step(BATCH)
    engine.save(tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "2", tmp_path / "one" / "checkpoints" / "2")
    with pytest.raises(CheckpointError, match=f"belongs to run {read_identity(tmp_path / 'other').run}"):
        jaxopt_llm.fit(make_engine(), [BATCH], 3, tmp_path / "one")


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_place_of_a_directory_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"{name}: .*; give another directory"):
        make_engine().save(tmp_path / name)
