"""Runs with an objective over pairs, by the command and its files."""

import json
import math
from pathlib import Path

import pytest
from chats import write_tokenizer
from commands import assert_one_line, command, metrics, tiny

TRAINED = ("--lora.rank", 4, "--schedule.kind", "constant", "--training.sequence-length", 256)
TRAINED += ("--optimizer.learning-rate", 0.02, "--data.content", "preference", "--training.objective", "dpo")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Flags that name rows of pairs and a tokenizer with a template."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"prompt": f"count to {n % 7}", "chosen": " ".join(map(str, range(n % 7 + 1))), "rejected": "no"}
        for n in range(60)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = write_tokenizer(folder / "tokenizer")
    return ("--data.paths", folder / "pairs.jsonl", "--data.tokenizer", tokenizer, "--model.vocabulary-size", 512)


def run(directory: Path, *options: object) -> list[object]:
    return ["train", *tiny(directory), *TRAINED, *options]


def test_a_run_prefers_the_chosen_answers_and_resumes_to_the_bit(tmp_path: Path, data: tuple[object, ...]) -> None:
    steps = ("--training.steps", 6, "--evaluation.every", 3, "--checkpoint.every", 3, "--checkpoint.keep", 2)
    done = command(*run(tmp_path / "whole", *data, *steps))
    assert done.returncode == 0, done.stderr
    records = metrics(tmp_path / "whole")
    assert records[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert records[0]["rewards/margin"] == pytest.approx(0, abs=1e-6)
    assert "evaluate" not in done.stdout and "generate" in done.stdout
    assert records[-1]["eval_rewards/accuracy"] > 0.9 and records[-1]["eval_rewards/margin"] > 0.1
    assert records[-1]["rewards/margin"] > 0.1 and records[-1]["eval_loss"] < records[2]["eval_loss"] < math.log(2)

    for last in (3, 6):
        done = command(*run(tmp_path / "parts", *data, "--training.steps", last, *steps[2:]))
        assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "parts") == records

    refused = command("evaluate", "--checkpoint", tmp_path / "whole")
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "holds pairs of a chosen and a rejected answer, which have no loss per token")


def test_data_that_do_not_fit_the_objective_are_refused(tmp_path: Path, data: tuple[object, ...]) -> None:
    done = command(*run(tmp_path / "a", *data, "--training.objective", "next_token"))
    assert done.returncode == 2 and not (tmp_path / "a").exists()
    assert_one_line(done.stderr, "holds pairs of a chosen", "set --training.objective to one of dpo, ipo")
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "words {n}"}}\n' for n in range(40)))
    texts = ("--data.content", "text", "--data.paths", tmp_path / "text.jsonl")
    done = command(*run(tmp_path / "b", *data, *texts))
    assert done.returncode == 2 and not (tmp_path / "b").exists()
    assert_one_line(done.stderr, "training.objective=dpo compares", "set --data.content preference")
