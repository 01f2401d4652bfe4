"""Runs that end before their last step, and runs that evaluate nothing."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from commands import command, metrics, some_text, train
from test_loop import tiny

from jaxopt_llm import train as training
from jaxopt_llm.config import CheckpointConfig, Config, EvaluationConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.run.records import Patience
from jaxopt_llm.run.workload import DecoderWorkload

LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: 2.2, 12: 1.9}


def stopping(config: Config, steps: int, patience: int) -> Config:
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, steps=steps),
        checkpoint=CheckpointConfig(every=2, keep=1, keep_best=1),
        evaluation=EvaluationConfig(every=2, patience=patience, batches=1),
    )


def run(config: Config) -> None:
    with Preemption() as preemption:
        training.train(config, preemption)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(DecoderWorkload, "measure", lambda self, state: {"eval_loss": LOSSES[int(state.step)]})
    return tiny(tmp_path / "run")


@pytest.mark.parametrize("stops", [(12,), (4, 12), (6, 12)], ids=str)
def test_a_run_ends_when_its_held_out_loss_falls_no_more(
    stops: tuple[int, ...], config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses after steps 6 and 8 are not below that of step 4, also if the run was interrupted before."""
    for steps in stops:
        run(stopping(config, steps, patience=2))
    directory = Path(config.run.directory)
    assert [record["step"] for record in metrics(directory)] == [*range(1, 9)]
    reason = "no held-out loss in 2 evaluations is lower than that of step 4, 2.0000 (evaluation.patience=2)"
    said = capsys.readouterr().out
    assert f"step  8/12  the run ends: {reason}\n" in said
    assert "next, with the checkpoint of step 4, whose held-out loss is the lowest:" in said
    assert f"generate --checkpoint {directory} --step best --prompt TEXT" in said
    assert sorted(path.name for path in (directory / "checkpoints").glob("[0-9]*")) == ["4", "8"]
    (*_, last) = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    assert (last["step"], last["event"], last["detail"]) == (8, "end", reason)
    # The same command changes nothing. With more patience the run goes on, and ends later.
    run(stopping(config, 12, patience=2))
    assert f"{directory} has ended at step 8: {reason}; train longer with a larger evaluation.patience" in (
        capsys.readouterr().out
    )
    run(stopping(config, 12, patience=3))
    assert [record["step"] for record in metrics(directory)] == [*range(1, 11)]
    run(stopping(config, 12, patience=0))
    assert metrics(directory)[-1]["step"] == 12


def test_patience_counts_evaluations_since_the_lowest_loss() -> None:
    patience = Patience()
    assert not patience.describe_end(1)
    for step, loss in LOSSES.items():
        patience = patience.add(step, loss)
        assert Patience.from_record(json.loads(json.dumps(patience.to_record()))) == patience
        assert bool(patience.describe_end(2)) == (step in (8, 10)) and not patience.describe_end(0)
    assert patience == Patience(1.9, 12)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"checkpoint.keep_best": 0}, "set --checkpoint.keep-best 1"),
        ({"checkpoint.every": 3}, "make checkpoint.every=3 a multiple of evaluation.every=2"),
    ],
)
def test_early_stopping_that_cannot_be_is_named(settings: dict[str, Any], problem: str) -> None:
    config = stopping(Config(), 12, patience=2)
    assert not config.problems()
    assert any(problem in found for found in replace_fields(config, settings).problems())


def test_without_evaluations_every_document_is_trained_on(tmp_path: Path) -> None:
    run, text = tmp_path / "run", some_text(tmp_path / "a.jsonl")
    options = (*text, "--training.steps", 2, "--checkpoint.every", 1)
    done = train(run, *options, "--evaluation.every", 0)
    assert done.returncode == 0, done.stderr
    assert "held out" not in done.stdout and "compiled" in done.stdout
    assert f"evaluate --checkpoint {run} --data.paths FILE\n" in done.stdout
    assert not any("eval_loss" in record for record in metrics(run))
    refused = command("evaluate", "--checkpoint", run)
    assert refused.returncode == 2 and "with evaluation.every=0 it was trained on all its documents" in refused.stderr
    # To hold documents out from now on would change what the steps read.
    longer = (*options, "--training.steps", 3, "--evaluation.every", 1)
    refused = train(run, *longer)
    assert refused.returncode == 2
    assert "evaluation.every was 0 and is 1, which holds documents out" in refused.stderr
    assert "--run.allow-change evaluation.every" in refused.stderr
    done = train(run, *longer, "--run.allow-change", "evaluation.every")
    assert done.returncode == 0 and "eval_loss" in metrics(run)[-1], done.stderr


def test_what_only_evaluations_read_is_named_without_them(tmp_path: Path) -> None:
    given = ("--evaluation.every", 0, "--evaluation.patience", 3, "--evaluation.batches", 1)
    done = train(tmp_path / "run", *some_text(tmp_path / "a.jsonl"), "--training.steps", 1, *given)
    assert done.returncode == 0
    named = "evaluation.patience=3, evaluation.batches=1"
    assert done.stderr == f"warning: no effect: {named}, because evaluation.every=0\n"
