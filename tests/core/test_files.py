"""Atomic file writes."""

import errno
import os
import tracemalloc
from pathlib import Path

import pytest

from jaxopt_llm.core.files import read_file, replace_durably

pytestmark = pytest.mark.core


def test_a_writer_that_dies_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    replace_durably(path, "old")

    def die(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        with pytest.raises(OSError) as failed:
            replace_durably(path, "new")
    assert failed.value.filename == str(path)  # the system names no file here
    assert path.read_text() == "old"
    replace_durably(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_small_file_costs_its_own_size_and_not_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"12345")
    tracemalloc.start()
    try:
        assert read_file(path, limit=2**27) == b"12345"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert read_file(path, limit=5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_file(path, limit=4)


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="only Linux has files without a size")
def test_a_file_whose_size_is_not_known_is_read_up_to_the_limit() -> None:
    path = Path("/proc/version")
    assert path.stat().st_size == 0
    content = path.read_bytes()
    assert read_file(path, limit=len(content)) == content
    with pytest.raises(ValueError):
        read_file(path, limit=len(content) - 1)
