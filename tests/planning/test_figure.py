"""Figure of a plan, without compiling anything."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.planning import figure
from jaxopt_llm.planning.breakdown import Part
from jaxopt_llm.planning.figure import check_figure_file, draw_html, draw_svg, make_charts, save_figure
from jaxopt_llm.planning.free_memory import GIB
from jaxopt_llm.planning.memory import Memory

pytestmark = pytest.mark.core

MEMORY = Memory(parameters=4 * GIB, gradients=GIB, optimizer=8 * GIB, activations=2 * GIB, gathered_weights=0, other=0)
PARTS = (
    Part("casts", 0.25, 0.0, 1, 0, 0),
    Part("matmuls", 1.5, 0.0, 1, 0, 0),
    Part("collectives over fsdp (nvlink)", 0.25, 0.5, 1, 0, 0),
)
CHARTS = make_charts(MEMORY, 20 * GIB, PARTS)
HEADING = "10 parameters on 1 × 8 <GPU>"


def test_bars_are_sorted_and_add_up() -> None:
    memory, time = CHARTS
    assert [bar.name for bar in memory.bars] == ["optimizer", "parameters", "activations", "gradients", "free"]
    assert sum(bar.value for bar in memory.bars) == 20 and memory.unit == "GiB"
    assert memory.bars[0].text == "8.00 GiB (40%)" and memory.title.endswith("15.0 of 20.0 GiB")
    assert [bar.name for bar in time.bars] == ["matmuls", "collectives over fsdp (nvlink)", "casts"]
    assert sum(bar.value for bar in time.bars) == 2000 and time.unit == "ms"
    assert time.bars[1].hidden == 500 and time.bars[1].text == "250.0 ms (12.5%), 500.0 ms hidden"
    assert len({bar.color for chart in CHARTS for bar in chart.bars if bar.name != "free"}) >= 5


def test_what_lacks_is_shown() -> None:
    memory, _ = make_charts(MEMORY, 12 * GIB, PARTS)
    assert (memory.bars[-1].name, memory.bars[-1].value) == ("lacking", 3)
    assert memory.title.endswith("15.0 of 12.0 GiB: does not fit")


def list_texts() -> list[str]:
    return [text for chart in CHARTS for text in (chart.title, *(bar.text for bar in chart.bars))]


def test_a_page_shows_everything_and_loads_nothing() -> None:
    from plotly.offline import get_plotlyjs

    page = draw_html(CHARTS, HEADING)
    assert page.count(get_plotlyjs()) == 1 and page == draw_html(CHARTS, HEADING)
    rest = page.replace(get_plotlyjs(), "")
    assert "//" not in rest and "src=" not in rest
    assert "<title>10 parameters on 1 × 8 &lt;GPU&gt;</title>" in rest
    assert all(text in rest for text in list_texts())


def test_an_image_shows_everything_and_is_always_the_same() -> None:
    image = draw_svg(CHARTS, HEADING)
    assert image == draw_svg(CHARTS, HEADING)
    texts = [each.text for each in ElementTree.fromstring(image).iter("{http://www.w3.org/2000/svg}text")]
    assert {HEADING, *list_texts(), *(bar.name for chart in CHARTS for bar in chart.bars)} <= {*texts}


@pytest.mark.parametrize("suffix", [".html", ".svg"])
def test_an_existing_file_is_replaced(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"plan{suffix}"
    file.write_text("old")
    check_figure_file(file)
    save_figure(CHARTS, HEADING, file)
    assert "matmuls" in file.read_text() and list(tmp_path.iterdir()) == [file]


def test_bad_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"--save plan.pdf: a figure is an HTML or an SVG file; write to plan.html"):
        check_figure_file(Path("plan.pdf"))
    with pytest.raises(InputError, match=r"the folder no/such does not exist; create it first"):
        check_figure_file(Path("no/such/plan.svg"))
    (tmp_path / "plan.svg").mkdir()
    with pytest.raises(InputError, match=r"plan.svg: is a folder; give the name of a file"):
        check_figure_file(tmp_path / "plan.svg")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for suffix, package in figure.PACKAGES.items():
        with pytest.raises(InputError, match=rf"requires {package}; run: pip install -e '.*\[report\]'"):
            check_figure_file(tmp_path / f"new{suffix}")
