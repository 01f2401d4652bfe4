"""What benchmarks leave behind, however they end."""

import json
from pathlib import Path
from typing import Any

import pytest
from outcomes import compared


def test_what_was_compared_before_it_ended_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def compare(case: int) -> list[dict[str, Any]]:
        if case > 1:
            raise KeyboardInterrupt
        return [{"case": case}]

    file, seen = tmp_path / "report.json", []
    with pytest.raises(KeyboardInterrupt):
        for case, rows in compared(range(3), compare, "{case}".format_map, "head", {"jax": "1"}, file):
            seen.append((case, rows))
    assert seen == [(0, [{"case": 0}]), (1, [{"case": 1}])]
    assert json.loads(file.read_text()) == {"jax": "1", "rows": [{"case": 0}, {"case": 1}]}
    assert file.with_suffix(".txt").read_text() == capsys.readouterr().out == "head\n0\n1\n"
