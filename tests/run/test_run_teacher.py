"""Runs that learn from what their data hold of a teacher, as from the teacher itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import corpora
import folders
import numpy as np
import pytest
from chats import write_tokenizer
from commands import metrics

from jaxopt_llm import prepare
from jaxopt_llm import train as training
from jaxopt_llm.compiler import topology
from jaxopt_llm.config import Config, DataConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.planning import step_plan
from jaxopt_llm.prepare import Scoring
from jaxopt_llm.run.setup import Data, open_documents, pack_documents
from jaxopt_llm.step.program import Program, make_program

TEACHER = replace(folders.CONFIG, pattern=("global",), layers=2, vocabulary_size=300)


def run(folder: Path, teacher: Path, **settings: Any) -> Path:
    given: dict[str, Any] = {
        **{"training.objective": "distill", "distillation.beta": 0.5, "data.tokenizer": str(teacher)},
        **{"training.batch_size": 4, "training.accumulation": 2, "training.sequence_length": 32, "training.steps": 2},
        **{"model.layers": 2, "model.width": 16, "model.heads": 4, "model.kv_heads": 2, "model.mlp_width": 32},
        **{"model.vocabulary_size": 320, "mesh.fsdp": 1, "precision.compute_dtype": "float32"},
        **{"optimizer.learning_rate": 1e-2, "schedule.kind": "constant", "schedule.warmup_steps": 0},
        **{"checkpoint.every": 9, "evaluation.every": 2, "data.held_out": 0.2, "logging.every": 1},
        **{"logging.tensorboard": False, "run.directory": str(folder), "training.loss_chunk": 0},
        **{"remat.policy": "none", "training.unroll": "none"},
    }
    with Preemption() as signals:
        training.train(replace_fields(Config(), given | settings), signals)
    return folder


def test_a_corpus_with_all_tokens_of_a_teacher_is_the_teacher(tmp_path: Path) -> None:
    """What is stored is rounded to float16, and with fewer tokens the divergence is smaller."""
    teacher = folders.folder_with_tokenizer(tmp_path / "teacher", TEACHER)
    text = Path(prepare.__file__).read_text()
    rows = [{"text": text[first : first + 150]} for first in range(0, 6000, 150)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(paths=(str(tmp_path / "text.jsonl"),), tokenizer=str(teacher))
    prepare.prepare(data, tmp_path / "taught", 1, Scoring("teacher", str(teacher), TEACHER.vocabulary_size))
    stored = {"data.paths": (str(tmp_path / "taught"),), "data.long_documents": "cut"}
    whole = metrics(run(tmp_path / "stored", teacher, **stored))
    asked = {**stored, "distillation.teacher": str(teacher)}
    # Rows of whole documents, with which the teacher of the run reads what it read before.
    found = metrics(run(tmp_path / "asked", teacher, **asked))
    for each, other in zip(whole, found, strict=True):
        for name in ("divergence", "next_token", "grad_norm"):
            assert each[name] == pytest.approx(other[name], rel=2e-3)
        assert ("eval_divergence" in each) == (each["step"] % 2 == 0)
    assert whole[-1]["eval_divergence"] == pytest.approx(found[-1]["eval_divergence"], rel=2e-3)
    assert whole[1]["divergence"] < whole[0]["divergence"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write texts as rows, and prepared: without a teacher, and with others."""
    folder = tmp_path_factory.mktemp("data")
    config = DataConfig(tokenizer=str(write_tokenizer(folder / "tokenizer")))
    rows = [{"text": f"count to {n}: " + "1 " * n} for n in range(1, 40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpora.prepare(folder / "plain", folder / "rows.jsonl", config)
    for name, teacher, top_k in (("taught", "models/x", 3), ("other", "models/y", 3), ("more", "models/x", 4)):
        corpora.prepare(folder / name, folder / "rows.jsonl", config, teacher=teacher, top_k=top_k)
    return folder


def pack(folder: Path, *paths: str, **settings: Any) -> Data:
    given: dict[str, Any] = {"training.objective": "distill", "training.sequence_length": 64}
    given |= {"model.vocabulary_size": 512, "data.tokenizer": str(folder / "tokenizer")}
    given |= {"data.paths": tuple(str(folder / path) for path in paths)}
    config: Config = replace_fields(Config(), given | settings)
    assert not config.problems()
    return pack_documents(config, open_documents(config, SINGLE_PROCESS))


def test_all_rows_hold_what_the_teacher_says(folder: Path) -> None:
    data = pack(folder, "taught")
    assert data.teacher is not None and (data.teacher.model, data.teacher.top_k) == ("models/x", 3)
    assert all(np.any(rows[0].teacher_ids) for rows in (*data.training, *data.validation.values()))
    others = pack(folder, "taught", **{"training.objective": "next_token"})
    assert others.teacher is None and others.training[0][0].teacher_ids is None


@pytest.mark.parametrize(("path", "top_k"), [("more", 4), ("taught", 3), ("plain", 64), ("absent", 64)])
def test_a_plan_counts_what_corpora_hold_of_a_teacher(
    folder: Path, path: str, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of the compiled step has as many tokens in each place."""
    given = {"training.objective": "distill", "model.vocabulary_size": 512, "data.paths": (str(folder / path),)}
    compiled: list[Program] = []

    def end(step: object, *others: Any) -> None:
        raise InputError("compiled")

    def make(*arguments: Any) -> Program:
        compiled.append(make_program(*arguments))
        return compiled[-1]

    monkeypatch.setattr(step_plan, "make_program", make)
    monkeypatch.setattr(topology, "lower_without_gpu", end)
    with pytest.raises(InputError, match="^compiled$"):
        step_plan.make_plan(replace_fields(Config(), given), "h100", 1, 1)
    (program,) = compiled
    assert program.batch.teacher_ids.shape[-1] == top_k
    assert program.batch.teacher_log_probabilities.shape[-1] == top_k + 1


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("plain",), r"distill needs a teacher, and plain holds .* prepare it with --teacher MODEL .* or name a model"),
        (("rows.jsonl",), r"distill needs a teacher, and rows.jsonl holds no log-probabilities of one"),
        (("taught", "rows.jsonl"), "taught holds log-probabilities by the teacher models/x, and rows.jsonl holds none"),
        (("taught", "other"), "and other holds those of models/y: prepare both with the same --teacher and --top-k$"),
        (("taught", "more"), "and more holds those of models/x: prepare both with the same --teacher and --top-k$"),
    ],
)
def test_data_without_the_same_teacher_are_refused(folder: Path, paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pack(folder, *paths[:1], **{"evaluation.paths": (str(folder / paths[1]),)} if paths[1:] else {})
