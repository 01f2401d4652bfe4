"""benchmarks/memory.py: its rows, its arithmetic, and the bars that it prints."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import memory
import pytest
from memory import (
    BASE,
    BF16,
    CHUNKS,
    FULL,
    IN_BACKWARD,
    INT8_MOMENTS,
    LORA,
    OFFLOAD,
    PLAIN,
    QLORA,
    TABLES,
    ZERO_3,
    Row,
    Table,
)

from jaxopt_llm.config import cli
from jaxopt_llm.step.validation import validate

RECIPE = Path(memory.__file__).parent / "recipes" / "tiny.py"
MODEL = "--model.width 128 --model.mlp-width 512 --model.vocabulary-size 512 --training.sequence-length 64"


def row(activations: float = 0, flops: float = 100, **kinds: float) -> Row:
    memory = {
        kind: kinds.get(kind, 0) for kind in ("parameters", "gradients", "optimizer", "gathered_weights", "other")
    }
    memory["activations"] = activations
    memory["peak"] = sum(memory.values())
    fits = kinds.get("fits", 1)
    return {"memory": memory, "flops": flops, "parameters": 10, "host": 0, "pcie": 0, "sent": 0, "fits": bool(fits)}


STATE = {"parameters": 40, "gradients": 40, "optimizer": 80}
EIGHTH = {kind: size / 8 for kind, size in STATE.items()}


def rows() -> dict[str, dict[str, Row]]:
    """Figures for which every bar passes."""
    alone = {
        BASE.name: row(100, **STATE),
        PLAIN.name: row(200, **STATE),
        BF16.name: row(50, **STATE),
        FULL.name: row(20, 125, **STATE),
        ZERO_3.name: row(100, **EIGHTH),
        INT8_MOMENTS.name: row(100, parameters=40, gradients=40, optimizer=20.6),
        OFFLOAD.name: row(100, parameters=40, gradients=40),
        LORA.name: row(100, parameters=41, optimizer=1),
    }
    one = {CHUNKS.name: row(500, fits=0), "all": row(20)}
    one |= {memory.INSTEAD.format(each.name): row(10, parameters=100, fits=0) for each in (LORA, QLORA)}
    gpt3 = {BASE.name: row(500), PLAIN.name: row(1000), FULL.name: row(200)}
    return {"alone": alone, "together": {ZERO_3.name: row(20, **EIGHTH)}, "one of 24 GB": one, "GPT-3": gpt3}


def test_shares() -> None:
    base, less = row(100, **STATE), row(30, 120, **STATE)
    assert memory.saved(less, base) == pytest.approx(70 / 260)
    assert memory.saved(less, base, "activations") == pytest.approx(0.7)
    assert memory.extra_flops(less, base) == pytest.approx(0.2)


def test_techniques_add_up() -> None:
    assert [each.settings for each in memory.adding_up(BASE, BF16, FULL)] == [
        "",
        BF16.settings,
        f"{BF16.settings} {FULL.settings}",
    ]


def test_every_bar_passes_and_fails_by_its_figure() -> None:
    assert [each.holds for each in memory.bars(rows())] == [True] * 5
    worse: list[tuple[str, str, Row]] = [
        ("alone", FULL.name, row(31, **STATE)),
        ("alone", PLAIN.name, row(199, **STATE)),
        ("alone", INT8_MOMENTS.name, row(100, parameters=40, optimizer=22)),
        ("alone", OFFLOAD.name, row(100, parameters=40, optimizer=1e-4)),
        ("one of 24 GB", "all", row(20, fits=0)),
    ]
    for number, (table, name, figures) in enumerate(worse):
        found = rows()
        found[table][name] = figures
        assert [each.holds for each in memory.bars(found)] == [other != number for other in range(5)]


def test_what_a_row_says() -> None:
    said = memory.line("bf16", row(2**30, 125, parameters=2**31, fits=0), row(2**32, 100, parameters=2**32))
    expected = "bf16 | 2.00 0.00 0.00 1.00 0.00 0.00 | 3.00 62% | 0.00 0.00 0.00 | 0.000 25.0% | no"
    assert said.split() == expected.split()


def test_rows_are_valid_and_named_once() -> None:
    for table in TABLES:
        assert len({each.name for each in table.rows}) == len(table.rows)
    recipe = cli.load_recipe(TABLES[0].recipe)
    for each in TABLES[0].rows:
        settings = shlex.split(f"{TABLES[0].settings} {each.settings}")
        validate(cli.override_config(recipe, settings, "benchmarks/memory.py"))


@pytest.mark.slow
def test_a_row_is_measured() -> None:
    settings = f"{memory.OFF} {MODEL} --mesh.fsdp 2"
    found = memory.measured(Table("tiny", str(RECIPE), ("4090", 1, 2), settings, (BASE,)), BASE)
    kinds = {name: size for name, size in found["memory"].items() if name != "peak"}
    assert sum(kinds.values()) == found["memory"]["peak"] > 0
    assert kinds["parameters"] == 4 * found["parameters"]
    assert kinds["optimizer"] == pytest.approx(8 * found["parameters"], rel=1e-3)
    assert found["sent"] == pytest.approx(4 * found["parameters"], rel=0.01)  # one all-reduce of float32 over two GPUs
    assert found["fits"] and found["flops"] > 0 and found["settings"] == ""


# ---- At size: minutes.


@pytest.mark.slow
def test_the_bars_at_size() -> None:
    wanted = {
        "alone": (BASE, PLAIN, FULL, INT8_MOMENTS, OFFLOAD),
        "one of 24 GB": (IN_BACKWARD,),
    }

    def of(table: Table) -> Iterator[tuple[str, Row]]:
        names = [each.name for each in wanted[table.name]]
        yield from ((each.name, memory.measured(table, each)) for each in table.rows if each.name in names)

    rows = {table.name: dict(of(table)) for table in TABLES if table.name in wanted}
    assert [each.said for each in memory.bars(rows) if not each.holds] == []
