"""benchmarks/attention.py at a toy's size: every way computes the same, and FLOPs are those of the paper."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attention
import gpu_check
import pytest

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.kernels import attention_auto
from jaxopt_llm.kernels.attention_auto import Measurement

ROW = Measurement("9.0", "bfloat16", 128, 2048, 1, "NVIDIA H200", "0.11.2", {"xla": 4.0, "pallas": 2.0, "triton": 1.0})


def test_ways_compute_the_same() -> None:
    rows = attention.compare(attention.Case(64, 64, causal=True, dtype="float32"), only=[], runs=1)
    assert {row["name"] for row in rows} == {"xla", "pallas"}
    for row in rows:
        assert max(row["distance"], row["gradient_distance"]) < 1e-5
        assert row["backward_tflops"] / row["forward_tflops"] == pytest.approx(
            2.5 * row["forward_seconds"] / row["backward_seconds"]
        )
        assert attention.line(row)


def test_flops_are_counted_as_in_the_papers() -> None:
    """4 × length² × head_dim × heads × rows forward, half of it where causal (Dao 2023, arXiv:2307.08691)."""
    case = attention.Case(64, 128, causal=False, dtype="bfloat16")
    q, _, _, _ = case.operands()
    rows, length, heads, head_dim = q.shape
    assert 2 * case.products == 4 * length**2 * head_dim * heads * rows
    assert attention.Case(64, 128, causal=True, dtype="bfloat16").products == case.products / 2


def test_what_is_not_supported_is_named() -> None:
    (row,) = attention.compare(attention.Case(16, 64, causal=True, dtype="bfloat16"), only=["pallas"], runs=1)
    assert "head_dim=16: the pallas kernel supports" in row["unavailable"] and row["unavailable"] in attention.line(row)


# ---- The table that `auto` reads.

GPU: Any = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
FIGURES = {"forward_seconds": 1.0, "backward_seconds": 2.5, "distance": 1e-3, "gradient_distance": 2e-3}


def measured(**others: dict[str, Any]) -> Mapping[str, float]:
    """Of xla and these, of which this is what differs."""
    rows = [{"name": name, **FIGURES, **row} for name, row in {"xla": {}, **others}.items()]
    return attention.measured(attention.Case(128, 8192, causal=True, dtype="bfloat16"), rows, GPU).seconds


def test_the_table_has_what_is_ours_and_can_run() -> None:
    assert measured(
        pallas={"backward_seconds": 1.0}, triton={"unavailable": "not installed"}, **{"tokamax mosaic": {}}
    ) == {"xla": 3.5, "pallas": 2.0}


@pytest.mark.parametrize("wrong", [{"distance": 2.1e-3}, {"gradient_distance": 4.1e-3}, {"distance": float("nan")}])
def test_what_computes_something_else_does_not_get_into_the_table(wrong: dict[str, float]) -> None:
    assert measured(pallas={"forward_seconds": 0.1, **wrong}, cudnn={"distance": 1.9e-3}).keys() == {"xla", "cudnn"}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["attention.py", *map(str, arguments)])
    return attention.main()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On which pallas is the slower one of 8192 tokens, and the faster one of fewer."""
    monkeypatch.setattr(attention, "ON_CPU", False)
    monkeypatch.setattr(attention.jax, "devices", lambda: [GPU])

    def compare(case: attention.Case, **_: object) -> list[dict[str, Any]]:
        of_case = {**dataclasses.asdict(case), **FIGURES, "forward_tflops": 1.0, "backward_tflops": 1.0}
        pallas = {"name": "pallas", **of_case, "forward_seconds": 2.0 if case.length == 8192 else 0.5}
        return [{"name": "xla", **of_case}, pallas]

    monkeypatch.setattr(attention, "compare", compare)


def fastest(file: Path, keys: int) -> str:
    table = attention_auto.read_table(file)
    call = attention_auto.AttentionCall(128, "bfloat16", keys)
    return attention_auto.choose_fastest(call, (9, 0), {"xla": [], "pallas": []}, table).name


@pytest.mark.usefixtures("gpu")
def test_what_is_measured_is_written_before_the_rest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head size of the figures to reach first."""
    compare, report = attention.compare, tmp_path / "report.json"

    def stops(case: attention.Case, **others: Any) -> list[dict[str, Any]]:
        if case.length == 8192:
            raise KeyboardInterrupt
        return compare(case, **others)

    monkeypatch.setattr(attention, "compare", stops)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, "--json", report)
    rows = json.loads(report.read_text())["rows"]
    assert {(row["head_dim"], row["length"]) for row in rows} == {(128, 2048)}
    assert report.with_suffix(".txt").exists()


def test_a_library_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokamax.py").write_text("raise RuntimeError('wrong CUDA')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(attention, "ON_CPU", False)
    (row,) = attention.compare(attention.Case(64, 64, causal=True, dtype="float32"), only=["tokamax triton"], runs=1)
    assert row["unavailable"] == "RuntimeError: wrong CUDA"


@pytest.mark.usefixtures("gpu")
def test_auto_reads_what_the_benchmark_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table.json"
    assert run(monkeypatch, "--lengths", 8192, 512, "--both-ways", "--write-table", table) == 0
    assert (fastest(table, 8192), fastest(table, 512)) == ("xla", "pallas")


@pytest.mark.usefixtures("gpu")
def test_auto_reads_what_gpu_check_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table.json"
    monkeypatch.setattr(attention_auto, "TABLE", table)  # the package's
    on_gpu, on_cpu = (
        next(part.arguments[1:] for part in gpu_check.parts(on_cpu) if part.name == "attention")
        for on_cpu in (False, True)
    )
    assert run(monkeypatch, *on_cpu, tmp_path / "report.json") == 0 and not table.exists()
    assert run(monkeypatch, *on_gpu, tmp_path / "report.json") == 0
    assert fastest(table, 8192) == "xla" and (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [([], "a CPU's figures"), (["--only", "xla"], "leave --only"), (["--tune"], "leave --only and --tune")],
)
def test_no_table_of_what_compares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    with pytest.raises(InputError, match=f"--write-table: .*{said}"):
        run(monkeypatch, *arguments, "--write-table", tmp_path / "table.json")
    assert not (tmp_path / "table.json").exists()


def test_new_figures_take_the_place_of_old_ones(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    attention.write_table([longer := replace(ROW, length=32_768), ROW], file)
    again, other = replace(ROW, seconds={"xla": 1.0}, device="NVIDIA GH200"), replace(ROW, capability="10.0")
    attention.write_table([again, other], file)
    assert attention_auto.read_table(file) == [other, again, longer]
    assert len(file.read_text().splitlines()) == 2 + 3  # a line for each: a change is a line of a diff


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table.json"
    attention.write_table([ROW], table)

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        attention.write_table([replace(ROW, head_dim=64)], table)
    assert attention_auto.read_table(table) == [ROW]
