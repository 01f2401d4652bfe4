"""Tasks of the lm-evaluation-harness at the evaluations of a run, with a stand-in for the package."""

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess

import harness_standin
import pytest
from commands import assert_one_line, metrics, start_python, tiny

from jaxopt_llm import evaluate
from jaxopt_llm.observe.report import page, run_files
from jaxopt_llm.observe.report.figures import make_figures

TRAIN = f"""
import sys
sys.path.append({str(Path(harness_standin.__file__).parent)!r})
import harness_standin
sys.modules.update(harness_standin.make_modules())
from jaxopt_llm import train
from jaxopt_llm.core import errors
errors.run_command(train.main)
"""


def train(directory: Path, *options: object) -> CompletedProcess[str]:
    process = start_python("-c", TRAIN, *tiny(directory), *options)
    output = process.communicate(timeout=300)
    return CompletedProcess(process.args, process.returncode, *output)


def test_a_run_records_what_evaluate_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the average of the parameters, and on a mesh on which no text could be written."""
    run = tmp_path / "run"
    steps = ("--training.steps", 4, "--evaluation.every", 2, "--training.ema-decay", 0.5, "--optimizer.learning-rate")
    tasks = ("--evaluation.tasks", "measure", "write", "--evaluation.task-limit", 2)
    done = train(run, *steps, 0.01, "--mesh.pipeline", 2, "--training.accumulation", 2, *tasks)
    assert done.returncode == 0, done.stderr
    assert "measure/answers -" in done.stdout and not done.stderr
    found = {record["step"]: record.get("eval_tasks/measure/answers") for record in metrics(run)}
    assert found[1] is None is found[3] and found[2] != found[4]
    assert metrics(run)[-1]["eval_tasks/write/answers"] == 1
    harness_standin.install(monkeypatch)
    output = tmp_path / "results.json"
    arguments = ["evaluate", "--checkpoint", run, "--tasks", "measure", "--output", output]
    monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
    assert evaluate.main() == 0
    results = json.loads(output.read_text())["results"]
    assert results["measure"]["answers,none"] == pytest.approx(found[4], rel=1e-5)
    (read,) = run_files.read_runs([run])
    assert page.compare_task_results([read])["columns"] == [(0, "2"), (0, "4")]
    (plot,) = (each for each in make_figures([read]) if each["title"] == "Tasks")
    assert [curve["x"] for curve in plot["data"]] == [[2, 4], [2, 4]]


def test_a_wrong_task_is_refused_at_the_start(tmp_path: Path) -> None:
    refused = train(tmp_path / "run", "--evaluation.tasks", "chose")
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "evaluation.tasks=chose: there is no such task; did you mean choose?")
    assert not refused.stdout and not (tmp_path / "run").exists()
