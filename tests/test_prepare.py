"""`jaxopt_llm.prepare` through the real command: restarted, killed, refused."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from commands import command, start_python
from gates import finish, wait_until
from texts import train_tokenizer, write_jsonl, write_text

from jaxopt_llm.data import prepared
from jaxopt_llm.data.source import standard_library
from jaxopt_llm.errors import InputError

# The command with shards small enough for a corpus of a few megabytes to have many. It takes in no more of them than
# its first argument says, and then waits to be killed.
SMALL_SHARDS = """
import sys, threading
from jaxopt_llm import errors, prepare
from jaxopt_llm.data import prepared, source
most, shard_record, grow = int(sys.argv.pop(1)), prepared.shard_record, prepared.Collection.grow

def gated(directory, number):
    if number >= most:
        threading.Event().wait()
    return shard_record(directory, number)

def growing(collection):
    prepared.shard_record = gated
    grow(collection)

prepared.SHARD_BYTES = source.PART_BYTES = 2**17
prepared.Collection.grow = growing
errors.run(prepare.main)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two JSONL files of the standard library, 4 MB, and a tokenizer of it."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = [each.content.decode(errors="replace") for each in standard_library()][:300]
    write_jsonl(folder / "a.jsonl", documents[::2])
    write_jsonl(folder / "b.jsonl", ["", *documents[1::2]])
    train_tokenizer(folder / "tokenizer.json", documents[:30])
    return folder


def start(*arguments: object, most: int = 10**6) -> subprocess.Popen[str]:
    return start_python("-c", SMALL_SHARDS, most, *arguments)


def finished(folder: Path) -> int:
    """Shards that a killed command would not make again."""
    record = folder / "shards.jsonl"
    return record.read_bytes().count(b"\n") if record.exists() else 0


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def arguments(corpus: Path, output: Path, workers: int) -> list[object]:
    given = ["--input", corpus / "*.jsonl", "--tokenizer", corpus / "tokenizer.json"]
    return [*given, "--output", output, "--workers", workers]


def test_killed_it_goes_on_and_ends_with_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
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
        finish(process, -signal.SIGKILL)  # ends when the workers, which hold the pipe too, have followed
        assert not (tmp_path / "killed" / "manifest.json").exists(), f"kill {kill}"
        assert kept < finished(tmp_path / "killed") < shards, f"kill {kill}"
        kept = finished(tmp_path / "killed")
    last, _ = finish(start(*arguments(corpus, tmp_path / "killed", 2)))
    assert last == stdout.replace("whole", "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    again, _ = finish(start(*arguments(corpus, tmp_path / "killed", 2)))
    assert "finished already" in again


@pytest.mark.parametrize("conversations", [False, True])
def test_what_was_appended_but_not_recorded_is_cut_off(conversations: bool, tmp_path: Path) -> None:
    """As after a kill between the two, or in the middle of either."""
    record = {"documents": 1, "tokens": 1, "tokens_sha256": "", "skipped": {}}
    for shard in range(3):
        for name, dtype in (("tokens", "<u2"), ("ends", "<i8"), ("keys", "<u8"), ("mask", "?"))[: 3 + conversations]:
            np.array([1 if name == "ends" else shard], dtype).tofile(tmp_path / f"shard-{shard:05}.{name}")
        prepared.write_json(tmp_path / f"shard-{shard:05}.json", record)
    left = contents(tmp_path)
    for _ in range(2):
        prepared.Collection(tmp_path, "<u2", conversations).grow()
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
    assert len(prepared.Collection(tmp_path, "<u2", conversations).shards) == 3
    assert contents(tmp_path) == whole
    (tmp_path / "keys.bin").write_bytes(whole["keys.bin"][:-1])
    with pytest.raises(InputError, match="keys.bin has 23 bytes of 24"):
        prepared.Collection(tmp_path, "<u2", conversations)


def test_verifying_names_what_is_damaged(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    finish(start("--input", corpus / "a.jsonl", "--output", out))
    whole = command("prepare", "--verify", out)
    assert (whole.returncode, whole.stderr) == (0, "") and "is whole: " in whole.stdout
    shard = finished(out) // 2
    sizes = [json.loads(line) for line in (out / "shards.jsonl").read_text().splitlines()]
    tokens, documents = (sum(each[name] for each in sizes[:shard]) for name in ("tokens", "documents"))
    for name, byte in (("tokens", 2 * tokens), ("ends", 8 * documents), ("keys", 8 * documents + 5)):
        content = (out / f"{name}.bin").read_bytes()
        changed = bytearray(content)
        changed[byte] ^= 1
        (out / f"{name}.bin").write_bytes(changed)
        with pytest.raises(InputError, match=rf"{out} is damaged: [^;]* {name}.bin[^;]*, shard {shard};"):
            prepared.verify(out, workers=2)
        (out / f"{name}.bin").write_bytes(content)
    record = (out / "shards.jsonl").read_bytes()
    (out / "shards.jsonl").write_bytes(record.replace(b"0", b"1", 1))
    refused = command("prepare", "--verify", out)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "shards.jsonl is damaged" in refused.stderr
    (out / "shards.jsonl").unlink()
    before = contents(out)
    again = start("--input", corpus / "a.jsonl", "--output", out)  # no reason to begin anew
    assert "shards.jsonl is damaged" in finish(again, 2)[1]
    assert contents(out) == before


def test_another_preparation_is_not_overwritten(corpus: Path, tmp_path: Path) -> None:
    first = command("prepare", "--input", corpus / "a.jsonl", "--output", tmp_path / "out", "--workers", 1)
    assert (first.returncode, first.stderr) == (0, "")
    before = contents(tmp_path / "out")
    tokenizer = ("--tokenizer", corpus / "tokenizer.json")
    for given, said in (
        (("--input", corpus / "b.jsonl"), "files"),
        (("--input", corpus / "a.jsonl", *tokenizer), "tokenizer"),
        (("--input", corpus / "a.jsonl", "--malformed", "skip"), "malformed"),
    ):
        other = command("prepare", *given, "--output", tmp_path / "out")
        assert other.returncode == 2 and other.stderr.count("\n") == 1, other.stderr
        assert "another preparation" in other.stderr and said in other.stderr
    assert contents(tmp_path / "out") == before


def test_bad_input_of_the_command(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("kept")
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    empty = write_text(tmp_path / "empty", [""])
    ok, out = ("--input", corpus / "a.jsonl"), ("--output", tmp_path / "out")
    for given, said in (
        ((*ok, "--output", tmp_path / "full"), "not empty"),
        (("--input", corpus / "*.parquet", *out), "no such file"),
        (("--input", tmp_path / "bad.txt", *out), "bad.txt: not UTF-8"),
        (("--input", empty, "--output", tmp_path / "nothing"), "nothing to learn from"),
        ((*ok, *out, "--tokenizer", tmp_path / "none.json"), "none.json"),
        ((*ok, *out, "--workers", 0), "--workers 0"),
        (out, "--input"),
        ((*ok, *out, "--verify", tmp_path), "--verify"),
        (("--verify", tmp_path / "full"), "not finished"),
        (("--input", corpus / "*.jsonl", corpus / "a.jsonl", *out), "a.jsonl; every document would come twice"),
    ):
        refused = command("prepare", *given)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, (given, refused.stderr)
        assert refused.stderr.startswith("error: ") and said in refused.stderr
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]
