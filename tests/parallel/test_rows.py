"""Which rows of a batch a process reads, for processes that have some of eight devices each."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.rows import OwnRows
from jaxopt_llm.parallel.sharding import Placement, ShardingConfig

pytestmark = pytest.mark.core

MICROBATCHES, ROWS, LENGTH = 2, 8, 4


def rows_sharding(**axes: int) -> NamedSharding:
    placement = Placement(make_mesh(MeshConfig(**axes)), ShardingConfig(0), PrecisionConfig())
    return placement.activation(None, "batch", "sequence")


def of_processes(sharding: NamedSharding, processes: int) -> list[OwnRows]:
    """What each process has, where the first has the first devices."""
    held = sharding.devices_indices_map((MICROBATCHES, ROWS, LENGTH))
    each = 8 // processes
    found = []
    for first in range(0, 8, each):
        own = {device: held[device] for device in jax.devices()[first : first + each]}
        sees = SimpleNamespace(addressable_devices_indices_map=lambda shape, own=own: own)
        found.append(OwnRows((MICROBATCHES, ROWS, LENGTH), sees))  # type: ignore[arg-type]
    return found


def numbers(sharding: NamedSharding, processes: int) -> list[list[int]]:
    """Of the rows that each process reads."""
    return [own.numbers for own in of_processes(sharding, processes)]


@pytest.mark.parametrize(
    ("axes", "processes", "expected"),
    [
        # Of each microbatch the half that its devices hold, not half of the batch.
        ({"data": 2, "fsdp": 4}, 2, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        ({"fsdp": 2, "tensor": 4}, 2, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        # Two processes to a row of `tensor`, or to the stages of a pipeline, read the same rows.
        ({"fsdp": 2, "tensor": 4}, 4, [[0, 1, 2, 3, 8, 9, 10, 11]] * 2 + [[4, 5, 6, 7, 12, 13, 14, 15]] * 2),
        ({"pipeline": 2, "fsdp": 4}, 2, [list(range(16))] * 2),
        ({"pipeline": 2, "fsdp": 4}, 4, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]] * 2),
        ({"context": 2, "fsdp": 4}, 4, [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
    ],
)
def test_a_process_reads_what_its_devices_hold(axes: dict[str, int], processes: int, expected: list[list[int]]) -> None:
    assert numbers(rows_sharding(**axes), processes) == expected


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 4}, {"fsdp": 2, "context": 2, "tensor": 2}, {"tensor": 8}])
def test_rows_are_placed_as_microbatches(axes: dict[str, int]) -> None:
    sharding = rows_sharding(**axes)
    batch = np.arange(MICROBATCHES * ROWS * LENGTH).reshape(MICROBATCHES * ROWS, LENGTH)
    own = OwnRows((MICROBATCHES, ROWS, LENGTH), sharding)
    assert own.numbers == list(range(MICROBATCHES * ROWS))
    placed = own.place({"tokens": batch})["tokens"]
    assert placed.sharding == sharding
    np.testing.assert_array_equal(placed, batch.reshape(MICROBATCHES, ROWS, LENGTH))


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 4}, {"context": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 4}])
@pytest.mark.parametrize("processes", [2, 4])
def test_a_process_places_the_rows_that_it_read(
    axes: dict[str, int], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its devices gets that device's part of the whole batch."""

    def parts(shape: Any, sharding: Any, part: Callable[[Any], np.ndarray]) -> list[tuple[Any, np.ndarray]]:
        return [(index, part(index)) for index in sharding.addressable_devices_indices_map(shape).values()]

    monkeypatch.setattr(jax, "make_array_from_callback", parts)
    batch = np.arange(MICROBATCHES * ROWS * LENGTH).reshape(MICROBATCHES, ROWS, LENGTH)
    for own in of_processes(rows_sharding(**axes), processes):
        read = batch.reshape(-1, LENGTH)[own.numbers]
        for index, part in own.place({"tokens": read})["tokens"]:
            np.testing.assert_array_equal(part, batch[index])
