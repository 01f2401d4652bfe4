"""Runs that learn from a teacher in answers that the model draws itself."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import jax
import numpy as np
import pytest
import reference
import toy
from commands import checkpoint, metrics
from test_rollouts import make_config, records, run

from jaxopt_llm.checkpoint.pretrained import resolve_pretrained
from jaxopt_llm.config import Config, ModelConfig, fields

TEACHER = replace(folders.CONFIG, pattern=("global",), layers=2, vocabulary_size=258)
STUDENT = replace(folders.CONFIG, layers=4)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder(tmp_path_factory.mktemp("teacher"), TEACHER)


def configure(folder: Path, teacher: Path, **settings: Any) -> Config:
    own = {"training.objective": "distill", "distillation.teacher": str(teacher), "rollouts.group_size": 1}
    config: Config = fields.replace_fields(make_config(folder), own | settings)
    if config.rollouts.share < 1:  # answers of several lengths, some of which are longer than those that are drawn
        rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
        answered = [{**row, "completion": "answers"[: 2 * n % 9 + 1]} for n, row in enumerate(rows)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answered))
    assert not config.problems()
    return config


def test_a_student_learns_in_its_own_answers_and_resumes_to_the_bit(tmp_path: Path, teacher: Path) -> None:
    """The checkpoint is between the two steps that train on the same answers."""
    settings: dict[str, Any] = {"rollouts.updates": 2, "evaluation.every": 3, "data.held_out": 0.3}
    whole = run(configure(tmp_path, teacher, **settings, **{"run.directory": str(tmp_path / "whole")}))
    parts = run(configure(tmp_path, teacher, **settings, **{"training.steps": 3}))
    run(configure(tmp_path, teacher, **settings))
    assert records(parts) == records(whole)
    assert [record["step"] for record in records(whole)] == [1, 1, 3, 3, 5, 5]
    jax.tree.map(np.testing.assert_array_equal, checkpoint(parts, 6), checkpoint(whole, 6))
    found, expected = ([{**each, "rollout_seconds": 0} for each in metrics(each)] for each in (parts, whole))
    assert found == expected
    for each in expected:  # the rewards are those of the functions, from which nothing is learned
        assert each["loss"] == each["divergence"] > 0 and "clipped" not in each and 0 <= each["rewards/mean"] <= 1
    assert expected[5]["eval_loss"] == expected[5]["eval_divergence"] > 0 and "eval_rewards/mean" in expected[5]


def test_a_share_of_the_answers_are_those_of_the_rows_and_a_resume_is_equal_to_the_bit(
    tmp_path: Path, teacher: Path
) -> None:
    """Of the first n prompts the model answers the whole part of 0.6 n, however the run is divided."""
    settings: dict[str, Any] = {"rollouts.share": 0.6, "rollouts.updates": 2, "rollouts.prompts": 3}
    settings["training.steps"] = 8
    whole = run(configure(tmp_path, teacher, **settings, **{"run.directory": str(tmp_path / "whole")}))
    parts = run(configure(tmp_path, teacher, **settings | {"training.steps": 3}))
    run(configure(tmp_path, teacher, **settings))
    found = records(whole)
    assert records(parts) == found and len(found) == 12
    jax.tree.map(np.testing.assert_array_equal, checkpoint(parts, 8), checkpoint(whole, 8))
    answers = [(record["row"], *record["answers"]) for record in found]
    drawn = [bool(answer["log_probabilities"]) for _, answer in answers]
    assert np.cumsum(drawn).tolist() == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6, 6, 7]
    for (row, answer), is_drawn in zip(answers, drawn, strict=True):
        if not is_drawn:
            ids = [*row["completion"].encode(), 257][:6]
            assert answer["tokens"] == ids and answer["ended"] == (ids[-1] == 257)
            assert answer["rewards"].keys() == {"evenness"}
    assert {len(answer["tokens"]) for (_, answer), is_drawn in zip(answers, drawn, strict=True) if not is_drawn} > {6}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollouts.group_size": 2}, "rollouts.share=0.5: a row has one answer: set --rollouts.group-size 1"),
        ({"training.objective": "grpo"}, "rollouts.share=0.5: .*grpo compares answers that the model draws: set it to"),
        ({"rollouts.share": 0.0}, "rollouts.share=0.0: must be at most 1 and above 0"),
    ],
)
def test_what_a_share_does_not_suit_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    own = {"training.objective": "distill", "distillation.teacher": "models/x", "rollouts.group_size": 1}
    config: Config = fields.replace_fields(make_config(tmp_path), own | {"rollouts.share": 0.5} | settings)
    assert any(re.match(message, problem) for problem in config.problems()), config.problems()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_loss_is_the_divergence_at_the_tokens_of_the_answers(tmp_path: Path, teacher: Path, share: float) -> None:
    student = folders.folder_with_tokenizer(tmp_path / "student", STUDENT)
    settings = {"rollouts.rewards": (), "training.steps": 1, "distillation.beta": 0.3, "rollouts.share": share}
    config = configure(tmp_path, teacher, **settings)
    given = {"model": ModelConfig(pretrained=str(student)), "data.tokenizer": "auto"}
    (record,) = metrics(run(resolve_pretrained(fields.replace_fields(config, given))))
    assert not {"rewards/mean", "entropy"} & record.keys()
    losses, drawn = list[float](), list[bool]()
    for each in records(tmp_path / "run"):
        (answer,) = each["answers"]
        drawn.append(bool(answer["log_probabilities"]))
        assert answer["rewards"] == {} and answer["advantage"] == 0
        tokens = np.array([each["prompt_tokens"] + answer["tokens"]])[:, :-1]
        where = np.ones_like(tokens), np.arange(tokens.size)[None]
        log_p, log_q = (
            log_softmax(reference.logits(folders.params(model), toy.reference_config(model), tokens, *where))
            for model in (STUDENT, TEACHER)
        )
        log_m = np.log(0.7 * np.exp(log_p) + 0.3 * np.exp(log_q))
        of_class = 0.3 * np.exp(log_q) * (log_q - log_m) + 0.7 * np.exp(log_p) * (log_p - log_m)
        losses += of_class.sum(axis=-1)[0, len(each["prompt_tokens"]) - 1 :].tolist()
    assert record["answers/length"] * 2 == len(losses) and drawn == ([True] * 2 if share == 1 else [False, True])
    assert record["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits[..., :258] - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
