"""Parts of a report: points of long curves, names and colours of runs, tables, and what damaged files leave."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_directories import write_run

from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.observe.report import figures, page, run_files
from jaxopt_llm.observe.report.run_files import Run

pytestmark = pytest.mark.core


def read(*directories: Path) -> list[Run]:
    return run_files.read_runs(directories)


def figure(runs: list[Run], name: str) -> dict[str, Any]:
    return next(each for each in figures.make_figures(runs) if each["id"] == name)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 5000])
def test_points_of_a_curve_keep_its_ends_and_every_peak(size: int) -> None:
    values = np.random.default_rng(0).normal(size=size)
    shown = figures.choose_points(values, 100)
    assert shown.size <= 100 and np.all(np.diff(shown) > 0)
    if size <= 100:
        assert shown.tolist() == list(range(size))
        return
    assert shown[0] == 0 and shown[-1] == size - 1
    for part in figures.split_evenly(size, 49):
        kept = values[shown[(shown >= part.start) & (shown < part.stop)]]
        assert kept.min() == values[part].min() and kept.max() == values[part].max()


def test_a_long_run_shows_means_and_extremes(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 1.0 + step % 2, "tokens": 10 * step} for step in range(1, 10_001)]
    records[6000]["loss"] = 50.0
    runs = read(write_run(tmp_path / "run", records))
    extremes, mean = figure(runs, "loss")["data"]
    assert len(extremes["x"]) <= figures.MAX_POINTS and max(extremes["y"]) == 50.0 and not extremes["showlegend"]
    assert extremes["x"][extremes["y"].index(50.0)] == 6001
    assert len(mean["x"]) < figures.MAX_POINTS and mean["y"][:3] == [1.5, 1.5, 1.5]
    assert figures.list_shortened(runs) == ["run"]
    assert figures.list_shortened(read(write_run(tmp_path / "short", records[:10]))) == []


def test_a_run_has_one_colour_in_all_figures(tmp_path: Path) -> None:
    record = {"step": 1, "loss": 2.0, "eval_loss": 2.0, "eval_loss/a": 1.0, "eval_loss/b": 3.0, "peak_bytes": 5}
    directories = [write_run(tmp_path / name, [record]) for name in ("first", "second")]
    for directory in directories:
        (directory / "events.jsonl").write_text('{"time": 1, "step": 1, "event": "end"}\n')
    runs = read(*directories)
    shown = figures.make_figures(runs)
    assert [each["id"] for each in shown] == ["loss", "eval-loss", "memory", "events"]
    for each in shown:
        colours: dict[str, set[str]] = {}
        for trace in each["data"]:
            run = trace["name"].partition(" · ")[0]
            colours.setdefault(run, set()).add((trace.get("line") or trace["marker"])["color"])
        assert colours == {"first": {figures.COLOURS[0]}, "second": {figures.COLOURS[1]}}, each["id"]
    held_out = figure(runs, "eval-loss")["data"]
    assert [trace["name"] for trace in held_out][:3] == ["first", "first · a", "first · b"]
    assert len({trace["line"]["dash"] for trace in held_out}) == 3
    assert len(set(figures.choose_colours(40))) == 40


def test_the_only_validation_set_is_shown_once(tmp_path: Path) -> None:
    runs = read(write_run(tmp_path / "run", [{"step": 1, "eval_loss": 2.0, "eval_loss/a": 2.0}]))
    assert [trace["name"] for trace in figure(runs, "eval-loss")["data"]] == ["run · a"]


def test_every_plot_is_of_a_number_of_the_records(tmp_path: Path) -> None:
    """The wait for data is computed from two of them; tasks have a curve for each metric."""
    fields = [plot.field for plot in figures.PLOTS if plot.field not in ("data_wait", "eval_tasks")]
    record = {"step": 1, "data_seconds": 0.1, "step_seconds": 0.5, "eval_tasks/a/acc": 0.5, **dict.fromkeys(fields, 2)}
    runs = read(write_run(tmp_path / "run", [record]))
    assert {plot.title for plot in figures.PLOTS} <= {each["title"] for each in figures.make_figures(runs)}
    assert not figures.list_missing(runs)
    assert [trace["name"] for trace in figure(runs, "eval-tasks")["data"]] == ["run · a/acc"]
    assert [trace["y"] for trace in figure(runs, "eval-divergence")["data"]] == [[2.0]]


def test_the_wait_for_data_is_a_share_of_the_step(tmp_path: Path) -> None:
    records = [{"step": 1, "step_seconds": 0.5, "data_seconds": 0.1}, {"step": 2, "step_seconds": 0.0}]
    (trace,) = figure(read(write_run(tmp_path / "run", records)), "data-wait")["data"]
    assert (trace["x"], trace["y"]) == ([1], [0.2])


def test_memory_by_kind_is_beside_the_measured_peak(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [{"step": step, "peak_bytes": step * 2**30} for step in (1, 3)])
    memory = {"kinds": {"parameters": 2**30, "new_kind": 2**29}, "peak": 3 * 2**29, "limit": None, "host": 0}
    (directory / "memory.json").write_text(json.dumps(memory))
    (trace,) = figure(read(directory), "memory")["data"]
    shown = dict(zip(trace["x"], trace["y"], strict=True))
    assert shown == {"parameters": 1.0, "new kind": 0.5, "planned peak": 1.5, "measured peak": 3.0}


def test_numbers_that_are_none_and_unknown_keys_are_left_out(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [{"step": 1, "loss": None, "expert_load": [1.0], "new": {}}])
    text = '{"step": 2, "loss": NaN}\n{"step": 3, "loss": 1e999}\n{"step": 4, "loss": 1' + "0" * 400 + "}\n"
    text += '{"step": 5, "loss": 3.5}\n{"step": "x"}\n[]\nnonsense\n{"step": 6, "loss": 9'
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(text)
    (run,) = runs = read(directory)
    (trace,) = figure(runs, "loss")["data"]
    assert (trace["x"], trace["y"]) == ([5], [3.5])
    assert run.steps.tolist() == [1, 2, 3, 4, 5] and set(run.curves) == {"loss"}
    assert len(run.notes) == 2 and "2 damaged lines" in run.notes[0] and "1 lines without a step" in run.notes[1]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "memory.json").write_text("[]")
    (directory / "events.jsonl").write_text('{"time": 1, "step": 0, "event": "start"}\n{}\n\xff\n{"event": 1}\n')
    (directory / "samples.jsonl").write_text('{"step": 1, "prompt": 3, "answer": ""}\n{"step": 1}\n')
    (run,) = read(directory)
    assert [event["event"] for event in run.events] == ["start"] and not run.samples and run.memory is None
    assert [note.split()[0].rstrip(":") for note in run.notes] == ["events.jsonl", "memory.json"]


def test_names_are_as_short_as_they_can_be() -> None:
    assert run_files.make_names([Path("/a/one"), Path("/a/two")]) == ["one", "two"]
    assert run_files.make_names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert run_files.make_names([Path("/run"), Path("/a/run")]) == ["run", "a/run"]


def test_a_directory_is_named_once(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    with pytest.raises(InputError, match="is named twice"):
        read(directory, tmp_path / "." / "run")


def test_only_settings_that_differ_are_listed(tmp_path: Path) -> None:
    changed = {"optimizer.learning_rate": 0.5, "data.paths": ("a", "b")}
    one, two = read(write_run(tmp_path / "one"), write_run(tmp_path / "two", **changed))
    headings, rows = page.compare_settings([one, two])
    rate = str(Config().optimizer.learning_rate)
    assert headings == ["one", "two"]
    assert dict(rows) == {"optimizer.learning_rate": [rate, "0.5"], "data.paths": ["[]", '["a", "b"]']}
    assert page.compare_settings([one]) == (["default", "one"], [])
    assert dict(page.compare_settings([two])[1]) == dict(rows)
    two.config["section_of_another_version"] = {"field": None}
    assert ("section_of_another_version.field", ["–", "null"]) in page.compare_settings([one, two])[1]


def test_the_state_of_a_run_is_its_last_event(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [{"step": 3, "loss": 1.0, "eval_loss": 2.0}, {"step": 4, "eval_loss": 3.0}])

    def summary(*events: str) -> dict[str, str]:
        lines = (json.dumps({"time": 1e9, "step": 4, "event": event}) + "\n" for event in events)
        (directory / "events.jsonl").write_text("".join(lines))
        return page.summarise(*read(directory))

    assert summary()["state"] == "–"
    assert summary("start", "checkpoint")["state"] == "running, or killed"
    assert summary("start", "stop", "resume", "fault", "checkpoint")["state"] == "fault"
    assert summary("start", "end")["state"] == "finished"
    assert summary()["best held-out loss"] == "2.0000 at step 3" and summary()["last loss"] == "1.0000"
    assert page.list_events(*read(directory)) == []


def test_answers_are_by_prompt_and_the_newest_first(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    samples = [{"step": step, "prompt": f"p{i}", "answer": f"{step} {i}"} for step in range(1, 101) for i in range(2)]
    (directory / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    first, second = page.list_samples(read(directory))
    answers = second["runs"][0]
    assert (first["prompt"], second["prompt"]) == ("p0", "p1") and answers[0] == ("100", "100 1")
    assert answers[1] == ("99", "99 1") and answers[-1] == ("1", "1 1") and len(answers) == 1 + page.MAX_EARLIER


def test_faults_are_marked_on_the_loss_and_listed_with_their_cost(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [{"step": step, "loss": 10.0 - step, "tokens": step} for step in (1, 3, 5)])
    fault = {"time": 1.0, "fault": "SIGKILL", "code": 137, "process": 1, "host": "node7", "what": "<b>", "restart": 1}
    entries = [
        fault | {"checkpoint": 0, "reached": 2},
        {"time": 40.0, "recovered_after": 39.04},
        fault | {"checkpoint": 2, "reached": 4, "fault": "exit code 5"},
        {"time": 80.0, "hosts": [0, 2], "flags": []},
        fault | {"checkpoint": "?"},
    ]
    (directory / "faults.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (run,) = read(directory)
    marks = figure([run], "loss")["data"][-1]
    assert (marks["name"], marks["x"], marks["y"]) == ("run · faults", [2, 4], [8, 6])
    assert marks["text"] == ["SIGKILL &lt;b&gt;", "exit code 5 &lt;b&gt;"]
    newest, oldest = page.list_faults(run)
    assert oldest | {"time": ""} == {
        "time": "",
        "step": "2",
        "fault": "SIGKILL",
        "process": "1 (node7)",
        "what": "<b>",
        "away": "39.0 s",
        "repeated": "2",
    }
    assert (newest["fault"], newest["away"], newest["repeated"]) == ("exit code 5", page.MISSING, "2")
    assert page.summarise(run)["faults"] == "2: away for 0.7 minutes, 4 steps repeated"
    assert "faults" not in page.summarise(read(write_run(tmp_path / "quiet", [{"step": 1, "loss": 1.0}]))[0])
