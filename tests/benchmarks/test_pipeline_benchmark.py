"""benchmarks/pipeline.py: its rows, and their arithmetic. Of its figures tests/execution/test_schedules.py and
tests/bytes/test_pipeline_bytes.py say the same at a smaller size."""

import dataclasses

import pipeline
import pytest

from jaxopt_llm.config import MeshConfig


def test_rows_are_valid_and_named_once() -> None:
    for ways, recipe, settings in (
        (pipeline.COMPILED, pipeline.LARGE, ""),
        (pipeline.SIMULATED, "quickstart.py", pipeline.STEP),
    ):
        assert len({each.name for each in ways}) == len(ways)
        for each in ways:
            pipeline.configured(recipe, settings, each.settings)


def test_what_the_tables_say_is_counted_and_by_formula() -> None:
    rows = list(pipeline.arithmetic())
    for row in rows:
        divides = row["microbatches"] % row["stages"] == 0 or row["chunks"] == 1
        assert (row["idle"] == pytest.approx(row["idle_by_formula"])) == divides
    of_one = {tuple(size / row["inputs"] for size in row["bytes"].values()) for row in rows}
    assert of_one == {(4096 * 8192 * 2, 1024 * 768 * 2)}


def test_what_waits_is_divided() -> None:
    config = pipeline.configured(pipeline.LARGE, pipeline.stages("1f1b", 16, residuals="recompute"))
    assert pipeline.waiting_bytes(config, 3) == 3 * 4 * 4096 * 8192 * 2 // 8
    divided = dataclasses.replace(config, mesh=MeshConfig(pipeline=16, fsdp=2, tensor=2))
    assert pipeline.waiting_bytes(divided, 3) == 3 * 2 * 4096 * 8192 * 2 // 2


def test_a_schedule_is_told() -> None:
    told = pipeline.schedule_of(pipeline.configured(pipeline.LARGE, pipeline.stages("interleaved", 16, 5)))
    assert (told["inputs"], told["idle"]) == (6 * 16 - 1, pytest.approx(15 / (5 * 256 + 15)))
    assert pipeline.schedule_of(pipeline.configured(pipeline.LARGE, pipeline.FSDP))["idle"] == 0
