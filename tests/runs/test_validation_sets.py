"""Validation sets of one's own (`evaluation.paths`) and the samples that a run writes at each evaluation."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import toy
from chats import conversation, write_chats, write_tokenizer
from commands import assert_one_line, command, metrics, train
from test_loop import tiny

from jaxopt_llm import train as train_command
from jaxopt_llm.config import Config, EvaluationConfig, MeshConfig, OffloadConfig, cli
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.data.tokens.pieces import IndexedPiece, join_all
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.generate import generate
from jaxopt_llm.inference import models
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.run import samples
from jaxopt_llm.run.setup import prepare_run

pytestmark = pytest.mark.core


def write_documents(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def read_samples(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    """Return the folder of the data, and the flags that name it. Set `b` has one row, fewer than a batch."""
    folder = tmp_path_factory.mktemp("sets")
    write_documents(folder / "train.jsonl", [f"{number} apples " * 20 for number in range(50)])
    write_documents(folder / "a.jsonl", [f"pear {number} " * 30 for number in range(30)])
    write_documents(folder / "b.jsonl", ["plums and " * 3])
    paths = [
        "--data.paths",
        folder / "train.jsonl",
        "--evaluation.paths",
        folder / "a.jsonl",
        f"small={folder}/b.jsonl",
    ]
    return folder, [*paths, "--evaluation.samples", 2, "--evaluation.sample-tokens", 6, "--evaluation.every", 2]


@pytest.fixture(scope="module")
def trained(sets: tuple[Path, list[object]]) -> Path:
    folder, flags = sets
    done = train(folder / "run", *flags, "--training.steps", 4, "--evaluation.batches", 100)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^data: .*train.jsonl: 50 documents, [\d,]+ tokens$", done.stdout, re.MULTILINE)  # none held out
    assert "validation set small: 1 documents, 32 tokens" in done.stdout
    assert re.search(r"held-out \d\.\d{4} \(a \d\.\d{4}, small \d\.\d{4}\)", done.stdout)
    return folder / "run"


def test_each_set_has_a_loss_which_evaluate_gives_too(trained: Path) -> None:
    records = [record for record in metrics(trained) if "eval_loss" in record]
    assert [record["step"] for record in records] == [2, 4]
    shown = command("evaluate", "--checkpoint", trained).stdout.splitlines()
    found = {}
    for line in shown:
        match = re.fullmatch(r"step 4 on the validation set (\w+) \(.*\): ([\d.]+) nats .* ([\d,]+) tokens", line)
        assert match, line
        found[match[1]] = float(match[2]), int(match[3].replace(",", ""))
    assert found.keys() == {"a", "small"}
    for name, (loss, _) in found.items():
        assert records[-1][f"eval_loss/{name}"] == pytest.approx(loss, abs=1e-4)
    total = sum(loss * tokens for loss, tokens in found.values()) / sum(tokens for _, tokens in found.values())
    assert records[-1]["eval_loss"] == pytest.approx(total, abs=2e-4)


def test_samples_are_those_of_generate(trained: Path) -> None:
    written = read_samples(trained)
    assert [each["set"] for each in written] == ["a", "a", "small"] * 2
    assert [each["step"] for each in written] == [2] * 3 + [4] * 3
    last = written[3:]
    texts = ["pear 0 " * 30, "pear 16 " * 30, "plums and " * 3]
    for sample, text in zip(last, texts, strict=True):
        assert text.startswith(sample["prompt"] + sample["reference"]) and len(sample["prompt"]) >= 13
    answers = generate(models.load_model(trained), [each["prompt"] for each in last], 6, Sampling(), stops=())
    assert [each["answer"] for each in last] == answers


@pytest.mark.slow
def test_a_resumed_run_writes_the_same_samples_once(sets: tuple[Path, list[object]], trained: Path) -> None:
    folder, flags = sets
    steps = ("--evaluation.batches", 100, "--checkpoint.every", 2, "--schedule.decay-steps", 800)
    assert train(folder / "resumed", *flags, *steps, "--training.steps", 2).returncode == 0
    # As after a kill between the samples of step 4 and its checkpoint.
    with (folder / "resumed/samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "set": "a", "prompt": "", "answer": "", "reference": ""}) + "\n")
    assert train(folder / "resumed", *flags, *steps, "--training.steps", 4).returncode == 0
    assert read_samples(folder / "resumed") == read_samples(trained)


@pytest.mark.parametrize(
    "settings",
    [
        {"mesh": MeshConfig(pipeline=2, fsdp=2, tensor=2), "training.accumulation": 2},
        {"mesh": MeshConfig(context=2, data=2, tensor=2), "sharding.zero_stage": 1},
        {"mesh": MeshConfig(fsdp=4, tensor=2), "offload": OffloadConfig(optimizer=True, parameters=True)},
    ],
    ids=("pipeline", "context", "offload"),
)
@pytest.mark.slow
def test_samples_do_not_depend_on_the_mesh(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for name, values in (("alone", {"mesh": MeshConfig(fsdp=8)}), ("other", settings)):
        directory = tmp_path / name / "run"
        directory.parent.mkdir()
        config: Config = replace_fields(
            tiny(directory), {"training.steps": 2, "evaluation.samples": 3, "evaluation.sample_tokens": 5, **values}
        )
        with Preemption() as preemption:
            train_command.train(config, preemption)
        written.append(read_samples(directory))
    assert written[0] == written[1] and len(written[0]) == 3
    assert {each["set"] for each in written[0]} == {"held-out"}


@pytest.mark.parametrize("base", [None, "float", "nf4"])
def test_weights_that_are_in_place_are_not_copied(base: str | None, tmp_path: Path) -> None:
    """Generation during a run must not need the memory of a second model. base: of adapters; None without adapters."""
    for mesh, copied in ((MeshConfig(fsdp=4, tensor=2), False), (MeshConfig(fsdp=4, data=2), True)):
        directory = tmp_path / str(copied) / "run"
        directory.parent.mkdir()
        settings: dict[str, Any] = {"mesh": mesh, "evaluation.samples": 1}
        settings |= {"lora.rank": 2, "lora.base": base} if base else {}
        setup = prepare_run(replace_fields(tiny(directory), settings), SINGLE_PROCESS)
        program = setup.program
        state = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), program.state)
        read = samples.make_weight_reader(program.specs, setup.placement, samples.make_sampling_placement(setup))
        kept = {id(leaf) for leaf in jax.tree.leaves((state.masters, state.frozen))}
        large = [leaf for leaf in jax.tree.leaves(read(state)) if leaf.size >= 8 * toy.UNIFORM.width]
        assert all((id(leaf) not in kept) == copied for leaf in large)


def test_a_conversation_is_asked_its_first_question(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer")
    chats = write_chats(tmp_path / "chats.jsonl", [conversation(number) for number in range(40)])
    flags = ("--data.paths", chats, "--data.content", "chat", "--data.tokenizer", folder)
    sampled = ("--evaluation.samples", 2, "--evaluation.sample-tokens", 40, "--training.sequence-length", 128)
    done = train(tmp_path / "run", *flags, *sampled, "--model.vocabulary-size", 512, "--training.steps", 1)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = read_samples(tmp_path / "run")
    for sample in (first, second):
        assert re.search(r"user\nCount to (\d)\.\s*assistant\n$", sample["prompt"]), sample["prompt"]
        assert re.fullmatch(r"( ?\d)* done\s*", sample["reference"]), sample["reference"]
    assert first["prompt"] != second["prompt"]


def test_prompts_are_spread_and_fit() -> None:
    """Documents whose prompt is too long are left out, and a text gives half of a short document."""
    tokenizer = ByteTokenizer()
    # The searches begin at tokens 0, 310 and 490. The first prompt is too long, and the last document has no answer.
    sizes, starts = [300, 10, 8, 400, 12, 6], [290, 4, 3, 2, 5, 6]
    ends = np.cumsum(sizes)
    mask = np.concatenate([np.arange(size) >= start for size, start in zip(sizes, starts, strict=True)])
    ids = np.arange(ends[-1]) % tokenizer.eos
    stream = join_all([IndexedPiece("chats", ids, ends, np.zeros(6, np.uint64), mask=mask)])
    found = [(prompt[0], prompt.size, rest.size) for prompt, rest in samples.choose_prompts(stream, 3, 40, 20)]
    begins = (ends - sizes) % tokenizer.eos
    assert found == [(begins[1], 4, 6), (begins[2], 3, 5), (begins[4], 5, 7)]
    pairs = join_all([IndexedPiece("pairs", ids, ends, np.zeros(6, np.uint64), mask=mask, pairs=True)])
    found = [(prompt[0], prompt.size, rest.size) for prompt, rest in samples.choose_prompts(pairs, 3, 40, 20)]
    assert found == [(begins[2], 3, 5), (begins[4], 5, 7)]  # documents 0, 2 and 4 are chosen answers
    text = join_all([IndexedPiece("texts", ids, ends, np.zeros(6, np.uint64))])
    assert [prompt.size for prompt, _ in samples.choose_prompts(text, 2, 200, 20)] == [64, 6]
    assert [(p.size, rest.size) for p, rest in samples.choose_prompts(text, 1, 40, 20)] == [(20, 20)]
    alone = join_all([IndexedPiece("one text", ids, ends[-1:], np.zeros(1, np.uint64))])
    assert len([*samples.choose_prompts(alone, 2, 200, 20)]) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["val/*.jsonl"], "evaluation.paths: val/*.jsonl: give this validation set a name: NAME=val/*.jsonl"),
        (["a/val.jsonl", "b/val.jsonl"], "another set is named val too; write NAME=PATH with a new name"),
        (["x=nowhere.jsonl"], "evaluation.paths nowhere.jsonl: no such file or folder; correct the path"),
    ],
)
def test_wrong_paths_are_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--evaluation.paths", *flags)
    assert done.returncode == 2
    assert_one_line(done.stderr, message)


def test_paths_are_named() -> None:
    given = EvaluationConfig(paths=("a/wiki.jsonl", "code=b/c.txt", "s3://bucket/folder/", "x.y-1=d=1/z.csv.gz"))
    assert given.named_paths() == [
        ("wiki", "a/wiki.jsonl"),
        ("code", "b/c.txt"),
        ("folder", "s3://bucket/folder/"),
        ("x.y-1", "d=1/z.csv.gz"),
    ]
    assert not given.problems()


def test_training_data_among_validation_data_is_named(sets: tuple[Path, list[object]], tmp_path: Path) -> None:
    folder, flags = sets
    done = train(tmp_path / "run", *flags, "--training.steps", 1, "--evaluation.paths", f"seen={folder}/train.jsonl")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert f"the validation set seen reads {folder}/train.jsonl, which data.paths trains on" in done.stderr


def test_data_that_does_not_fill_a_row_is_named(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "short.jsonl", ["a few words"])
    done = train(tmp_path / "run", "--data.paths", path, "--evaluation.paths", f"x={path}", "--training.steps", 1)
    assert (done.returncode, done.stderr.count("\n")) == (0, 2)
    assert "has 13 tokens, and a row has --training.sequence-length 32: the rest of the row is padding" in done.stderr


@pytest.mark.parametrize("recipe", ["finetune.py", "finetune_full.py", "pretrain.py"])
def test_recipes_without_sizes_write_samples(recipe: str) -> None:
    assert cli.load_recipe(recipe).evaluation.samples
