"""The command `report`: pages of real runs, what they load, and how a browser shows them."""

import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser, open_page
from commands import ROOT, assert_one_line, command, train
from run_directories import write_run

from jaxopt_llm.observe.report import figures
from jaxopt_llm.observe.report.page import GENERATOR

pytestmark = pytest.mark.core
HOSTILE = "</script><script>console.error('run')</script><img src=http://example.org/x.png>\ud800&amp;"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    shared = ("--training.steps", 4, "--evaluation.every", 2, "--evaluation.samples", 1, "--checkpoint.every", 2)
    for name, rate in (("low", 1e-3), ("high", 1e-2)):
        done = train(folder / name, *shared, "--optimizer.learning-rate", rate)
        assert done.returncode == 0, done.stderr
    return [folder / "low", folder / "high"]


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(f"<!DOCTYPE html>\n{GENERATOR}\nan earlier report")
    done = command("report", *runs, "--output", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(path) in done.stdout and "low, high" in done.stdout
    assert list(path.parent.iterdir()) == [path]
    return path


def read_figures(page: Path) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text("utf-8"), re.S)
    return {figure["id"]: figure for figure in json.loads(data, parse_constant=pytest.fail)}


class Elements(html.parser.HTMLParser):
    """Elements of a page, and its text outside of scripts."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if not self.tags or self.tags[-1][0] not in ("script", "style"):
            self.text += data


@pytest.mark.slow
def test_the_curves_are_those_of_the_records(page: Path, runs: list[Path]) -> None:
    shown = read_figures(page)
    recorded = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    for name, field in (("loss", "loss"), ("grad-norm", "grad_norm"), ("learning-rate", "learning_rate")):
        for trace, records in zip(shown[name]["data"], recorded, strict=True):
            assert trace["x"] == [1, 2, 3, 4]
            assert trace["y"] == pytest.approx([record[field] for record in records], rel=1e-6)
    assert [trace["name"] for trace in shown["loss"]["data"]] == ["low", "high"]
    assert shown["loss"]["tokens"] == [[record["tokens"] for record in records] for records in recorded]
    assert [trace["x"] for trace in shown["eval-loss"]["data"]] == [[2, 4], [2, 4]]
    memory = json.loads((runs[0] / "memory.json").read_text())
    bars = dict(zip(shown["memory"]["data"][0]["x"], shown["memory"]["data"][0]["y"], strict=True))
    assert bars["planned peak"] == pytest.approx(memory["peak"] / 2**20, rel=1e-4) and "optimizer" in bars
    assert len(shown["data-wait"]["data"]) == len(shown["events"]["data"]) == 2
    assert shown["events"]["layout"]["yaxis"]["ticktext"] == ["start", "checkpoint", "end"]


def test_the_tables_say_what_differs_and_what_was_written(page: Path, runs: list[Path]) -> None:
    text = Elements(page).text
    assert re.search(r"optimizer\.learning_rate\s*0\.001\s*0\.01\s", text) and "training.steps" not in text
    assert "finished" in text and "4 of 4" in text
    sample = json.loads((runs[0] / "samples.jsonl").read_text().splitlines()[-1])
    assert sample["prompt"] in text and "1 earlier" in text and "low, step 4" in " ".join(text.split())


def test_the_page_names_no_address(page: Path) -> None:
    elements = Elements(page)
    for tag, attributes in elements.tags:
        assert not {"src", "srcset", "action", "data"} & attributes.keys(), tag
        assert attributes.get("href", "data:,") == "data:,"
    policies = [each["content"] for tag, each in elements.tags if each.get("http-equiv") == "Content-Security-Policy"]
    assert policies and policies[0].startswith("default-src 'none';") and "http" not in policies[0]
    for name in ("page.css", "page.js", "page.html"):
        source = (ROOT / "jaxopt_llm/observe/report" / name).read_text()
        assert not re.search(r"https?:|//\w+\.|url\(|fetch\(|import\(|@import|XMLHttpRequest", source), name
    assert "displaylogo: false" in page.read_text("utf-8")  # Plotly's logo is a link to its makers


def make_hostile(folder: Path) -> Path:
    records = [{"step": step, "loss": 1.0, "eval_loss": 1.0, f"eval_loss/{HOSTILE}": 1.0} for step in (1, 2)]
    directory = write_run(folder / "<b>run", records, **{"data.paths": (HOSTILE,)})
    sample = {"step": 1, "prompt": HOSTILE, "answer": HOSTILE, "reference": HOSTILE, "set": HOSTILE}
    (directory / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    events = [{"time": 1e300, "step": 1, "event": event, "detail": HOSTILE} for event in ("fault", HOSTILE)]
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    who = {"fault": HOSTILE, "what": HOSTILE, "host": HOSTILE, "process": HOSTILE}
    (directory / "faults.jsonl").write_text(json.dumps({"time": 1e300, "checkpoint": 0, "reached": 1, **who}) + "\n")
    return directory


def test_texts_of_a_run_are_never_markup(tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    done = command("report", make_hostile(tmp_path), "--output", output)
    assert (done.returncode, done.stderr) == (0, "")
    elements = Elements(output)
    tags = [tag for tag, _ in elements.tags]
    assert tags.count("script") == 3 and "img" not in tags and "b" not in tags
    assert elements.text.count("</script><script>console.error('run')</script>") >= 6
    names = [trace["name"] for trace in read_figures(output)["eval-loss"]["data"]]
    assert len(names) == 1 and names[0].startswith("&lt;b&gt;run · &lt;/script&gt;")


def test_a_run_without_a_record_has_a_page(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "new")
    (directory / "metrics.jsonl").unlink()
    done = command("report", directory, "--output", tmp_path / "report.html")
    assert (done.returncode, done.stderr) == (0, "")
    assert "new has no record yet." in Elements(tmp_path / "report.html").text
    assert read_figures(tmp_path / "report.html") == {}


def test_what_is_wrong_is_said_in_a_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "other").mkdir()
    output = ("--output", tmp_path / "report.html")
    for arguments, *parts in (
        ((tmp_path / "other", *output), "other: not a run directory", "config.json"),
        ((tmp_path / "none", *output), "none: not a run directory"),
        ((tmp_path / "none", "--output", tmp_path / "no" / "report.html"), "--output", "does not exist"),
        ((run, "--output", tmp_path), "it is a directory; name a file"),
        ((run, "--output", run / "config.json"), "config.json: it exists and is not a report; name another file"),
        (output, "RUN_DIR"),
    ):
        done = command("report", *arguments)
        assert done.returncode == 2
        assert_one_line(done.stderr, *parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


def test_without_plotly_nothing_is_read(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['plotly'] = None; sys.argv = ['report', 'none']; import runpy; "
    script = hidden + "runpy.run_module('jaxopt_llm.report', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert_one_line(done.stderr, "report requires plotly", "pip install -e '.[report]'")


def test_the_help_does_not_import_jax() -> None:
    script = "import sys, jaxopt_llm.report; assert not {'jax', 'numpy', 'plotly'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0
    assert "RUN_DIR" in command("report", "--help").stdout


# --- In a browser

CLICKS = (
    "<script>for (const each of document.querySelectorAll('[data-axis=tokens], [data-log]')) each.click();</script>"
)


@needs_browser
def test_a_browser_draws_the_curves_of_both_runs(page: Path, tmp_path: Path) -> None:
    clicked = tmp_path / "clicked.html"
    clicked.write_text(page.read_text("utf-8").replace("</body>", f"{CLICKS}</body>"), "utf-8")
    for path, axis in ((page, "step"), (clicked, "tokens")):
        elements, console = open_page(path)
        assert console == []
        for name, figure in read_figures(page).items():
            drawn = elements.partition(f'id="plot-{name}"')[2].partition("</article>")[0]
            assert len(re.findall(r'class="[^"]*\btrace\b', drawn)) >= len(figure["data"]) == 2, name
            assert 'class="legendtext"' in drawn and ">low<" in drawn and ">high<" in drawn
            assert name == "memory" or f">{axis}<" in drawn.partition('class="xtitle"')[2][:400], name
        loss = elements.partition('id="plot-loss"')[2].partition("</article>")[0]
        strokes = re.findall(r'class="js-line"[^>]*stroke: (rgb\([^)]*\))', loss)
        first, second = (tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in figures.COLOURS[:2])
        assert {f"rgb{first}", f"rgb{second}"} == set(strokes)
        legend = loss.partition('class="legend"')[2]
        assert f"rgb{first}" in legend and f"rgb{second}" in legend


@needs_browser
def test_a_browser_runs_no_script_of_a_run_and_loads_nothing(tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    assert command("report", make_hostile(tmp_path), "--output", output).returncode == 0
    assert open_page(output)[1] == []
    # The console has a line for what a page would load or run.
    text = output.read_text("utf-8").replace("</body>", "<img src='http://example.org/x.png'></body>")
    output.write_text(text, "utf-8")
    (refused,) = open_page(output)[1]
    assert "http://example.org/x.png" in refused
