"""The command jaxopt_llm.prepare: restarts, kills and bad input."""

import json
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from chats import MARKED, conversation, write_chats, write_tokenizer
from commands import command, start_python
from gates import finish, wait_until
from texts import train_tokenizer, write_jsonl, write_text

from jaxopt_llm.config import Config, DataConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.source import read_standard_library
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.prepared import find_prepared
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS
from jaxopt_llm.run.setup import open_documents

# The command with shards so small that a corpus of a few megabytes has many. It appends no more shards than its first
# argument says, and then waits to be killed.
SMALL_SHARDS = """
import sys, threading
from jaxopt_llm import prepare
from jaxopt_llm.core import errors
from jaxopt_llm.data.reading import source
from jaxopt_llm.data.tokens import prepared
most, shard_record_path, grow = int(sys.argv.pop(1)), prepared.shard_record_path, prepared.ShardMerger.merge_ready

def gated(directory, number):
    if number >= most:
        threading.Event().wait()
    return shard_record_path(directory, number)

def growing(collection):
    prepared.shard_record_path = gated
    grow(collection)

prepared.SHARD_BYTES = source.PART_BYTES = 2**17
prepared.ShardMerger.merge_ready = growing
errors.run_command(prepare.main)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two JSONL files of the standard library, 4 MB, and a tokenizer for it."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = [each.content.decode(errors="replace") for each in read_standard_library()][:300]
    write_jsonl(folder / "a.jsonl", documents[::2])
    write_jsonl(folder / "b.jsonl", ["", *documents[1::2]])
    train_tokenizer(folder / "tokenizer.json", documents[:30])
    return folder


def start(*arguments: object, most: int = 10**6) -> subprocess.Popen[str]:
    return start_python("-c", SMALL_SHARDS, most, *arguments)


def finished(folder: Path) -> int:
    """Return the number of shards that a restarted command would not write again."""
    record = folder / "shards.jsonl"
    return record.read_bytes().count(b"\n") if record.exists() else 0


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def arguments(corpus: Path, output: Path, workers: int) -> list[object]:
    given = ["--input", corpus / "*.jsonl", "--tokenizer", corpus / "tokenizer.json"]
    return [*given, "--output", output, "--workers", workers]


@pytest.mark.slow
def test_a_killed_preparation_continues_and_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    stdout, stderr = finish(start(*arguments(corpus, tmp_path / "whole", 1)))
    assert stderr == ""
    assert not list((tmp_path / "whole").glob("shard-*"))
    shards = finished(tmp_path / "whole")
    assert shards > 20
    assert "300 documents" in stdout and "skipped: 1 empty" in stdout
    chance = random.Random(0)
    kept = 0
    for kill in range(3):
        process = start(*arguments(corpus, tmp_path / "killed", 2), most=kept + shards // 4)
        wait_until(lambda kept=kept: finished(tmp_path / "killed") > kept, process)
        time.sleep(chance.uniform(0, 0.1))
        process.kill()
        finish(process, -signal.SIGKILL)  # ends when the workers, which also hold the pipe, have ended
        assert not (tmp_path / "killed" / "manifest.json").exists(), f"kill {kill}"
        assert kept < finished(tmp_path / "killed") < shards, f"kill {kill}"
        kept = finished(tmp_path / "killed")
    last, _ = finish(start(*arguments(corpus, tmp_path / "killed", 2)))
    assert last == stdout.replace("whole", "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    again, _ = finish(start(*arguments(corpus, tmp_path / "killed", 2)))
    assert "already finished" in again


@pytest.mark.parametrize("conversations", [False, True])
def test_bytes_without_a_record_are_truncated(conversations: bool, tmp_path: Path) -> None:
    """A kill between the append and the record, or during either, leaves such files."""
    arrays = prepared.describe_arrays(DataConfig(content="chat" if conversations else "text"), "<u2")
    record = {"documents": 1, "tokens": 1, "tokens_sha256": "", "skipped": {}}
    for shard in range(3):
        for name, dtype in (("tokens", "<u2"), ("ends", "<i8"), ("keys", "<u8"), ("mask", "?"))[: 3 + conversations]:
            np.array([1 if name == "ends" else shard], dtype).tofile(tmp_path / f"shard-{shard:05}.{name}")
        prepared.write_json(tmp_path / f"shard-{shard:05}.json", record)
    left = contents(tmp_path)
    for _ in range(2):
        prepared.ShardMerger(tmp_path, arrays).merge_ready()
        whole = contents(tmp_path)
        assert np.fromfile(tmp_path / "ends.bin", "<i8").tolist() == [1, 2, 3]
        masks = {"mask.bin"} if conversations else set()
        assert set(whole) == {"tokens.bin", "ends.bin", "keys.bin", "shards.jsonl", *masks}
        for name in ("tokens.bin", "ends.bin", "shards.jsonl", *masks):  # the third shard was being appended
            (tmp_path / name).write_bytes(whole[name] + b"xyz")
        for name in left:
            (tmp_path / name).write_bytes(left[name])
    for name in left:
        (tmp_path / name).unlink()
    assert len(prepared.ShardMerger(tmp_path, arrays).shards) == 3
    assert contents(tmp_path) == whole
    (tmp_path / "keys.bin").write_bytes(whole["keys.bin"][:-1])
    with pytest.raises(InputError, match="keys.bin is truncated: it has 23 bytes of 24"):
        prepared.ShardMerger(tmp_path, arrays)


def test_verification_names_the_damage(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    finish(start("--input", corpus / "a.jsonl", "--output", out))
    whole = command("prepare", "--verify", out)
    assert (whole.returncode, whole.stderr) == (0, "") and "is intact: " in whole.stdout
    shard = finished(out) // 2
    sizes = [json.loads(line) for line in (out / "shards.jsonl").read_text().splitlines()]
    tokens, documents = (sum(each[name] for each in sizes[:shard]) for name in ("tokens", "documents"))
    for name, byte in (("tokens", 2 * tokens), ("ends", 8 * documents), ("keys", 8 * documents + 5)):
        content = (out / f"{name}.bin").read_bytes()
        changed = bytearray(content)
        changed[byte] ^= 1
        (out / f"{name}.bin").write_bytes(changed)
        with pytest.raises(InputError, match=rf"{out} is damaged: [^;]* {name}.bin[^;]*, shard {shard};"):
            prepared.verify_corpus(out, workers=2)
        (out / f"{name}.bin").write_bytes(content)
    record = (out / "shards.jsonl").read_bytes()
    (out / "shards.jsonl").write_bytes(record.replace(b"0", b"1", 1))
    refused = command("prepare", "--verify", out)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "shards.jsonl is damaged" in refused.stderr
    (out / "shards.jsonl").unlink()
    before = contents(out)
    again = start("--input", corpus / "a.jsonl", "--output", out)  # must not start again from the beginning
    assert "shards.jsonl is damaged" in finish(again, 2)[1]
    assert contents(out) == before


def test_another_preparation_is_not_overwritten(corpus: Path, tmp_path: Path) -> None:
    first = command("prepare", "--input", corpus / "a.jsonl", "--output", tmp_path / "out", "--workers", 1)
    assert (first.returncode, first.stderr) == (0, "")
    before = contents(tmp_path / "out")
    tokenizer = ("--tokenizer", corpus / "tokenizer.json")
    for given, message in (
        (("--input", corpus / "b.jsonl"), "files"),
        (("--input", corpus / "a.jsonl", *tokenizer), "tokenizer"),
        (("--input", corpus / "a.jsonl", "--malformed", "skip"), "malformed"),
    ):
        other = command("prepare", *given, "--output", tmp_path / "out")
        assert other.returncode == 2 and other.stderr.count("\n") == 1, other.stderr
        assert "another prepared corpus" in other.stderr and message in other.stderr
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("repaired", [True, False])
def test_a_failed_preparation_starts_over_after_the_repair(repaired: bool, tmp_path: Path) -> None:
    path, out = write_jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "out"
    good = path.read_text()
    path.write_text(good + '{"text": "cut\n')
    same = ("prepare", "--input", path, "--output", out, "--workers", 1)
    assert "line 3: not valid JSON" in command(*same).stderr
    (out / "tokens.bin").write_bytes(b"one")  # as if a shard before the bad row had been appended
    left = {each.name: each.read_bytes() for each in out.iterdir()}

    # Another command and a file of somebody else are still refused, and nothing is deleted.
    other = command(*same, "--separator", "x")
    assert other.returncode == 2 and "another prepared corpus, which differs in separator" in other.stderr
    path.write_text(good + '{"text": "three"}\n')
    (out / "thesis.txt").write_text("kept")
    refused = command(*same)
    assert (
        refused.returncode == 2
        and "another prepared corpus, which differs in the content of the files" in refused.stderr
    )
    (out / "thesis.txt").unlink()
    assert {each.name: each.read_bytes() for each in out.iterdir()} == left

    if not repaired:
        path.write_text(good + '{"text": "cut\n')
    done = command(*same, *(() if repaired else ("--malformed", "skip")))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{out}: the input or an option has changed: starting over" in done.stdout
    assert f"\n{2 + repaired} documents" in done.stdout
    assert command("prepare", "--verify", out).returncode == 0
    path.write_text(good)  # a finished corpus is not replaced
    assert "another prepared corpus" in command(*same).stderr


def test_a_start_without_documents_is_replaced_by_one_with_other_options(tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_text('{"body": "one"}\n')
    same = ("prepare", "--input", path, "--output", out, "--workers", 1)
    assert "name the text column with --text-field" in command(*same).stderr
    (out / "thesis.txt").write_text("kept")
    refused = command(*same, "--text-field", "body")
    assert refused.returncode == 2 and "which differs in text_field" in refused.stderr
    (out / "thesis.txt").unlink()
    done = command(*same, "--text-field", "body")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{out}: the input or an option has changed: starting over" in done.stdout and "\n1 documents" in done.stdout
    assert command("prepare", "--verify", out).returncode == 0


def test_a_finished_corpus_of_other_sizes_is_refused(tmp_path: Path) -> None:
    path, out = write_jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "out"
    same = ("prepare", "--input", path, "--output", out, "--workers", 1)
    assert command(*same).returncode == 0
    (out / "keys.bin").write_bytes(b"")
    refused = command(*same)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "keys.bin is truncated or belongs to another corpus: it has 0 bytes of 16; remove" in refused.stderr


def test_skipped_rows_are_printed_by_reason_with_an_example(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    path.write_text(path.read_text() + '{"text": "cut\n{"text": 1}\n')
    (tmp_path / "b.csv").write_text("text\nthree\n")
    files = ("--input", path, tmp_path / "b.csv")
    refused = command("prepare", *files, "--output", tmp_path / "none")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith(f"error: {path}, line 3: not valid JSON (")
    for _ in range(2):  # the second command finds the corpus finished
        done = command("prepare", *files, "--output", tmp_path / "out", "--malformed", "skip", "--workers", 1)
        assert (done.returncode, done.stderr) == (0, "") and "\n3 documents" in "\n" + done.stdout
        unreadable = f"1 not valid JSON (first: {path}, line 3)"
        assert f"skipped: {unreadable}; 1 without text in column 'text' (first: {path}, line 4)\n" in done.stdout


def test_hints_name_the_flags_of_this_command(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "a.jsonl", ["one"])
    cut = tmp_path / "cut.jsonl"
    cut.write_text('{"text": "cut\n')
    column = tmp_path / "column.jsonl"
    column.write_text('{"body": "one"}\n')
    text = write_text(tmp_path / "a", ["one"])
    hints: tuple[tuple[tuple[object, ...], str], ...] = (
        (("--input", cut), "or set --malformed to skip or replace"),
        (("--input", column), "name the text column with --text-field"),
        (("--input", text, "--content", "chat", "--chat-template", __file__), "or set --content text"),
        (("--input", rows, "--content", "chat"), "--tokenizer bytes has no chat template: give --tokenizer FOLDER, "),
        (("--input", rows, "--content", "chat"), "or name a template file with --chat-template"),
        (("--input", rows, "--tokenizer", tmp_path), f"--tokenizer {tmp_path}: not a readable tokenizer.json"),
        (("--input", rows, "--bos", "x"), "--bos and --eos do not apply to --tokenizer bytes"),
    )
    for number, (given, hint) in enumerate(hints):
        refused = command("prepare", *given, "--output", tmp_path / f"out{number}")
        assert refused.returncode == 2 and hint in refused.stderr and "data." not in refused.stderr, refused.stderr


def test_bad_input_of_the_command(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("kept")
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    empty = write_text(tmp_path / "empty", [""])
    ok, out = ("--input", corpus / "a.jsonl"), ("--output", tmp_path / "out")
    for given, message in (
        ((*ok, "--output", tmp_path / "full"), "not empty"),
        (("--input", corpus / "*.parquet", *out), f"error: --input {corpus / '*.parquet'}: no such file"),
        (("--input", tmp_path / "bad.txt", *out), "bad.txt: not UTF-8"),
        (("--input", empty, "--output", tmp_path / "nothing"), "no tokens to train on"),
        ((*ok, *out, "--tokenizer", tmp_path / "none.json"), f"(there is no file {tmp_path / 'none.json'})"),
        ((*ok, *out, "--workers", 0), "--workers 0"),
        (out, "--input"),
        ((*ok, *out, "--verify", tmp_path), "--verify"),
        (("--verify", tmp_path / "full"), "not finished"),
        (("--input", corpus / "*.jsonl", corpus / "a.jsonl", *out), "a.jsonl, so its documents would occur twice"),
    ):
        refused = command("prepare", *given)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, (given, refused.stderr)
        assert refused.stderr.startswith("error: ") and message in refused.stderr
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_conversations_of_different_templates_are_not_one_corpus(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    write_chats(tmp_path / "a.jsonl", [conversation(number) for number in range(3)])
    (tmp_path / "a.txt").write_text("One document.")
    (tmp_path / "marked.jinja").write_text(MARKED)
    given = ("--tokenizer", folder, "--workers", 1, "--output")
    chat = ("--input", tmp_path / "a.jsonl", "--content", "chat", *given)
    marked = (tmp_path / "marked", "--chat-template", tmp_path / "marked.jinja")
    text = ("--input", tmp_path / "a.txt", *given, tmp_path / "text")
    for options in ((*chat, tmp_path / "own"), (*chat, *marked), text):
        done = command("prepare", *options)
        assert (done.returncode, done.stderr) == (0, "")

    def start(*names: str) -> str | None:
        paths = tuple(str(tmp_path / name) for name in names)
        settings: dict[str, object] = {"data.paths": paths, "data.tokenizer": str(folder)}
        settings |= {"model.vocabulary_size": 512, "evaluation.every": 0}
        documents = open_documents(replace_fields(Config(), settings), SINGLE_PROCESS)
        return prepared.read_template(find_prepared(documents.corpus.files))

    assert start("own", "text") is None and start("marked", "text") == MARKED
    both = f"data.paths: {tmp_path}/marked and {tmp_path}/own were prepared with different chat templates; prepare them"
    with pytest.raises(InputError, match=re.escape(both)):
        start("own", "marked")


def test_columns_of_conversations_and_fields_that_are_not_read(tmp_path: Path) -> None:
    """A wrong name of a column ends the command, and the same command with the right name starts over."""
    folder, out = write_tokenizer(tmp_path / "tokenizer"), tmp_path / "out"
    tool = {"type": "function", "function": {"name": "f"}}
    row = {"id": 1, "dialog": conversation(1), "kit": [tool], "images": ["a.png"]}
    rows = [row, {"id": 2, "dialog": conversation(2)}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    same = ("prepare", "--input", tmp_path / "a.jsonl", "--content", "chat", "--tokenizer", folder, "--workers", 1)
    output = ("--output", out)
    for columns, problem in (
        ((), "match no form of conversations; name the columns of a form with --columns FIELD=COLUMN"),
        (("messages=dialog",), "line 1: with the field images, which is not text (--columns images= leaves it unread)"),
        (
            ("messages=dialog", "images=", "tools=tool"),
            "no row has the column 'tool'; the columns are dialog, id, images, kit",
        ),
    ):
        refused = command(*same, *output, *(("--columns", *columns) if columns else ()))
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and problem in refused.stderr
    right = ("--columns", "messages=dialog", "images=", "tools=kit")
    done = command(*same, *output, *right)
    assert (done.returncode, done.stderr) == (0, "")
    assert "starting over\n" in done.stdout and "\n2 documents, " in done.stdout
    unread = "fields not read: id (2 rows), images (1 row)\n"
    assert unread in done.stdout
    shown = command(*same, *right, "--preview", 2)
    assert (shown.returncode, shown.stderr) == (0, "") and shown.stdout.endswith(unread)
    assert command(*same, *output, *right[:-1]).returncode == 2  # a finished corpus is not replaced
