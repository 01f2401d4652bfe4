"""Atomic file writes."""

import os
from pathlib import Path

import pytest

from jaxopt_llm.core.files import replace_durably

pytestmark = pytest.mark.core


def test_a_writer_that_dies_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    replace_durably(path, "old")

    def die(descriptor: int) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        with pytest.raises(OSError):
            replace_durably(path, "new")
    assert path.read_text() == "old"
    replace_durably(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
