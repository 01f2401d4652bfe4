"""Runs with an objective over pairs, by the command and its files."""

import json
import math
from dataclasses import replace
from pathlib import Path

import folders
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


def test_a_function_with_another_source_continues_no_run(tmp_path: Path, data: tuple[object, ...]) -> None:
    file = tmp_path / "losses.py"
    file.write_text("BETA = 1.0\ndef lose(chosen, rejected):\n    return -BETA * chosen.gain, {}\n")
    given = run(tmp_path / "run", *data, "--preference.function", f"{file}:lose", "--training.steps")
    assert command(*given, 1).returncode == 0
    file.write_text(file.read_text().replace("1.0", "2.0"))
    refused = command(*given, 2)
    assert refused.returncode == 2
    assert_one_line(
        refused.stderr, f"preference.function names {file}:lose, whose source differs", "--run.allow-change"
    )
    refused = command(*run(tmp_path / "run", *data, "--training.steps", 2))
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "preference.function names no function, whose source differs")


def test_a_run_learns_from_judged_answers(tmp_path: Path, data: tuple[object, ...]) -> None:
    """Also from pairs, of which each gives two; the held-out ones are measured in the same way."""
    judged = ("--training.objective", "kto", "--data.content", "unpaired", "--training.steps", 6)
    done = command(*run(tmp_path / "run", *data, *judged, "--evaluation.every", 3))
    assert done.returncode == 0, done.stderr
    assert "evaluate" not in done.stdout and "generate" in done.stdout
    records = metrics(tmp_path / "run")
    assert records[0]["loss"] == pytest.approx(0.5, abs=1e-6) and records[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert records[-1]["eval_rewards/margin"] > 0.1 and records[-1]["eval_loss"] < records[2]["eval_loss"] < 0.5
    assert records[-1]["eval_kl"] >= 0 and records[-1]["rewards/chosen"] > records[-1]["rewards/rejected"]
    refused = command("evaluate", "--checkpoint", tmp_path / "run")
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "holds answers that are judged one by one, which have no loss per token")


def test_data_that_do_not_fit_the_objective_are_refused(tmp_path: Path, data: tuple[object, ...]) -> None:
    done = command(*run(tmp_path / "a", *data, "--training.objective", "next_token"))
    assert done.returncode == 2 and not (tmp_path / "a").exists()
    assert_one_line(done.stderr, "holds pairs of a chosen", "set --training.objective to one of dpo, ipo")
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "words {n}"}}\n' for n in range(40)))
    texts = ("--data.content", "text", "--data.paths", tmp_path / "text.jsonl")
    done = command(*run(tmp_path / "b", *data, *texts))
    assert done.returncode == 2 and not (tmp_path / "b").exists()
    assert_one_line(done.stderr, "training.objective=dpo compares", "set --data.content preference")
    done = command(*run(tmp_path / "c", *data, "--training.objective", "kto"))
    assert done.returncode == 2 and not (tmp_path / "c").exists()
    held = "holds pairs of a chosen and a rejected answer"
    assert_one_line(done.stderr, "training.objective=kto reads answers that are judged", held, "content unpaired")


@pytest.mark.slow
def test_all_weights_are_compared_with_log_probabilities_of_the_corpus(
    tmp_path: Path, data: tuple[object, ...]
) -> None:
    """The reference is the model that the run starts from, so the first loss is exactly log 2."""
    tokenizer, rows = data[3], data[1]
    model = write_tokenizer(folders.folder(tmp_path / "model", replace(folders.CONFIG, vocabulary_size=512)))
    prepared = tmp_path / "prepared"
    given = ("--input", rows, "--content", "preference", "--output", prepared, "--workers", 1)
    done = command("prepare", *given, "--tokenizer", model, "--reference", model)
    assert (done.returncode, done.stderr) == (0, "")
    again = command("prepare", *given, "--tokenizer", model, "--reference", model)
    assert again.returncode == 0 and "already finished" in again.stdout
    assert (
        "another prepared corpus, which differs in reference" in command("prepare", *given, "--tokenizer", model).stderr
    )
    missing = command("prepare", *given, "--tokenizer", tokenizer, "--reference", tmp_path / "nothing")
    assert missing.returncode == 2
    assert_one_line(missing.stderr, f"--reference {tmp_path / 'nothing'}")

    flags = ["train", "--config", "dpo.py", "--run.directory", tmp_path / "run", "--model.pretrained", model]
    flags += ["--data.paths", prepared, "--lora.rank", 0, "--optimizer.learning-rate", 0.003]
    flags += ["--precision.compute-dtype", "float32", "--training.sequence-length", 256, "--training.batch-size", 4]
    flags += ["--training.accumulation", 1, "--schedule.warmup-steps", 0, "--evaluation.every", 3]
    flags += ["--evaluation.samples", 0, "--logging.every", 1, "--checkpoint.every", 3]
    done = command(*flags, "--training.steps", 3)
    assert done.returncode == 0, done.stderr
    assert f"reference: log-probabilities by {model} in the corpus" in done.stdout
    records = metrics(tmp_path / "run")
    assert records[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert records[0]["rewards/chosen"] == pytest.approx(0, abs=2e-5)
    assert records[0]["rewards/rejected"] == pytest.approx(0, abs=2e-5)
    assert records[2]["eval_rewards/margin"] > 0.05 and records[2]["eval_loss"] < 0.68
    reference = json.loads((tmp_path / "run" / "corpus.json").read_text())["reference"]
    assert reference["model"] == str(model)

    manifest = json.loads((prepared / "manifest.json").read_text())
    assert manifest["plan"]["reference"]["model_sha256"] == reference["sha256"]
    manifest["plan"]["reference"]["model_sha256"] = "0" * 64
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    refused = command(*flags, "--training.steps", 6)
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "was trained on another version of the corpus")
