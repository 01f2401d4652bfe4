"""Training on every data format: equal runs, mixtures, resumes and bad input."""

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from chats import conversation, write_tokenizer
from commands import checkpoint, command, metrics, start_python, start_training, tiny, train
from gates import after_step, finish, start_gated, wait_until
from texts import train_tokenizer, write_jsonl, write_megatron, write_parquet, write_saved_dataset, write_text

from jaxopt_llm.checkpoint.native.step_directories import find_checkpoints
from jaxopt_llm.config import DataConfig
from jaxopt_llm.data.reading.source import read_standard_library
from jaxopt_llm.data.rows.loader import Loader
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens.corpus import open_corpus
from jaxopt_llm.data.tokens.tokenizer import JsonTokenizer

STEPS = ("--training.steps", 4, "--evaluation.every", 2, "--data.held-out", 0.2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same documents in every format; token files use one BPE tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    whole = [each.content.decode() for each in read_standard_library() if each.name.startswith("email/")]
    documents = [part for text in whole for part in text[:6000].split("\n\n") if part]
    tokenizer = JsonTokenizer(train_tokenizer(folder / "tokenizer.json", documents[:50]))
    arrays = [np.append(ids, tokenizer.eos) for ids in tokenizer.encode([each.encode() for each in documents])]
    write_text(folder / "text", documents)
    write_jsonl(folder / "a.jsonl", documents)
    write_parquet(folder / "a.parquet", documents)
    write_megatron(folder / "a_document", arrays)
    np.save(folder / "a.npy", np.concatenate(arrays))
    prepare = ("--input", folder / "a.jsonl", "--output", folder / "prepared", "--tokenizer", folder / "tokenizer.json")
    prepared = command("prepare", *prepare)
    assert (prepared.returncode, prepared.stderr) == (0, "")
    return folder


def data(corpus: Path, *names: str) -> tuple[object, ...]:
    settings = ("--model.vocabulary-size", 400, "--data.tokenizer", corpus / "tokenizer.json")
    return (*settings, "--data.paths", *(corpus / name for name in names))


@pytest.fixture(scope="module")
def from_jsonl(corpus: Path) -> Path:
    directory = corpus / "runs" / "jsonl"
    done = train(directory, *STEPS, *data(corpus, "a.jsonl"))
    assert (done.returncode, done.stderr) == (0, "")
    return directory


@pytest.mark.parametrize("name", ["text", "a.parquet", "prepared"])
def test_every_format_gives_the_same_run(name: str, corpus: Path, from_jsonl: Path, tmp_path: Path) -> None:
    done = train(tmp_path, *STEPS, *data(corpus, name))
    assert (done.returncode, done.stderr) == (0, "")
    assert metrics(tmp_path) == metrics(from_jsonl)


@pytest.mark.slow
def test_a_mixture_of_all_formats_resumes_as_if_it_had_not_stopped(corpus: Path, tmp_path: Path) -> None:
    names = ("text", "a.jsonl", "a.parquet", "prepared", "a_document", "a.npy")
    mixture = (*data(corpus, *names), "--data.weights", 1, 2, 1, 1.5, 1, 0.5)
    for directory, stops in ((tmp_path / "whole", (4,)), (tmp_path / "resumed", (2, 4))):
        for steps in stops:
            done = train(directory, *STEPS, *mixture, "--training.steps", steps)
            assert (done.returncode, done.stderr) == (0, "")
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, checkpoint(tmp_path / "resumed", 4), checkpoint(tmp_path / "whole", 4))
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= record["data_seconds"] <= record["step_seconds"] for record in records)
    other = train(tmp_path / "whole", *STEPS, *mixture, "--training.steps", 6, "--data.weights", *[1] * 6)
    assert other.returncode == 2 and "data.weights was" in other.stderr


# The command with a log of its batches. The fifth batch never comes, and time passes quickly during the wait for it.
WATCHED = """
import itertools, json, sys, threading, types
from jaxopt_llm import train
from jaxopt_llm.core import errors
from jaxopt_llm.data.rows import loader
from jaxopt_llm.data.rows.loader import Loader
read, log, waits = Loader.rows_at, open(sys.argv.pop(1), "w"), threading.Event()
ticks = itertools.count()
loader.time = types.SimpleNamespace(perf_counter=lambda: next(ticks) if waits.is_set() else 0)
loader.JOIN_SECONDS = 0
def rows_at(self, step):
    if step == 4:
        waits.set()
        threading.Event().wait()
    for row in read(self, step):
        print(json.dumps(row.tokens.tolist()), file=log, flush=True)
        yield row
Loader.rows_at = rows_at
errors.run_command(train.main)
"""


def test_rows_depend_on_weights_and_seed_and_a_stall_ends_the_run(corpus: Path, tmp_path: Path) -> None:
    settings = ("--data.weights", 9, 1, "--run.seed", 1, "--data.held-out", 0.2, "--watchdog.floor-seconds", 5)
    paths = [corpus / "a.jsonl", corpus / "a.npy"]
    given = [*tiny(tmp_path / "run"), *data(corpus, *map(str, paths)), *settings, "--training.steps", 9]
    stdout, stderr = finish(start_python("-c", WATCHED, tmp_path / "log", *given), 2)
    assert "no batch in 5 s: reading data.paths" in stderr
    tokenizer = JsonTokenizer(corpus / "tokenizer.json")
    config = DataConfig(paths=tuple(map(str, paths)), weights=(9, 1), held_out=0.2)
    rows = [PackedRows(source.training, 32, 400) for source in open_corpus(config, tokenizer).sources]
    for path, each, share in zip(paths, rows, (0.9, 0.1), strict=True):
        epochs = 9 * 4 * share / len(each)
        assert f"source {path}: {share:.1%} of the rows, {epochs:.2f} epochs in 9 steps\n" in stdout
    loader = Loader(rows, [0.9, 0.1], batch_size=4, seed=1)
    expected = [row.tolist() for step in range(4) for row in loader.batch_at(step).tokens]
    assert [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()] == expected


def test_a_run_keeps_its_tokenizer_and_refuses_another_in_its_place(corpus: Path, tmp_path: Path) -> None:
    settings = [*data(corpus, "a.jsonl"), "--data.tokenizer", tmp_path / "tokenizer.json", "--training.steps", 1]
    content = (corpus / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(content)
    done = train(tmp_path / "run", *settings)
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "tokenizer.json").unlink()
    assert command("evaluate", "--checkpoint", tmp_path / "run").returncode == 0
    train_tokenizer(tmp_path / "run/tokenizer/tokenizer.json", ["other texts"])
    for module in ("evaluate", "generate"):
        refused = command(
            module, "--checkpoint", tmp_path / "run", *(["--prompt", "x"] if module == "generate" else [])
        )
        assert refused.returncode == 2 and "differs from the run's" in refused.stderr


def test_generation_uses_the_runs_tokenizer(corpus: Path, from_jsonl: Path) -> None:
    written = command("generate", "--checkpoint", from_jsonl, "--prompt", "import email", "--tokens", 5)
    assert (written.returncode, written.stderr) == (0, "")
    assert written.stdout.startswith("import email")


def test_the_same_corpus_elsewhere_continues_a_run_and_another_does_not(
    corpus: Path, from_jsonl: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((corpus / "a.jsonl").read_bytes())
    settings = data(corpus, "a.jsonl")[:-1]
    again = train(from_jsonl, *STEPS, *settings, moved)
    assert (again.returncode, again.stderr) == (0, "") and "finished" in again.stdout
    moved.write_bytes(moved.read_bytes().replace(b"email", b"Email", 1))
    other = train(from_jsonl, *STEPS, *settings, moved, "--training.steps", 6)
    asked = f"to go on with other data, start a new run with --model.pretrained {from_jsonl} and another"
    old = corpus / "a.jsonl"
    assert other.returncode == 2 and f"was trained on {old}, not on {moved}: set --data.paths {old}; " in other.stderr
    assert asked in other.stderr
    slower = train(from_jsonl, *STEPS, *settings, moved, "--optimizer.learning-rate", 1e-5)
    assert slower.stderr.endswith(", or allow the change with --run.allow-change optimizer.learning_rate\n")
    new = train(tmp_path / "new", *STEPS, *settings, moved, "--model.pretrained", from_jsonl)
    assert new.returncode == 0 and f"starts from the weights of {from_jsonl}" in new.stdout, new.stderr

    copy = shutil.copytree(from_jsonl, tmp_path / "copy")
    description = json.loads((copy / "corpus.json").read_text())
    (copy / "corpus.json").write_text(json.dumps({**description, "name": str(moved)}))
    changed = train(copy, *STEPS, *settings, moved, "--training.steps", 6)
    assert changed.returncode == 2 and f"another version of the corpus {moved}: restore" in changed.stderr


def test_bad_input(corpus: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "high.npy", np.array([5, 400, 0] * 900))
    write_jsonl(tmp_path / "short.jsonl", ["a"])
    for settings, message in (
        (data(corpus, "*.csv"), "*.csv: no such file"),
        ((*data(corpus, "a.jsonl"), "--model.vocabulary-size", 300), "has 400 tokens"),
        (("--data.paths", tmp_path / "short.jsonl"), "1 document; training and evaluation need at least one each"),
        (data(corpus, str(tmp_path / "high.npy")), "has the token id 400, outside"),
    ):
        refused = train(tmp_path / "run", *STEPS, *settings)
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
        assert message in refused.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# All formats give the same run, above, and test_optimizer.py resumes each optimizer.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "names", "kills"), [("adafactor", ["a.parquet"], 20), ("adamw", ["a.npy", "text"], 20)]
)
def test_a_run_killed_at_random_moments_gives_the_same_bits(
    optimizer: str, names: list[str], kills: int, corpus: Path, tmp_path: Path
) -> None:
    """tests/runs/test_death.py also kills a run at its start and in the middle of a save."""
    steps = 30 * kills
    run = (*data(corpus, *names), "--optimizer.name", optimizer, "--data.held-out", 0.2, "--training.steps", steps)
    finish(start_training(tmp_path / "whole", *run))
    chance = random.Random(f"{optimizer} {names}")
    for kill in range(kills):
        before = max(find_checkpoints(tmp_path / "killed" / "checkpoints"), default=0)
        gate = after_step(tmp_path / f"gate-{kill}", 30)  # so that no step is left for the last ones only
        saves = ("--checkpoint.every", 1, "--checkpoint.keep", 1)
        process = start_gated(tmp_path / "killed", [gate], *run, *saves)
        wait_until(
            lambda before=before: max(find_checkpoints(tmp_path / "killed" / "checkpoints"), default=0) > before,
            process,
        )
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        finish(process, -signal.SIGKILL)
    stdout, _ = finish(start_training(tmp_path / "killed", *run))
    assert "continues from step" in stdout
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    ended = [checkpoint(tmp_path / name, steps) for name in ("killed", "whole")]
    jax.tree.map(np.testing.assert_array_equal, *ended)


def test_a_run_and_its_evaluation_name_the_fields_that_are_not_read(tmp_path: Path) -> None:
    """Conversations in a column of another name, saved by the library datasets. An answer of each is not learned."""
    chats = [conversation(number) for number in range(40)]
    for chat in chats:
        chat[1]["weight"] = 0
    rows = [{"id": number, "dialog": chat} for number, chat in enumerate(chats)]
    write_saved_dataset(tmp_path / "saved", [rows[:10], rows[10:]])
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({**row, "topic": "x"}) + "\n" for row in rows[:4]))
    folder = write_tokenizer(tmp_path / "tokenizer")
    settings = ("--data.content", "chat", "--data.tokenizer", folder, "--data.columns", "messages=dialog")
    sizes = ("--model.vocabulary-size", 512, "--training.sequence-length", 128, "--training.steps", 1)
    paths = ("--data.paths", tmp_path / "saved", "--evaluation.paths", f"own={tmp_path / 'held.jsonl'}")
    done = train(tmp_path / "run", *settings, *sizes, *paths)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nfields not read: id (40 rows)\n" in done.stdout
    assert re.search(r"\nvalidation set own: .*; fields not read: id \(4 rows\), topic \(4 rows\)\n", done.stdout)
    told = command("evaluate", "--checkpoint", tmp_path / "run")
    assert told.returncode == 0 and "fields not read: id (4 rows), topic (4 rows)\n" in told.stderr
    other = command("evaluate", "--checkpoint", tmp_path / "run", "--data.paths", tmp_path / "saved")
    assert other.returncode == 0 and "fields not read: id (40 rows)\n" in other.stderr
