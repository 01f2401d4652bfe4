"""Reads of views of a file, and files that are cut while they are read."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.safetensors import StoredFile
from jaxopt_llm.core.errors import InputError

pytestmark = pytest.mark.core

SHAPE, OFFSET = (6, 10, 8), 24
VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "all": lambda x: x,
    "rows": lambda x: x[2:4],
    "columns": lambda x: x[..., 3:5],
    "middle and last": lambda x: x[:, 2:7, 1:],
    "steps": lambda x: x[::2, ::3, ::4],
    "transposed": lambda x: x.T[2:5],
    "split": lambda x: x.reshape(6, 2, 5, 4, 2)[:, 1, :, 2].transpose(2, 0, 1),
    "one": lambda x: x[5, 9, 7, ...],
    "one at the end": lambda x: x[-1:, -1:, -1:],
    "nothing": lambda x: x[3:3],
}


@pytest.fixture
def opened(tmp_path: Path) -> tuple[StoredFile, np.ndarray]:
    values = np.random.default_rng(0).integers(0, 2**16, SHAPE, np.uint16)
    (tmp_path / "a.bin").write_bytes(bytes(OFFSET) + values.tobytes())
    with (tmp_path / "a.bin").open("rb") as stream:
        return StoredFile(tmp_path / "a.bin", stream), values


def view_of(file: StoredFile) -> np.ndarray:
    return file.bytes[OFFSET:].view(np.uint16).reshape(SHAPE)


@pytest.mark.parametrize("case", VIEWS)
@pytest.mark.parametrize(("gap", "piece"), [(0, 1), (2**14, 100), (2**14, 2**20)])
def test_a_read_is_equal_to_the_view(
    case: str, gap: int, piece: int, opened: tuple[StoredFile, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "MAX_GAP_BYTES", gap)
    monkeypatch.setattr(safetensors, "MAX_PIECE_BYTES", piece)
    file, values = opened
    found = file.read(VIEWS[case](view_of(file)))
    np.testing.assert_array_equal(found, VIEWS[case](values))
    assert found.dtype == values.dtype and not np.shares_memory(found, file.bytes)


def test_a_call_that_returns_a_part_is_continued(
    opened: tuple[StoredFile, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call reads at most 2 GiB."""
    (file, values), preadv = opened, os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, at: preadv(descriptor, [buffers[0][:50]], at))
    np.testing.assert_array_equal(file.read(view_of(file)), values)


def test_few_bytes_are_read_of_a_view_with_wide_gaps(
    opened: tuple[StoredFile, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, values = opened
    sizes: list[int] = []
    preadv = os.preadv

    def note(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", note)
    monkeypatch.setattr(safetensors, "MAX_GAP_BYTES", 8)
    np.testing.assert_array_equal(file.read(view_of(file)[:, 4:6]), values[:, 4:6])
    assert sizes == [2 * 8 * 2] * 6


@pytest.mark.parametrize("case", ["all", "columns"])
def test_a_file_that_is_cut_in_the_middle_of_a_read_is_one_line(
    case: str, opened: tuple[StoredFile, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call returns a part of the bytes, as one of more than 2 GiB does; then the rest is gone."""
    file, preadv = opened[0], os.preadv

    def read_and_cut(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, [buffers[0][:100]], offset)
        os.truncate(file.path, 200)
        return count

    monkeypatch.setattr(os, "preadv", read_and_cut)
    with pytest.raises(InputError, match="a.bin: the file was truncated while it was read") as raised:
        file.read(VIEWS[case](view_of(file)))
    assert raised.value.exit_code == 2


def test_a_disk_that_fails_is_one_line(opened: tuple[StoredFile, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(InputError, match="a.bin: the file can no longer be read .Input/output error.; check the disk"):
        opened[0].read(view_of(opened[0]))
