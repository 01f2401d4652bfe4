"""Tests of the state in the memory of the hosts: what is found after a loss, and who sends what to whom."""

import collections
import errno
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damages import flip
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.checkpoint.native import host_memory
from jaxopt_llm.checkpoint.native.host_memory import NEXT, OWN, HostMemory
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS

MESH = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def make_state(spec: PartitionSpec, value: float = 0.0) -> dict[str, jax.Array]:
    sharding = NamedSharding(MESH, spec)
    values = {"w": jnp.arange(16.0) + value, "codes": jnp.arange(16, dtype="int8"), "half": jnp.ones(16, jnp.bfloat16)}
    return {name: jax.device_put(each, sharding) for name, each in values.items()}


def open_memory(directory: Path, state: dict[str, jax.Array]) -> HostMemory:
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    return HostMemory(directory, target, SINGLE_PROCESS)


def of_processes(memory: HostMemory, count: int = 2) -> HostMemory:
    """Let so many processes have equally many devices each, in the order of the mesh."""
    memory._owners = [device * count // 8 for device in range(8)]
    memory._replicated = all(host_memory._is_on_two_processes(x, memory._owners) for x in memory._target.values())
    return memory


def test_the_newest_intact_step_is_found_with_its_record(tmp_path: Path) -> None:
    spec = PartitionSpec(("data", "fsdp"))
    writer = open_memory(tmp_path, make_state(spec))
    for step in (2, 4, 6):
        writer.save(step, make_state(spec, step), {"step": step})
    writer.wait()
    assert sorted(path.name for path in (tmp_path / "process-0").iterdir()) == ["4", "6"]
    reader = open_memory(tmp_path, make_state(spec))
    assert reader.find(after=3) == 6 and reader.record == {"step": 6}
    for name, found in reader.load().items():
        np.testing.assert_array_equal(found, make_state(spec, 6)[name])
        assert found.sharding == NamedSharding(MESH, spec)
    flip(tmp_path / "process-0" / "6" / OWN)
    reader = open_memory(tmp_path, make_state(spec))
    assert reader.find(after=3) == 4
    assert (tmp_path / "process-0" / "6").exists()  # another start, with another mesh, may need it
    reader.discard_after(4)
    assert not (tmp_path / "process-0" / "6").exists()
    assert open_memory(tmp_path, make_state(PartitionSpec("fsdp"))).find(after=0) is None  # another layout
    assert open_memory(tmp_path, make_state(spec)).find(after=4) is None


def test_a_step_that_does_not_fit_is_reported_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, sent = PartitionSpec(("data", "fsdp")), []
    writer = of_processes(open_memory(tmp_path / "user" / "run", make_state(spec)))
    monkeypatch.setattr(host_memory, "_permute", lambda array, pairs: sent.append(pairs) or array)
    writer.save(2, make_state(spec), {})
    assert (tmp_path / "user").stat().st_mode & 0o777 == 0o700

    def fill(path: Path, leaves: Any) -> None:
        next(iter(leaves))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host_memory, "_write", fill)
    sent.clear()
    writer.save(4, make_state(spec), {})
    assert "has no copy of step 4 in memory" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "user/run/process-0").iterdir()] == ["2"]
    assert len(sent) == len(make_state(spec))  # the other processes wait for every permutation


def test_a_save_does_not_wait_for_the_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also that a step without hashes is not found, and that the next save waits for them."""
    spec, hashed = PartitionSpec(("data", "fsdp")), threading.Event()
    writer = open_memory(tmp_path, make_state(spec))
    writer.save(2, make_state(spec), {})
    writer.wait()
    hash_file = host_memory.hash_file
    monkeypatch.setattr(host_memory, "hash_file", lambda path: hashed.wait(60) and hash_file(path))
    writer.save(4, make_state(spec), {})
    assert not (tmp_path / "process-0" / "4" / host_memory.INDEX).exists()
    threading.Timer(0.2, hashed.set).start()
    writer.save(6, make_state(spec), {})
    assert (tmp_path / "process-0" / "4" / host_memory.INDEX).exists()
    writer.wait()
    (tmp_path / "process-0" / "6" / host_memory.INDEX).unlink()
    assert open_memory(tmp_path, make_state(spec)).find(after=0) == 4


@pytest.mark.parametrize("spec", [PartitionSpec("fsdp"), PartitionSpec(("data", "fsdp"))])
@pytest.mark.parametrize(("count", "lost"), [(2, 1), (4, 1), (4, 0)])
def test_parts_that_are_lost_come_from_another_process(
    count: int, lost: int, spec: PartitionSpec, tmp_path: Path
) -> None:
    """Along `data` another process has the same parts; otherwise the one before keeps them."""
    state = make_state(spec, 1)
    memory = of_processes(open_memory(tmp_path, state), count)
    replicated = spec == PartitionSpec("fsdp")
    assert memory._replicated == replicated
    before = (lost - 1) % count

    def hold(keeper: int | None) -> list[dict[str, Any]]:
        holds: list[dict[str, Any]] = [{} if index == lost else {OWN: True} for index in range(count)]
        return (
            holds
            if keeper is None
            else [each | {NEXT: True} if index == keeper else each for index, each in enumerate(holds)]
        )

    assert memory._is_whole(hold(None if replicated else before)) and not memory._is_whole([{}] * count)
    for other in {None, *range(count)} - {before}:
        assert memory._is_whole(hold(other)) == replicated
    memory._holders = [index for index in range(count) if index != lost]
    pairs, width = memory._find_pairs(), 8 // count
    devices = range(lost * width, (lost + 1) * width)
    offset = (4 if devices.start < 4 else -4) if replicated else (before - lost) * width
    assert set(pairs["w"]) == {(device + offset, device) for device in devices}
    memory.save(2, state, {})
    memory.wait()
    kept, offsets = state, collections.Counter[str]()
    if not replicated:
        path = tmp_path / "process-0" / "2" / NEXT
        kept = {name: memory._read(path, leaf, offsets) for name, leaf in memory._target.items()}
    intact = tuple((device, device) for device in range(8) if device not in devices)
    for name, x in state.items():
        damaged = host_memory._permute(x, intact)  # zeros on the devices of the lost process
        restored = host_memory._replace_lost(damaged, kept[name], pairs[name])
        for found, expected in zip(restored.addressable_shards, x.addressable_shards, strict=True):
            np.testing.assert_array_equal(found.data, expected.data)
