"""Rates of grouped matmuls between measurements and beyond them."""

import json
from dataclasses import asdict, replace

import pytest
from commands import ROOT

from jaxopt_llm.compiler.chips import CHIPS
from jaxopt_llm.planning.search.grouped_rate import (
    LEGS,
    Groups,
    Measurement,
    describe_rates,
    find_efficiency,
    read_table,
)

H200 = CHIPS["h200"]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200-grouped-matmul.json"
# 1 ms for all rows and 10 us for each group, forward; dx takes twice as long and dw three times.
TIMES = {groups: 1e-3 + 1e-5 * groups for groups in (8, 32, 128)}
TABLE = [
    Measurement(
        "NVIDIA H200", "0.11.2", "bfloat16", 16_384, 1024, 2048, groups, {"forward": t, "dx": 2 * t, "dw": 3 * t}
    )
    for groups, t in TIMES.items()
]
MATRIX = (1024, 2048)


def test_the_table_has_the_committed_measurements() -> None:
    report = json.loads(RESULTS.read_text())
    measured = [row for row in report["rows"] if (row["name"], row["load"]) == ("pallas", "even")]
    assert len(measured) == 2
    for row, known in zip(measured, read_table(), strict=True):
        assert asdict(known).items() <= (row | {key: report[key] for key in ("device", "jax")}).items()
        for leg in LEGS:
            groups = Groups(known.rows, row["width"], row["inner"])
            tflops = find_efficiency(H200, leg, groups) * H200.peak_flops["bfloat16"] / 1e12
            assert tflops == pytest.approx(row["tflops"][leg])


def seconds(rows: float, leg: str = "forward", tokens: int = 16_384) -> float:
    """Return the time of a matmul with as many groups as fill these rows each."""
    flops = 2 * tokens * MATRIX[0] * MATRIX[1]
    return flops / find_efficiency(H200, leg, Groups(rows, *MATRIX), TABLE) / H200.peak_flops["bfloat16"]


@pytest.mark.parametrize("groups", [8, 16, 32, 100, 128, 1024])
def test_each_row_and_each_group_takes_its_time(groups: int) -> None:
    rows = 16_384 / groups
    assert seconds(rows) == pytest.approx(1e-3 + 1e-5 * groups)
    assert [seconds(rows, leg) for leg in ("dx", "dw")] == pytest.approx([2 * seconds(rows), 3 * seconds(rows)])
    assert seconds(rows, tokens=4 * 16_384) == pytest.approx(4 * seconds(rows))


def test_no_rate_is_above_the_measured_ones() -> None:
    assert seconds(16_384) == seconds(2048)
    assert find_efficiency(H200, "forward", Groups(100_000, *MATRIX)) == find_efficiency(
        H200, "forward", Groups(2048, 4096, 14_336)
    )


def test_rates_of_dtypes_are_not_mixed() -> None:
    """The own dtype decides, as far as it was measured."""
    slower = {leg: 2 * time for leg, time in TABLE[0].seconds.items()}
    table = [replace(TABLE[0], dtype="float32", seconds=slower), *TABLE]
    groups = Groups(2048, *MATRIX)
    ratio = H200.peak_flops["bfloat16"] / H200.peak_flops["float32"]
    own = find_efficiency(H200, "dw", groups, TABLE)
    assert find_efficiency(H200, "dw", groups, table) == own
    assert find_efficiency(H200, "dw", replace(groups, dtype="float32"), table) == pytest.approx(own / 2 * ratio)
    assert find_efficiency(H200, "dw", replace(groups, dtype="float16"), TABLE) == own
    assert "not measured: float32" in describe_rates(H200, replace(groups, dtype="float32"), TABLE)


def test_a_group_has_at_least_one_row() -> None:
    assert seconds(1 / 64) == seconds(1)


def test_the_nearest_matrix_and_the_own_gpu_decide() -> None:
    slower = {leg: 2 * time for leg, time in TABLE[0].seconds.items()}
    small = replace(TABLE[0], width=256, tokens=4 * 16_384, groups=32, seconds=slower)
    other = replace(TABLE[0], device="NVIDIA H100 80GB HBM3", seconds=slower)
    table = [*TABLE, small, other]
    own = find_efficiency(H200, "dw", Groups(2048, *MATRIX), TABLE)
    assert find_efficiency(H200, "dw", Groups(2048, *MATRIX), table) == own
    assert find_efficiency(H200, "dw", Groups(2048, 256, 2048), table) == pytest.approx(own / 2)
    assert find_efficiency(CHIPS["h100"], "dw", Groups(2048, *MATRIX), table) == pytest.approx(own / 2)
    assert find_efficiency(CHIPS["a100"], "dw", Groups(2048, *MATRIX), table) == own  # of the peak


def test_what_was_not_measured_is_said() -> None:
    near = describe_rates(H200, Groups(1024, 4096, 8192))
    assert near == (
        "grouped matmuls 55.7% of the peak forward and 58.6% and 48% backward, as measured on NVIDIA H200 with groups "
        "of 128 and 2,048 rows and matrices of 4096 × 14336"
    )
    far = describe_rates(CHIPS["h100"], Groups(16_384, 2048, 768))
    assert far.endswith("× 14336; not measured: this GPU, groups of 16,384 rows, matrices of 2048 × 768")
