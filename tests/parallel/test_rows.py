"""The rows of a batch that each process reads, for processes with equal shares of eight devices."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxopt_llm.config import MeshConfig, PrecisionConfig, ShardingConfig
from jaxopt_llm.parallel.mesh import LocalRows, make_mesh
from jaxopt_llm.parallel.placement import Placement

pytestmark = pytest.mark.core

MICROBATCHES, ROWS, LENGTH = 2, 8, 4


def rows_sharding(**axes: int) -> NamedSharding:
    placement = Placement(make_mesh(MeshConfig(**axes)), ShardingConfig(0), PrecisionConfig())
    return placement.activation(None, "batch", "sequence")


def list_local_rows(sharding: NamedSharding, processes: int) -> list[LocalRows]:
    """Return the LocalRows of each process; the first process has the first devices."""
    indices = sharding.devices_indices_map((MICROBATCHES, ROWS, LENGTH))
    devices_each = 8 // processes
    found = []
    for first in range(0, 8, devices_each):
        local = {device: indices[device] for device in jax.devices()[first : first + devices_each]}
        local_view = SimpleNamespace(addressable_devices_indices_map=lambda shape, local=local: local)
        found.append(LocalRows((MICROBATCHES, ROWS, LENGTH), local_view))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("axes", "processes", "expected"),
    [
        # The half of each microbatch that the devices hold, not half of the batch.
        ({"data": 2, "fsdp": 4}, 2, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        ({"fsdp": 2, "tensor": 4}, 2, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        # Two processes along `tensor` or along the stages of a pipeline read the same rows.
        ({"fsdp": 2, "tensor": 4}, 4, [[0, 1, 2, 3, 8, 9, 10, 11]] * 2 + [[4, 5, 6, 7, 12, 13, 14, 15]] * 2),
        ({"pipeline": 2, "fsdp": 4}, 2, [list(range(16))] * 2),
        ({"pipeline": 2, "fsdp": 4}, 4, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]] * 2),
        ({"context": 2, "fsdp": 4}, 4, [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
    ],
)
def test_a_process_reads_the_rows_of_its_devices(
    axes: dict[str, int], processes: int, expected: list[list[int]]
) -> None:
    assert [rows.indices for rows in list_local_rows(rows_sharding(**axes), processes)] == expected


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 4}, {"fsdp": 2, "context": 2, "tensor": 2}, {"tensor": 8}])
def test_rows_are_placed_as_microbatches(axes: dict[str, int]) -> None:
    sharding = rows_sharding(**axes)
    batch = np.arange(MICROBATCHES * ROWS * LENGTH).reshape(MICROBATCHES * ROWS, LENGTH)
    local_rows = LocalRows((MICROBATCHES, ROWS, LENGTH), sharding)
    assert local_rows.indices == list(range(MICROBATCHES * ROWS))
    placed = local_rows.make_global({"tokens": batch})["tokens"]
    assert placed.sharding == sharding
    np.testing.assert_array_equal(placed, batch.reshape(MICROBATCHES, ROWS, LENGTH))


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 4}, {"context": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 4}])
@pytest.mark.parametrize("processes", [2, 4])
def test_a_process_places_the_rows_that_it_read(
    axes: dict[str, int], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that each device gets its own part of the whole batch."""

    def make_shards(shape: Any, sharding: Any, shard: Callable[[Any], np.ndarray]) -> list[tuple[Any, np.ndarray]]:
        return [(index, shard(index)) for index in sharding.addressable_devices_indices_map(shape).values()]

    monkeypatch.setattr(jax, "make_array_from_callback", make_shards)
    batch = np.arange(MICROBATCHES * ROWS * LENGTH).reshape(MICROBATCHES, ROWS, LENGTH)
    for local_rows in list_local_rows(rows_sharding(**axes), processes):
        read = batch.reshape(-1, LENGTH)[local_rows.indices]
        for index, shard in local_rows.make_global({"tokens": read})["tokens"]:
            np.testing.assert_array_equal(shard, batch[index])
