"""benchmarks/grouped_matmul.py at a toy's size: ways compute the same, and FLOPs are those of the groups' rows."""

import json
from pathlib import Path

import grouped_matmul
import pytest
from commands import ROOT

from jaxopt_llm.planning.search import grouped_rate


@pytest.mark.parametrize("load", ["even", "skewed"])
def test_ways_compute_the_same(load: str) -> None:
    case = grouped_matmul.Case(70, 32, 48, 4, load, "float32")
    rows = {row["name"]: row for row in grouped_matmul.compare(case, only=[], runs=1)}
    assert set(rows) == {"xla", "pallas", "dense"}
    assert max(rows[name]["distance"] for name in ("xla", "pallas")) < 1e-5
    for row in rows.values():
        assert row["tflops"]["dx"] * row["seconds"]["dx"] == pytest.approx(2 * 70 * 32 * 48 / 1e12)
        assert row["tflops"]["all"] * sum(row["seconds"].values()) == pytest.approx(6 * 70 * 32 * 48 / 1e12)
        assert grouped_matmul.line(row)


def test_loads() -> None:
    even, skewed = (grouped_matmul.Case(4096, 8, 8, 8, load, "float32").sizes() for load in ("even", "skewed"))
    assert even.sum() == skewed.sum() == 4096
    assert even.max() < 1.2 * even.min() and skewed[0] > 5 * skewed[-1]


def test_blocks_that_are_tried() -> None:
    tried = grouped_matmul.choices(2)
    assert len(set(tried)) == len(tried) > 50
    assert grouped_matmul.BLOCKS[2] in tried
    case = grouped_matmul.Case(70, 32, 48, 4, "even", "float32")
    assert {len(each) for each in grouped_matmul.tune(case, runs=1).values()} == {2}


def test_the_table_of_rates_comes_from_the_report(tmp_path: Path) -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "nvidia-h200-grouped-matmul.json").read_text())
    file = tmp_path / "table.json"
    for rows in (report["rows"][:2], report["rows"]):  # the second time some are there already
        grouped_matmul.write_table(report | {"rows": rows}, file)
    assert file.read_text() == grouped_rate.TABLE.read_text()
