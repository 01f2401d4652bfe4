"""Conversations in the commands: preview, preparation, training, evaluation and bad input."""

import json
from pathlib import Path

import pytest
from chats import CHATML, CONVERSATION, MARKED, conversation, write_chats, write_tokenizer
from commands import command, metrics, start, train
from texts import write_jsonl

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens import prepared

STEPS = ("--training.steps", 12, "--evaluation.every", 6, "--data.held-out", 0.2, "--optimizer.learning-rate", 1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write conversations, and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder / "tokenizer", MARKED)
    write_chats(folder / "a.jsonl", [conversation(number) for number in range(40)])
    return folder


def data(folder: Path, path: object = "a.jsonl", **settings: object) -> list[object]:
    given = {"paths": folder / str(path), "content": "chat", "tokenizer": folder / "tokenizer", **settings}
    return [
        "--model.vocabulary-size",
        512,
        *(part for key, value in given.items() for part in (f"--data.{key}", value)),
    ]


@pytest.fixture(scope="module")
def run(folder: Path) -> tuple[Path, str]:
    done = train(folder / "run", *STEPS, *data(folder), "--training.sequence-length", 64)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "run", done.stdout


def test_training_on_conversations_prints_a_packing_summary(run: tuple[Path, str]) -> None:
    directory, output = run
    losses = [record["eval_loss"] for record in metrics(directory) if "eval_loss" in record]
    assert losses[1] < losses[0] - 0.5
    assert "a.jsonl: " in output and "rows of whole documents" in output and "the held-out split: " in output


@pytest.mark.slow
def test_a_prepared_corpus_gives_the_same_run(folder: Path, run: tuple[Path, str], tmp_path: Path) -> None:
    given = ("--input", folder / "a.jsonl", "--content", "chat", "--tokenizer", folder / "tokenizer")
    made = command("prepare", *given, "--output", tmp_path / "prepared")
    assert (made.returncode, made.stderr) == (0, "") and "40 documents" in made.stdout
    # It needs no template, and records what it contains.
    settings = data(folder, tmp_path / "prepared", content="text")
    done = train(tmp_path / "run", *STEPS, *settings, "--training.sequence-length", 64)
    assert (done.returncode, done.stderr) == (0, "")
    assert metrics(tmp_path / "run") == metrics(run[0])
    for other in (("--content", "text"), ("--content", "messages"), ("--chat-template", folder / "own.jinja")):
        (folder / "own.jinja").write_text(CHATML)
        write_jsonl(tmp_path / "texts.jsonl", ["x"])
        again = command("prepare", *given, *other, "--output", tmp_path / "prepared")
        assert again.returncode == 2 and "another prepared corpus, which differs in" in again.stderr, again.stderr
    assert "the chat template, with its variables and its date" in again.stderr
    assert prepared.verify_corpus(tmp_path / "prepared", 1)[0] == 1
    mask = tmp_path / "prepared" / "mask.bin"
    content = bytearray(mask.read_bytes())
    content[5] ^= 1
    mask.write_bytes(content)
    with pytest.raises(InputError, match=r"of mask.bin, shard 0"):
        prepared.verify_corpus(tmp_path / "prepared", 1)
    mask.write_bytes(content[:-1])
    with pytest.raises(InputError, match="mask.bin is truncated"):
        prepared.verify_corpus(tmp_path / "prepared", 1)


def test_evaluation_counts_only_the_assistants_tokens(folder: Path, run: tuple[Path, str], tmp_path: Path) -> None:
    path = write_chats(tmp_path / "one.jsonl", [CONVERSATION])
    done = command("evaluate", "--checkpoint", run[0], "--data.paths", path, "--training.sequence-length", 128)
    assert done.returncode == 0 and ": 1 row of whole documents, " in done.stderr  # also says how many are cut
    shown = command("prepare", *preview(folder, path, 1))
    learnt = int(shown.stdout.splitlines()[0].split()[-2])
    assert done.stdout.rstrip().endswith(f" {learnt} tokens")


def preview(folder: Path, path: Path, count: int) -> list[object]:
    return ["--input", path, "--content", "chat", "--tokenizer", folder / "tokenizer", "--preview", count]


def test_a_preview_marks_the_assistants_tokens(folder: Path, tmp_path: Path) -> None:
    steering = [{"role": "user", "content": "a\x1b[2Jb"}, {"role": "assistant", "content": "[red]c[/red]"}]
    path = write_chats(tmp_path / "a.jsonl", [steering, conversation(3), conversation(4)])
    plain = command("prepare", *preview(folder, path, 2))
    assert (plain.returncode, plain.stderr) == (0, "")
    first, second = plain.stdout.split(f"--- {path}, line ")[1:]
    assert "\n<|im_start|>user\na\\x1b[2Jb<|im_end|>\n<|im_start|>assistant\n⟦[red]c[/red]<|im_end|>⟧\n" in first
    assert "⟦1 2 3 done<|im_end|>⟧\n<|im_start|>user\nAnd which was 3?" in second
    process = start("prepare", *preview(folder, path, 1), FORCE_COLOR="1", TERM="xterm")
    coloured, stderr = process.communicate(timeout=300)
    assert (process.returncode, stderr) == (0, "")
    assert "\x1b[1;32m[red]c[/red]<|im_end|>\x1b[0m" in coloured and "⟦" not in coloured and "a\\x1b[2Jb" in coloured


def test_long_conversations_are_dropped_and_counted(folder: Path, tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "1 2 " * 100}]
    path = write_chats(tmp_path / "a.jsonl", [long, *(conversation(number) for number in range(40))])
    settings = (*data(folder, path, **{"long-documents": "drop"}), "--training.sequence-length", 64)
    done = train(tmp_path / "run", *STEPS, *settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("documents are longer than a row and dropped") == 1


def test_bad_input(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "escape.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    write_chats(tmp_path / "user.jsonl", [CONVERSATION[:2]] * 9)
    (tmp_path / "mixed.jsonl").write_text(
        json.dumps({"prompt": "a", "completion": "b"}) + "\n" + json.dumps({"messages": conversation(1)}) + "\n"
    )
    for settings, message in (
        (data(folder, **{"chat-template": tmp_path / "escape.jinja"}), "it accesses '__class__' of a str"),
        (data(folder, tmp_path / "user.jsonl"), "without an assistant message"),
        (data(folder, tmp_path / "mixed.jsonl"), "without the fields of the form pairs"),
        (data(folder, tokenizer="bytes"), "has no chat template"),
        (data(folder, content="text", date="2026-01-31"), "data.content=chat"),
    ):
        refused = train(tmp_path / "run", *STEPS, *settings)
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1 and message in refused.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    given = preview(folder, folder / "a.jsonl", 1)
    for arguments, message in (
        ([*given, "--output", tmp_path / "out"], "either --output DIR or --preview N"),
        ([*given[:-1], 0], "--preview 0"),
        ([*given[:2], *given[4:]], "a --content of conversations"),
    ):
        refused = command("prepare", *arguments)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and message in refused.stderr, refused.stderr
    assert not (tmp_path / "out").exists()
