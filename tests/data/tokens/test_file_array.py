"""Arrays in files: they equal NumPy's, and a file that changes while it is read is an error, not a SIGBUS."""

import os
from pathlib import Path

import numpy as np
import pytest

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.pieces import FileArray

VALUES = np.sort(np.random.default_rng(0).integers(0, 10**6, 20_000)).astype("<i8")


@pytest.fixture
def array(tmp_path: Path) -> FileArray:
    (tmp_path / "a.bin").write_bytes(b"abc" + VALUES.tobytes())
    return FileArray(tmp_path / "a.bin", VALUES.dtype, VALUES.size, 3)


@pytest.mark.parametrize("index", [0, -1, 12_345, slice(None), slice(5, 4097), slice(-3, None), slice(9, 3)], ids=str)
def test_numbers_and_slices(array: FileArray, index: int | slice) -> None:
    np.testing.assert_array_equal(array[index], VALUES[index])
    assert np.asarray(array[index]).dtype == VALUES.dtype


@pytest.mark.parametrize("count", [0, 1, 7, 5000])
def test_any_indices(array: FileArray, count: int) -> None:
    indices = np.random.default_rng(count).integers(-VALUES.size, VALUES.size, count)
    np.testing.assert_array_equal(array[indices], VALUES[indices])
    with pytest.raises(IndexError):
        array[np.append(indices, VALUES.size)]
    with pytest.raises(IndexError):
        array[VALUES.size]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, VALUES.size])
def test_searches(array: FileArray, size: int, side: str) -> None:
    part = FileArray(array.path, array.dtype, size, array.offset)
    values = VALUES[:size]
    wanted = [-1, 10**6, *VALUES[::501].tolist(), *(VALUES[4094:4099] + 1).tolist(), *VALUES[4094:4099].tolist()]
    assert [part.searchsorted(value, side) for value in wanted] == values.searchsorted(wanted, side).tolist()


def test_a_file_that_is_truncated_while_it_is_read_is_one_line(array: FileArray) -> None:
    assert array[VALUES.size - 1] == VALUES[-1]
    os.truncate(array.path, 3 + 8 * 100)
    np.testing.assert_array_equal(array[:100], VALUES[:100])
    for index in (100, slice(99, 101), np.array([5, VALUES.size - 1])):
        with pytest.raises(InputError, match="a.bin: the file was truncated while it was read"):
            array[index]


def test_a_pipe_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.bin")
    with pytest.raises(InputError, match="a.bin: a pipe"):
        FileArray(tmp_path / "a.bin", VALUES.dtype, 5)[0]
