"""Which checkpoint is used, whatever happened to those on disk; and saves that fail."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from damages import DAMAGES, flip, largest
from disks import files_no_larger_than

from jaxopt_llm.checkpoint import integrity, steps
from jaxopt_llm.checkpoint.native import Checkpoints
from jaxopt_llm.checkpoint.policy import CheckpointConfig
from jaxopt_llm.errors import CheckpointError

pytestmark = pytest.mark.core

KEEPS_ALL = CheckpointConfig(keep=9)


def save(directory: Path, *saved: int, config: CheckpointConfig = KEEPS_ALL) -> None:
    with Checkpoints(directory, config) as checkpoints:
        for step in saved:
            checkpoints.save(step, {"weights": {"w": jnp.full(3, step)}}, {"eval_loss": float(step)})


def latest(directory: Path, config: CheckpointConfig | None = None) -> tuple[int | None, list[int], list[str]]:
    """Its step, its values, and what was said."""
    said: list[str] = []
    with Checkpoints(directory, config, said.append) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            return None, [], said
        return step, checkpoints.restore(step, weights={"w": jnp.zeros(3, int)})["weights"]["w"].tolist(), said


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    save(directory, 2, 7)
    return directory


@pytest.fixture
def directory(two: Path, tmp_path: Path) -> Path:
    """Whole checkpoints of steps 2 and 7."""
    return shutil.copytree(two, tmp_path / "checkpoints")


@pytest.mark.parametrize("case", DAMAGES)
def test_what_is_damaged_is_named_and_set_aside_and_the_step_before_is_used(case: str, directory: Path) -> None:
    what = DAMAGES[case](directory / "7")
    before = sorted(directory.iterdir())
    step, values, said = latest(directory)
    assert (step, values) == (2, [2, 2, 2])
    assert len(said) == 2 and f"checkpoint {directory / '7'} is damaged" in said[0] and what in said[0]
    assert str(directory / "2") in said[1]
    assert sorted(directory.iterdir()) == before  # a reader changes nothing

    step, values, said = latest(directory, KEEPS_ALL)
    assert (step, values) == (2, [2, 2, 2])
    assert what in said[0] and said[0].endswith("set aside as 7.damaged.1")
    assert {path.name for path in directory.iterdir()} - {"7.moved"} == {"2", "7.damaged.1"}

    save(directory, 7)
    assert latest(directory) == (7, [7, 7, 7], [])
    (directory / "7" / "extra").touch()
    assert "set aside as 7.damaged.2" in latest(directory, KEEPS_ALL)[2][0]


def test_processes_that_look_together_look_at_every_file(directory: Path) -> None:
    for file in (path for path in (directory / "7").rglob("*") if path.is_file() and path.name != "manifest.json"):
        flip(file)
        found = [integrity.damage(directory / "7", (index, 3)) for index in range(3)]
        assert sum(each is not None for each in found) == 1, file
        flip(file)


def test_none_left_is_an_error_until_someone_has_looked(directory: Path) -> None:
    assert latest(directory) == (7, [7, 7, 7], [])
    for step in ("2", "7"):
        flip(largest(directory / step))
    for config in (None, KEEPS_ALL, KEEPS_ALL):
        with pytest.raises(CheckpointError, match="no whole checkpoint left"):
            latest(directory, config)
    assert sorted(path.name for path in directory.iterdir()) == ["2.damaged.1", "7.damaged.1"]


def test_what_a_dead_process_left_is_no_checkpoint_and_is_freed(directory: Path) -> None:
    names = ("9.writing", "9.writing.orbax-checkpoint-tmp", "8.deleting")
    for name in names:
        shutil.copytree(directory / "7", directory / name)
    assert latest(directory) == (7, [7, 7, 7], [])
    assert all((directory / name).exists() for name in names)
    assert latest(directory, KEEPS_ALL) == (7, [7, 7, 7], [])
    assert {path.name for path in directory.iterdir()} == {"2", "7"}


def test_one_that_is_deleted_while_it_is_looked_at_gives_way_to_a_newer_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = steps.damage

    def deleted(path: Path, share: tuple[int, int]) -> str | None:
        if path.name == "7":
            save(directory, 8)
            shutil.rmtree(path)
        return damage(path, share)

    monkeypatch.setattr(steps, "damage", deleted)
    assert latest(directory) == (8, [8, 8, 8], [])


def test_a_save_frees_what_threads_of_a_failed_one_wrote_later(directory: Path) -> None:
    with Checkpoints(directory, KEEPS_ALL) as checkpoints:
        (directory / "8.writing" / "weights").mkdir(parents=True)
        (directory / "9.writing").touch()
        checkpoints.save(9, {"weights": {"w": jnp.full(3, 9)}}, {})
    assert {path.name for path in directory.iterdir()} == {"2", "7", "9"}


def test_a_device_that_fails_is_no_disk_that_is_full(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: lost")

    monkeypatch.setattr(Checkpoints, "_copy", fail)
    with Checkpoints(directory, KEEPS_ALL) as checkpoints, pytest.raises(jax.errors.JaxRuntimeError):
        checkpoints.save(9, {"weights": {"w": jnp.full(3, 9)}}, {})


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"w": jnp.zeros(4, int)}, "weights/w is int32[3] there and int32[4] here"),
        ({"w": jnp.zeros(3, jnp.bfloat16)}, "weights/w is int32[3] there and bfloat16[3] here"),
        ({"w": jnp.zeros(3, int), "v": jnp.zeros(2)}, "weights/v is absent there and float32[2] here"),
        ({}, "weights/w is int32[3] there and absent here"),
    ],
)
def test_another_models_checkpoint_is_named_and_left_alone(
    wanted: dict[str, object], named: str, directory: Path
) -> None:
    with Checkpoints(directory, KEEPS_ALL) as checkpoints, pytest.raises(CheckpointError) as refused:
        checkpoints.restore(7, weights=wanted)
    assert named in str(refused.value)
    assert latest(directory) == (7, [7, 7, 7], [])


@contextmanager
def nothing_to_write_in(directory: Path) -> Iterator[None]:
    """Bits of permission would not keep root out: a file stands in the directory's place."""
    aside = directory.rename(directory.with_name("aside"))
    directory.touch()
    yield
    directory.unlink()
    aside.rename(directory)


@pytest.mark.parametrize("room", [0, 200, 400, None])
def test_a_save_that_fails_costs_itself_alone(
    room: int | None, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    weights = {"weights": {"w": jnp.full(3, 9)}}
    config = CheckpointConfig(every=20, keep=1)
    with Checkpoints(directory, config, said.append) as checkpoints:
        with nothing_to_write_in(directory) if room is None else files_no_larger_than(room):
            checkpoints.save(9, weights, {})
            with pytest.raises(CheckpointError, match="step 10 could not be saved"):
                checkpoints.save_last(10, weights, {})
        assert len(said) == 3 and all("could not be saved" in line and "\n" not in line for line in said)
        assert {path.name for path in directory.iterdir()} == {"2", "7"}
        assert [step for step in range(10, 14) if checkpoints.due(step, checkpoints.failed)] == [
            12,
            13,
        ]  # a tenth of 20 later
        checkpoints.save_last(12, weights, {})
        assert not checkpoints.due(13, checkpoints.failed)
    assert latest(directory) == (12, [9, 9, 9], [])
    assert [path.name for path in directory.iterdir()] == ["12"]
    assert "Traceback" not in capfd.readouterr().err


def test_old_checkpoints_go_when_a_new_one_is_whole(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, config=CheckpointConfig(every=1, keep=2, keep_every=2, keep_best=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "4", "5"]
