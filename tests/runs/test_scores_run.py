"""Runs with objectives over scores, by the command and its files."""

import json
from pathlib import Path
from typing import Any

import pytest
from chats import write_tokenizer
from commands import assert_one_line, command, metrics, tiny

TRAINED = ("--schedule.kind", "constant", "--optimizer.learning-rate", 0.02, "--data.label-field", "label")
CLASSES = ("--training.objective", "classify", "--model.scores", 3)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("bad", "fine", "good")
    rows = [{"text": f"{n} is {words[n % 3]}", "label": n % 3} for n in range(120)]
    return write_rows(tmp_path_factory.mktemp("data") / "texts.jsonl", rows)


def run(directory: Path, *options: object) -> list[object]:
    return ["train", *tiny(directory), *TRAINED, *options]


def test_a_run_learns_classes_from_files_and_from_prepared_ones(tmp_path: Path, texts: Path) -> None:
    steps = ("--training.steps", 24, "--evaluation.every", 12, "--checkpoint.every", 12, "--checkpoint.keep", 2)
    done = command(*run(tmp_path / "run", "--data.paths", texts, *CLASSES, *steps))
    assert done.returncode == 0, done.stderr
    records = metrics(tmp_path / "run")
    assert records[-1]["eval_accuracy"] > 0.9 and records[-1]["eval_loss"] < 0.5 < records[0]["loss"]
    assert 0 <= records[0]["accuracy"] < 0.8
    assert "evaluate --checkpoint" in done.stdout and "generate" not in done.stdout
    refused = command("generate", "--checkpoint", tmp_path / "run", "--prompt", "x")
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "this model gives documents scores, and predicts no tokens")

    found = command("evaluate", "--checkpoint", tmp_path / "run")
    assert found.returncode == 0, found.stderr
    share, loss = records[-1]["eval_accuracy"], records[-1]["eval_loss"]
    assert f"{share:.1%} of " in found.stdout and f"the right class, loss {loss:.4f}" in found.stdout
    rows = [{"text": f"{n} is {word}"} for n, word in enumerate(("bad", "good", "fine"), 30)]
    output, new = tmp_path / "scores.jsonl", write_rows(tmp_path / "new.jsonl", rows)
    options = ("--data.paths", new, "--data.label-field", "", "--output", output)
    found = command("evaluate", "--checkpoint", tmp_path / "run", *options)
    assert found.returncode == 0, found.stderr
    scores = [json.loads(line)["scores"] for line in output.read_text().splitlines()]
    assert [max(range(3), key=each.__getitem__) for each in scores] == [0, 2, 1]

    prepared = command("prepare", "--input", texts, "--output", tmp_path / "prepared", "--label-field", "label")
    assert prepared.returncode == 0, prepared.stderr
    assert (tmp_path / "prepared" / "labels.bin").stat().st_size == 4 * 120
    verified = command("prepare", "--verify", tmp_path / "prepared")
    assert verified.returncode == 0, verified.stderr
    done = command(*run(tmp_path / "again", "--data.paths", tmp_path / "prepared", *CLASSES, *steps))
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "again") == records
    content = bytearray((tmp_path / "prepared" / "labels.bin").read_bytes())
    content[2] ^= 1
    (tmp_path / "prepared" / "labels.bin").write_bytes(content)
    damaged = command("prepare", "--verify", tmp_path / "prepared")
    assert damaged.returncode == 2
    assert_one_line(damaged.stderr, "of labels.bin, shard 0")


def test_names_of_classes_go_into_the_folder_and_come_from_it(tmp_path: Path, texts: Path) -> None:
    """The run of an exported folder has its names, in its order, also where they are not sorted."""
    words = ("good", "fine", "bad")
    named = [{**row, "label": words[2 - row["label"]]} for row in map(json.loads, texts.read_text().splitlines())]
    path, steps = write_rows(tmp_path / "named.jsonl", named), ("--training.steps", 1, "--evaluation.every", 0)
    ordered = ("--data.label-names", *words)
    refused = command(*run(tmp_path / "run", "--data.paths", path, *CLASSES[:2], "--model.scores", 2, *ordered, *steps))
    assert refused.returncode == 2
    assert_one_line(refused.stderr, "have 3 classes (good, fine, bad), and model.scores=2; set --model.scores 3")
    done = command(*run(tmp_path / "run", "--data.paths", path, *CLASSES, *ordered, *steps))
    assert done.returncode == 0, done.stderr
    done = command("convert", "export", "--checkpoint", tmp_path / "run", "--to", tmp_path / "folder")
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert written["id2label"] == dict(zip("012", words, strict=True))
    assert written["label2id"] == {"good": 0, "fine": 1, "bad": 2}
    documents = ("--data.paths", path, "--data.label-field", "label")
    for source in ("run", "folder"):
        done = command("evaluate", "--checkpoint", tmp_path / source, *documents)
        assert done.returncode == 0 and "have the right class" in done.stdout, done.stderr
        refused = command("evaluate", "--checkpoint", tmp_path / source, *documents, "--data.label-names", *words[::-1])
        assert refused.returncode == 2
        assert_one_line(refused.stderr, "the model has the classes good, fine, bad, in this order")
    begun = ("train", "--config", "finetune_full.py", "--run.directory", tmp_path / "again", "--data.paths", path)
    begun += ("--model.pretrained", tmp_path / "folder", "--data.content", "text", *CLASSES[:2], *steps)
    begun += ("--data.label-field", "label", "--training.sequence-length", 64, "--training.batch-size", 4)
    done = command(*begun, "--training.epochs", 0, "--training.accumulation", 1, "--evaluation.samples", 0)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "again" / "config.json").read_text())["data"]["label_names"] == list(words)


def test_margins_of_pairs_are_labels(tmp_path: Path) -> None:
    rows = [{"prompt": f"count to {n % 7}", "chosen": "1 2 3", "rejected": "no", "margin": 2.0} for n in range(60)]
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    options = ["--data.paths", write_rows(tmp_path / "pairs.jsonl", rows), "--data.content", "preference"]
    options += ["--data.tokenizer", tokenizer, "--model.vocabulary-size", 512, "--training.objective", "reward"]
    options += ["--model.scores", 1, "--training.sequence-length", 64, "--training.steps", 1, "--data.label-field"]
    done = command(*run(tmp_path / "a", *options, "margin", "--optimizer.learning-rate", 1e-9))
    assert done.returncode == 0, done.stderr
    (record,) = metrics(tmp_path / "a")
    assert record["loss"] == pytest.approx(2.127, abs=0.1)  # -log σ(-2): the scores are near 0
    assert {"rewards/accuracy", "eval_rewards/margin", "eval_rewards/chosen"} <= record.keys()


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "x"}, CLASSES, "line 5: without a label in column 'label'"),
        ({"text": "x", "label": "good"}, CLASSES, "line 5: with a label that is not a number in column 'label'"),
        ({"text": "x", "label": 3}, CLASSES, "document 4: the label 3 is not one of the classes 0 to 2"),
        ({"text": "x", "label": 0.5}, CLASSES, "document 4: the label 0.5 is not one of the classes 0 to 2"),
        ({"text": "x", "label": 1}, (*CLASSES, "--data.long-documents", "split"), "split would divide documents"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    row: dict[str, Any], options: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    rows = [{"text": f"words {n}", "label": n % 3} for n in range(40)]
    path = write_rows(tmp_path / "rows.jsonl", [*rows[:4], row, *rows[4:]])
    done = command(*run(tmp_path / "run", "--data.paths", path, *options))
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert_one_line(done.stderr, message)


def test_data_without_labels_are_refused(tmp_path: Path, texts: Path) -> None:
    prepared = command("prepare", "--input", texts, "--output", tmp_path / "prepared")
    assert prepared.returncode == 0, prepared.stderr
    done = command(*run(tmp_path / "run", "--data.paths", tmp_path / "prepared", *CLASSES))
    assert done.returncode == 2
    assert_one_line(done.stderr, "prepared has no labels; prepare it with --label-field")
