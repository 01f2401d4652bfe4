"""Which checkpoint is the latest, whatever lies beside it."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxopt_llm.checkpoint.native import COMMITTED, Checkpoints

pytestmark = pytest.mark.core


def save(directory: Path, *steps: int, keep: int = 9) -> None:
    with Checkpoints(directory, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, weights={"w": jnp.full(3, step)})


def latest(directory: Path) -> tuple[int | None, list[int]]:
    """Its step and its values."""
    with Checkpoints(directory) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            return None, []
        return step, checkpoints.restore(step, weights={"w": jnp.zeros(3, int)})["weights"]["w"].tolist()


@pytest.mark.parametrize("debris", ["empty", "no commit marker", "temporary"])
def test_what_is_not_whole_is_not_the_latest_and_does_not_keep_the_run_from_saving(debris: str, tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 7)
    if debris == "empty":
        (tmp_path / "9").mkdir()
    elif debris == "no commit marker":
        (tmp_path / "7").rename(tmp_path / "9")
        (tmp_path / "9" / COMMITTED).unlink()
    else:
        (tmp_path / "7").rename(tmp_path / "7.orbax-checkpoint-tmp")
    whole = 7 if debris == "empty" else 2
    assert latest(tmp_path) == (whole, [whole] * 3)
    save(tmp_path, 8)
    assert latest(tmp_path) == (8, [8] * 3)
    assert not (tmp_path / "7.orbax-checkpoint-tmp").exists()
    assert (tmp_path / "9.incomplete.1").exists() == (debris != "temporary")


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "9").mkdir()
    assert latest(tmp_path) == (None, [])
    assert [path.name for path in tmp_path.iterdir()] == ["9"]
