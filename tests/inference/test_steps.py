"""Choice of a run's checkpoint with --step."""

import argparse
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from damages import flip, largest

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import CheckpointConfig
from jaxopt_llm.core.errors import CheckpointError, InputError
from jaxopt_llm.inference import flags, models

pytestmark = pytest.mark.core

LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 7: None}


def save(directory: Path, losses: dict[int, float | None]) -> Path:
    with Checkpoints(directory / "checkpoints", CheckpointConfig(keep=9)) as checkpoints:
        for step, loss in losses.items():
            record = {} if loss is None else {"eval_loss": loss}
            checkpoints.save(step, {"weights": {"w": jnp.full(3, step)}}, record)
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("steps") / "run", LOSSES)


def read(run: Path, step: flags.Step) -> int:
    """Return the value of the weights of the checkpoint."""

    def use(checkpoints: Checkpoints, found: int) -> int:
        weights = checkpoints.restore(found, weights={"w": jnp.zeros(3, int)})["weights"]
        return int(weights["w"][0])

    return models.use_checkpoint(run, step, use)


@pytest.mark.parametrize(("step", "expected"), [(None, 7), (2, 2), (6, 6), ("best", 4)])
def test_the_named_checkpoint_is_used(run: Path, step: flags.Step, expected: int) -> None:
    assert read(run, step) == expected


def test_a_step_without_a_checkpoint_lists_those_that_exist(run: Path) -> None:
    with pytest.raises(InputError, match=r"^--step 5: .*run has no checkpoint of this step; choose one of 2, 4, 6, 7"):
        read(run, 5)


def test_best_requires_a_held_out_loss(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--step best: no checkpoint of .* has a held-out loss; choose one of 1, 3"):
        read(save(tmp_path / "run", {1: None, 3: None}), "best")


def test_a_damaged_checkpoint_is_not_replaced_by_another_one(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    flip(largest(copy / "checkpoints" / "4"))
    with pytest.raises(CheckpointError, match=r"4 is damaged: .*; name another one with --step"):
        read(copy, "best")
    assert (copy / "checkpoints" / "4").is_dir()  # a reader changes nothing


@pytest.mark.parametrize("text", ["worst", "-1", "1.5", ""])
def test_other_words_are_refused(text: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_step_flag(parser)
    with pytest.raises(argparse.ArgumentError, match="must be the step of a checkpoint, or best"):
        parser.parse_args([f"--step={text}"])
