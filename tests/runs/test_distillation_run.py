"""Runs that distil a teacher, by the command and its files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import folders
import jax
import numpy as np
import pytest
import toy
from commands import assert_one_line, command, metrics, some_text, tiny
from texts import write_byte_tokenizer

from jaxopt_llm.checkpoint.huggingface.model_folder import write_model_folder
from jaxopt_llm.config import Config, DataConfig, DistillationConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer
from jaxopt_llm.data.tokens.tokenizer_files import write_tokenizer
from jaxopt_llm.run.directory import check_tokenizer_of_teacher

TEACHER = replace(folders.CONFIG, pattern=("global",), layers=2, vocabulary_size=300)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one special token more than the tokenizer of the student."""
    path = folders.folder(tmp_path_factory.mktemp("teacher"), TEACHER)
    write_byte_tokenizer(path / "tokenizer.json", more=1)
    return path


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("data")
    tokenizer = write_byte_tokenizer(folder / "tokenizer.json")
    trained = ("--schedule.kind", "constant", "--optimizer.learning-rate", 0.01, "--training.objective", "distill")
    return (*some_text(folder / "text.jsonl"), "--data.tokenizer", tokenizer, *trained)


def run(directory: Path, *options: object) -> list[object]:
    return ["train", *tiny(directory), *options]


def test_a_run_learns_from_its_teacher_and_resumes_to_the_bit(
    tmp_path: Path, teacher: Path, flags: tuple[object, ...]
) -> None:
    steps = ("--training.steps", 6, "--evaluation.every", 3, "--checkpoint.every", 3, "--checkpoint.keep", 2)
    named = ("--distillation.teacher", teacher)
    done = command(*run(tmp_path / "whole", *flags, *steps, *named))
    assert done.returncode == 0, done.stderr
    assert f"learns from {teacher}" in done.stdout
    records = metrics(tmp_path / "whole")
    for record in records:
        assert record["loss"] == record["divergence"] and record["next_token"] > 4  # the weight of the latter is 0
    assert records[-1]["eval_divergence"] == records[-1]["eval_loss"] < records[2]["eval_loss"] < records[0]["loss"]
    assert not [path for path in (tmp_path / "whole" / "checkpoints").rglob("*teacher*")]

    moved = shutil.copytree(teacher, tmp_path / "moved")
    for last, folder in ((3, teacher), (6, moved)):
        arguments = (*flags, "--training.steps", last, *steps[2:], "--distillation.teacher", folder)
        done = command(*run(tmp_path / "parts", *arguments))
        assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "parts") == records

    arrays = jax.tree.map(lambda x: np.asarray(x) * 1.01, folders.params(TEACHER))
    other = shutil.copytree(teacher, tmp_path / "other")
    for file in [*other.glob("*.safetensors*")]:
        file.unlink()
    write_model_folder(tmp_path / "written", jax.device_put(arrays, toy.placement().replicated), TEACHER)
    for file in (tmp_path / "written").iterdir():
        shutil.copy(file, other)
    again = (*flags, "--training.steps", 9, *steps[2:], "--distillation.teacher", other)
    done = command(*run(tmp_path / "parts", *again))
    assert done.returncode == 2
    assert_one_line(done.stderr, f"distillation.teacher={other}: its weights differ from those", "restore the original")


def test_a_teacher_that_does_not_fit_is_refused(tmp_path: Path, teacher: Path, flags: tuple[object, ...]) -> None:
    def refuse(folder: object, *parts: str) -> None:
        done = command(*run(tmp_path / "run", *flags, *(("--distillation.teacher", folder) if folder else ())))
        assert done.returncode == 2 and not (tmp_path / "run").exists()
        assert_one_line(done.stderr, *parts)

    refuse(
        "", "training.objective=distill needs a teacher, and text.jsonl holds", "--teacher", "--distillation.teacher"
    )
    refuse(
        tmp_path / "nowhere",
        f"distillation.teacher={tmp_path / 'nowhere'}: no such folder; name a downloaded model or an ",
    )
    other = shutil.copytree(teacher, tmp_path / "other")
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    refuse(other, "its tokenizer differs from", "gives 'a' 64, and the teacher's 65", "with the same tokenizer")
    small = folders.folder(tmp_path / "small", replace(TEACHER, vocabulary_size=200))
    refuse(small, "has 200 token ids, and the tokenizer", "257")
    scored = folders.folder(tmp_path / "scored", replace(TEACHER, scores=1))
    refuse(scored, f"distillation.teacher={scored}: this model gives documents scores, and predicts no tokens")
    config = Config(data=DataConfig(), distillation=DistillationConfig(teacher=str(teacher)))
    with pytest.raises(InputError, match="has a tokenizer, and data.tokenizer is bytes: .*the same tokenizer"):
        check_tokenizer_of_teacher(config, ByteTokenizer())
    write_tokenizer(config.data, ByteTokenizer(), other)
    check_tokenizer_of_teacher(replace(config, distillation=DistillationConfig(teacher=str(other))), ByteTokenizer())
    a_run = tmp_path / "a_run"
    a_run.mkdir()
    (a_run / "config.json").write_text("{}")
    (a_run / "checkpoints").mkdir()
    refuse(a_run, "this is a run directory; export it first")
