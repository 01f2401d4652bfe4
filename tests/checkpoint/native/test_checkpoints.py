"""Choice of a checkpoint when some on disk are damaged, and saves that fail."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damages import DAMAGES, flip, largest
from disks import files_no_larger_than
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.checkpoint.native import checkpoints, integrity, step_directories
from jaxopt_llm.checkpoint.native.checkpoints import MAX_SMALL_COPIES, Checkpoints, PendingSaves
from jaxopt_llm.config import CheckpointConfig
from jaxopt_llm.core.errors import CheckpointError

pytestmark = pytest.mark.core

KEEP_ALL = CheckpointConfig(keep=9)


def save(directory: Path, *steps: int, config: CheckpointConfig = KEEP_ALL) -> None:
    with Checkpoints(directory, config) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"weights": {"w": jnp.full(3, step)}}, {"eval_loss": float(step)})


def restore_latest(directory: Path, config: CheckpointConfig | None = None) -> tuple[int | None, list[int], list[str]]:
    """Return step and values of the latest checkpoint, and the lines that were reported."""
    lines: list[str] = []
    with Checkpoints(directory, config, lines.append) as checkpoints:
        step = checkpoints.latest_verified_step()
        if step is None:
            return None, [], lines
        return step, checkpoints.restore(step, weights={"w": jnp.zeros(3, int)})["weights"]["w"].tolist(), lines


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two")
    save(directory, 2, 7)
    return directory


@pytest.fixture
def directory(two_checkpoints: Path, tmp_path: Path) -> Path:
    """Directory with intact checkpoints of steps 2 and 7."""
    return shutil.copytree(two_checkpoints, tmp_path / "checkpoints")


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_checkpoint_is_reported_and_set_aside_and_the_previous_one_is_used(case: str, directory: Path) -> None:
    damage = DAMAGES[case](directory / "7")
    before = sorted(directory.iterdir())
    step, values, lines = restore_latest(directory)
    assert (step, values) == (2, [2, 2, 2])
    assert len(lines) == 2 and f"checkpoint {directory / '7'} is damaged" in lines[0] and damage in lines[0]
    assert str(directory / "2") in lines[1]
    assert sorted(directory.iterdir()) == before  # a reader changes nothing

    step, values, lines = restore_latest(directory, KEEP_ALL)
    assert (step, values) == (2, [2, 2, 2])
    assert damage in lines[0] and lines[0].endswith("set aside as 7.damaged.1")
    assert {path.name for path in directory.iterdir()} - {"7.moved"} == {"2", "7.damaged.1"}

    save(directory, 7)
    assert restore_latest(directory) == (7, [7, 7, 7], [])
    (directory / "7" / "extra").touch()
    assert "set aside as 7.damaged.2" in restore_latest(directory, KEEP_ALL)[2][0]


def test_processes_together_hash_every_file(directory: Path) -> None:
    for file in (path for path in (directory / "7").rglob("*") if path.is_file() and path.name != "manifest.json"):
        flip(file)
        found = [integrity.find_damage(directory / "7", (index, 3)) for index in range(3)]
        assert sum(each is not None for each in found) == 1, file
        flip(file)


def test_error_as_long_as_only_damaged_checkpoints_exist(directory: Path) -> None:
    assert restore_latest(directory) == (7, [7, 7, 7], [])
    for step in ("2", "7"):
        flip(largest(directory / step))
    for config in (None, KEEP_ALL, KEEP_ALL):
        with pytest.raises(CheckpointError, match="no intact checkpoint left"):
            restore_latest(directory, config)
    assert sorted(path.name for path in directory.iterdir()) == ["2.damaged.1", "7.damaged.1"]


def test_leftovers_of_a_dead_process_are_ignored_and_deleted(directory: Path) -> None:
    names = ("9.writing", "9.writing.orbax-checkpoint-tmp", "8.deleting")
    for name in names:
        shutil.copytree(directory / "7", directory / name)
    assert restore_latest(directory) == (7, [7, 7, 7], [])
    assert all((directory / name).exists() for name in names)
    assert restore_latest(directory, KEEP_ALL) == (7, [7, 7, 7], [])
    assert {path.name for path in directory.iterdir()} == {"2", "7"}


def test_newer_checkpoint_replaces_one_that_is_deleted_during_verification(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_damage = step_directories.find_damage

    def delete_and_find_damage(path: Path, share: tuple[int, int]) -> str | None:
        if path.name == "7":
            save(directory, 8)
            shutil.rmtree(path)
        return find_damage(path, share)

    monkeypatch.setattr(step_directories, "find_damage", delete_and_find_damage)
    assert restore_latest(directory) == (8, [8, 8, 8], [])


def test_save_deletes_files_that_threads_of_a_failed_save_wrote_later(directory: Path) -> None:
    with Checkpoints(directory, KEEP_ALL) as checkpoints:
        (directory / "8.writing" / "weights").mkdir(parents=True)
        (directory / "9.writing").touch()
        checkpoints.save(9, {"weights": {"w": jnp.full(3, 9)}}, {})
    assert {path.name for path in directory.iterdir()} == {"2", "7", "9"}


def test_arrays_in_host_memory_are_copied_before_they_are_written() -> None:
    """On a GPU, a step to which such an array is donated would fail while Orbax reads it: test_on_gpu.py."""
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    on_device = NamedSharding(mesh, PartitionSpec("fsdp"))
    arrays = {
        kind: jax.device_put(jnp.arange(6.0), on_device.with_memory_kind(kind)) for kind in ("device", "pinned_host")
    }
    given = checkpoints.make_save_arguments(arrays).item
    assert given["device"] is arrays["device"]
    copy, original = given["pinned_host"], arrays["pinned_host"]
    assert copy.sharding == original.sharding and copy.tolist() == original.tolist()
    pointers = [[shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards] for x in (copy, original)]
    assert not set(pointers[0]) & set(pointers[1])


def test_only_stacks_have_chunks_by_layer_and_not_what_is_named_as_one() -> None:
    large = np.broadcast_to(np.float32(0), (2, checkpoints.MAX_STACK_CHUNK_BYTES))
    chunks = checkpoints.choose_chunks({"segment_0": {"up": large}, "non_layer": {"segment_embedding": large}})
    assert chunks["segment_0"]["up"].shard_axes == (0,)
    assert chunks["non_layer"]["segment_embedding"].shard_axes == ()


def test_a_directory_that_another_one_replaced_is_not_written_to(directory: Path) -> None:
    """Check this for a new save, and for one whose writes make the directory again after it was deleted."""
    lines: list[str] = []
    weights = {"weights": {"w": jnp.full(3, 9)}}
    with Checkpoints(directory, KEEP_ALL, lines.append) as checkpoints:
        shutil.rmtree(directory)
        directory.mkdir()
        with pytest.raises(CheckpointError, match="step 9 could not be saved .* the directory was deleted"):
            checkpoints.save_last(9, weights, {})
    assert list(directory.iterdir()) == []

    written, gate, sync_and_hash = threading.Event(), threading.Event(), integrity.sync_and_hash

    def wait_and_hash(*arguments: Any) -> Any:
        written.set()
        gate.wait(60)
        return sync_and_hash(*arguments)

    with pytest.MonkeyPatch.context() as patch, Checkpoints(directory, KEEP_ALL, lines.append) as checkpoints:
        patch.setattr(integrity, "sync_and_hash", wait_and_hash)
        checkpoints.save(10, weights, {})
        assert written.wait(60)  # a write under way would fail in the renamed directory, or make it again
        kept = directory.rename(directory.with_name("kept"))
        shutil.copytree(kept, directory)
        gate.set()
    assert "checkpoint" in lines[-1] and "the directory was deleted" in lines[-1]
    assert not (directory / "10").exists()


def test_device_failure_is_not_treated_as_a_storage_failure(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: lost")

    monkeypatch.setattr(Checkpoints, "_start_writes", fail)
    with Checkpoints(directory, KEEP_ALL) as checkpoints, pytest.raises(jax.errors.JaxRuntimeError):
        checkpoints.save(9, {"weights": {"w": jnp.full(3, 9)}}, {})


@pytest.mark.parametrize(
    ("model", "difference"),
    [
        ({"w": jnp.zeros(4, int)}, "weights/w is int32[3] in the checkpoint and int32[4] in the model"),
        ({"w": jnp.zeros(3, jnp.bfloat16)}, "weights/w is int32[3] in the checkpoint and bfloat16[3] in the model"),
        (
            {"w": jnp.zeros(3, int), "v": jnp.zeros(2)},
            "weights/v is absent in the checkpoint and float32[2] in the model",
        ),
        ({}, "weights/w is int32[3] in the checkpoint and absent in the model"),
    ],
)
def test_checkpoint_of_another_model_is_refused_and_not_changed(
    model: dict[str, object], difference: str, directory: Path
) -> None:
    with Checkpoints(directory, KEEP_ALL) as checkpoints, pytest.raises(CheckpointError) as refused:
        checkpoints.restore(7, weights=model)
    assert difference in str(refused.value)
    assert restore_latest(directory) == (7, [7, 7, 7], [])


@contextmanager
def replaced_by_a_file(directory: Path) -> Iterator[None]:
    """Replace the directory with a file, because permission bits would not stop root."""
    aside = directory.rename(directory.with_name("aside"))
    directory.touch()
    yield
    directory.unlink()
    aside.rename(directory)


@pytest.mark.parametrize("room", [0, 200, 400, None])
def test_failed_save_deletes_no_other_checkpoint(
    room: int | None, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    weights = {"weights": {"w": jnp.full(3, 9)}}
    config = CheckpointConfig(every=20, keep=1)
    saves: list[tuple[int, str]] = []
    with Checkpoints(directory, config, lines.append, on_save=lambda *save: saves.append(save)) as checkpoints:
        with replaced_by_a_file(directory) if room is None else files_no_larger_than(room):
            checkpoints.save(9, weights, {})
            with pytest.raises(CheckpointError, match="step 10 could not be saved"):
                checkpoints.save_last(10, weights, {})
        assert len(lines) == 3 and all("could not be saved" in line and "\n" not in line for line in lines)
        assert {path.name for path in directory.iterdir()} == {"2", "7"}
        assert [step for step in range(10, 14) if checkpoints.is_due(step, checkpoints.last_save_failed)] == [
            12,
            13,
        ]  # a tenth of 20 later
        checkpoints.save_last(12, weights, {})
        assert not checkpoints.is_due(13, checkpoints.last_save_failed)
    assert [step for step, _ in saves] == [9, 10, 10, 12] and [bool(failure) for _, failure in saves] == [1, 1, 1, 0]
    assert restore_latest(directory) == (12, [9, 9, 9], [])
    assert [path.name for path in directory.iterdir()] == ["12"]
    assert "Traceback" not in capfd.readouterr().err


def test_old_checkpoints_are_deleted_after_a_new_one_is_complete(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, config=CheckpointConfig(every=1, keep=2, keep_every=2, keep_best=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "4", "5"]


def test_records_that_cannot_be_synced_fail_the_save_which_is_tried_again(directory: Path) -> None:
    lines: list[str] = []
    tries = 0

    def sync() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError(28, "No space left on device")

    with Checkpoints(directory, KEEP_ALL, lines.append) as checkpoints:
        checkpoints.save_last(9, {"weights": {"w": jnp.full(3, 9)}}, {}, sync)
    assert tries == 2 and len(lines) == 1 and "No space left on device" in lines[0]
    assert restore_latest(directory) == (9, [9, 9, 9], [])


def test_a_directory_that_was_deleted_fails_the_save_and_stays_away(directory: Path) -> None:
    lines: list[str] = []
    with Checkpoints(directory, KEEP_ALL, lines.append) as checkpoints:
        shutil.rmtree(directory)
        with pytest.raises(CheckpointError, match=f"step 9 could not be saved to {directory} .*there is no checkpoint"):
            checkpoints.save_last(9, {"weights": {"w": jnp.full(3, 9)}}, {})
    assert len(lines) == 2 and not directory.exists()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return the event without which no save reaches the disk."""
    allowed, original = threading.Event(), integrity.sync_and_hash

    def sync_and_hash(path: Path, pattern: str) -> integrity.FileEntries:
        assert allowed.wait(20)
        return original(path, pattern)

    monkeypatch.setattr(integrity, "sync_and_hash", sync_and_hash)
    return allowed


def test_a_save_waits_for_no_other_save_and_is_left_out_if_there_is_no_room(
    gate: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is said once. A step that is kept forever waits for the oldest save, and the last one for all of them."""
    monkeypatch.setattr("jaxopt_llm.checkpoint.native.checkpoints.SMALL_BYTES", 0)
    lines: list[str] = []
    config = CheckpointConfig(every=10, keep=9, keep_every=50)
    with Checkpoints(tmp_path, config, lines.append) as checkpoints:
        for step in (10, 20, 30, 31):
            checkpoints.save(step, {"weights": {"w": jnp.full(3, step)}}, {})
        assert {path.name for path in tmp_path.iterdir()} <= {"10.writing"}
        assert len(lines) == 1 and "step 30 is not saved: the saves before are still being written" in lines[0]
        assert [step for step in range(31, 36) if checkpoints.is_due(step, checkpoints.last_save_failed)] == [
            *range(32, 36)
        ]
        threading.Timer(0.2, gate.set).start()
        checkpoints.save(50, {"weights": {"w": jnp.full(3, 50)}}, {})
        assert (tmp_path / "10").exists() and not checkpoints.last_save_failed
        gate.clear()
        threading.Timer(0.2, gate.set).start()
        checkpoints.save_last(55, {"weights": {"w": jnp.full(3, 55)}}, {})
    assert {path.name for path in tmp_path.iterdir()} == {"10", "20", "50", "55"} and len(lines) == 1
    assert restore_latest(tmp_path) == (55, [55, 55, 55], [])


def test_saves_of_small_states_do_not_leave_each_other_out(gate: threading.Event, tmp_path: Path) -> None:
    steps = range(1, MAX_SMALL_COPIES + 1)
    with Checkpoints(tmp_path, CheckpointConfig(keep=99)) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"weights": {"w": jnp.full(3, step)}}, {})
        gate.set()
    assert {path.name for path in tmp_path.iterdir()} == {*map(str, steps)}


def test_a_save_waits_neither_for_the_records_nor_for_the_disk(tmp_path: Path) -> None:
    """The state may change at once: the copy is complete. The checkpoint is not, before the records are on disk."""
    allowed, lines = threading.Event(), []

    def sync() -> None:
        assert allowed.wait(20)

    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with Checkpoints(tmp_path, CheckpointConfig(), lines.append) as checkpoints:
        w = add(jnp.zeros(3, int))
        checkpoints.save(1, {"weights": {"w": w}}, {}, sync)
        w = add(w)
        assert not list(tmp_path.iterdir())
        checkpoints.save(2, {"weights": {"w": w}}, {}, sync)
        assert add(w).tolist() == [3, 3, 3]
        allowed.set()
    assert not lines
    with Checkpoints(tmp_path) as reader:
        for step in (1, 2):
            found = reader.restore(step, weights={"w": jnp.zeros(3, int)})["weights"]["w"]
            assert found.tolist() == [step] * 3


@pytest.mark.parametrize("left_out_here", [True, False])
def test_a_step_that_one_process_leaves_out_is_saved_by_none(
    left_out_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    with Checkpoints(tmp_path, CheckpointConfig(), lines.append) as checkpoints:
        others = iter([not left_out_here])  # the answers of another process: its arrays are copied
        exchange = checkpoints._background_channel.exchange

        def exchange_with_another(message: str) -> list[str]:
            return [*exchange(message), json.dumps(["", not next(others)])]

        monkeypatch.setattr(checkpoints._background_channel, "exchange", exchange_with_another)
        monkeypatch.setattr(PendingSaves, "has_room", lambda *arguments, wait: not left_out_here)
        checkpoints.save(1, {"weights": {"w": jnp.full(3, 1)}}, {})
        checkpoints._wait_for_save()
        assert checkpoints.last_save_failed and len(lines) == 1 and "step 1 is not saved" in lines[0]
        assert not (tmp_path / "1").exists()
        monkeypatch.undo()
        checkpoints.save_last(2, {"weights": {"w": jnp.full(3, 2)}}, {})
    assert {path.name for path in tmp_path.iterdir()} == {"2"}


def test_a_save_that_fails_leaves_the_next_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def sync_and_hash(path: Path, pattern: str) -> integrity.FileEntries:
        if path.name == "1.writing":
            assert begun.wait(60)
            raise OSError("full")
        return original(path, pattern)

    original = integrity.sync_and_hash
    monkeypatch.setattr(integrity, "sync_and_hash", sync_and_hash)
    lines: list[str] = []
    with Checkpoints(tmp_path, CheckpointConfig(), lines.append) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"weights": {"w": jnp.full(3, step)}}, {})
        begun.set()
    assert len(lines) == 1 and "1 could not be saved: OSError: full; its partial files are deleted" in lines[0]
    assert restore_latest(tmp_path) == (2, [2, 2, 2], [])


def test_an_error_that_nobody_foresaw_in_a_save_ends_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise several processes would exchange messages of different saves."""

    def fail(*_: object) -> None:
        raise AttributeError("nobody foresaw this")

    monkeypatch.setattr(Checkpoints, "_commit", fail)
    with pytest.raises(AttributeError), Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        checkpoints.save(1, {"weights": {"w": jnp.ones(3)}}, {})
        checkpoints.save(2, {"weights": {"w": jnp.ones(3)}}, {})
        checkpoints._pending._saves[1][1].exception()  # wait for the second
        monkeypatch.undo()
        checkpoints.save(3, {"weights": {"w": jnp.ones(3)}}, {})
    assert not step_directories.find_checkpoints(tmp_path)


def test_an_older_save_that_fails_does_not_repeat_the_last_one(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        checkpoints.save_last(2, {"weights": {"w": jnp.ones(3)}}, {})
        checkpoints._note_failure(1, "the disk was full")
        assert not checkpoints.last_save_failed
        checkpoints.save_last(2, {"weights": {"w": jnp.ones(3)}}, {})  # it is there, so it would fail
