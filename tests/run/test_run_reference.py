"""The reference of a run: log-probabilities that its corpora hold, or the model without its adapters."""

import json
import sys
from pathlib import Path
from typing import Any

import corpora
import numpy as np
import pytest
from chats import write_tokenizer

from jaxopt_llm import plan
from jaxopt_llm.config import Config, DataConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.distributed.process_group import SINGLE_PROCESS
from jaxopt_llm.run.setup import Data, open_documents, pack_documents

ADAPTERS = {"lora.rank": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write pairs as rows, and prepared: without log-probabilities, with those of two models, and with a limit."""
    folder = tmp_path_factory.mktemp("data")
    config = DataConfig(content="preference", tokenizer=str(write_tokenizer(folder / "tokenizer")))
    for name in ("a", "b"):
        rows = [{"prompt": f"count to {n}, {name}", "chosen": "1 " * (n % 9), "rejected": "no"} for n in range(1, 40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        corpora.prepare(folder / f"{name}-compared", folder / f"{name}.jsonl", config, "models/x")
    corpora.prepare(folder / "plain", folder / "b.jsonl", config)
    corpora.prepare(folder / "other", folder / "b.jsonl", config, "models/y")
    corpora.prepare(folder / "limited", folder / "b.jsonl", config, "models/x", limit=100)
    return folder


def pack(folder: Path, *paths: str, **settings: Any) -> Data:
    given: dict[str, Any] = {"training.objective": "dpo", "training.sequence_length": 128}
    given |= {"model.vocabulary_size": 512, "data.content": "preference", "data.tokenizer": str(folder / "tokenizer")}
    given |= {"data.paths": tuple(str(folder / path) for path in paths)}
    config: Config = replace_fields(Config(), given | settings)
    assert not config.problems()
    return pack_documents(config, open_documents(config, SINGLE_PROCESS))


@pytest.mark.parametrize("settings", [{}, ADAPTERS, ADAPTERS | {"training.trainable": ("*norm*",)}])
def test_log_probabilities_of_the_corpus_are_used(folder: Path, settings: dict[str, Any]) -> None:
    data = pack(folder, "a-compared", "b-compared", **settings)
    assert data.reference is not None and data.reference.model == "models/x"
    for rows in (*data.training, *data.validation.values()):
        assert np.any(rows[0].reference)


def test_adapters_need_none(folder: Path) -> None:
    for path in ("plain", "b.jsonl"):
        data = pack(folder, path, **ADAPTERS)
        assert data.reference is None and data.training[0][0].reference is None


def test_the_reference_can_be_chosen(folder: Path) -> None:
    adapters = {**ADAPTERS, "preference.reference": "base"}
    data = pack(folder, "a-compared", **adapters)
    assert data.reference is None and data.training[0][0].reference is None
    for objective, compares in (("dpo", True), ("cpo", False)):
        config: Config = replace_fields(Config(), {**adapters, "training.objective": objective})
        assert config.runs_reference is compares
        assert not replace_fields(config, {"preference.reference": "stored"}).runs_reference
    with pytest.raises(InputError, match=r"stored: plain holds no log-probabilities .*--preference.reference base$"):
        pack(folder, "plain", **ADAPTERS, **{"preference.reference": "stored"})
    whole: Config = replace_fields(Config(), {"training.objective": "dpo", "preference.reference": "base"})
    assert [each.split(":")[0] for each in whole.problems()] == ["preference.reference=base"]


@pytest.mark.parametrize(
    ("paths", "reference"),
    [
        (["a-compared", "b-compared"], "stored"),
        (["a-compared", "plain"], "auto"),
        (["b.jsonl"], "auto"),
        (["absent"], "auto"),
    ],
)
def test_a_plan_reads_what_corpora_hold_of_a_reference(
    folder: Path, paths: list[str], reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command plans the step that the run will have: here without the forward of the reference."""
    given = ["--config", "dpo.py", "--lora.rank", "4", "--data.paths", *(str(folder / path) for path in paths)]
    given += ["--data.tokenizer", str(folder / "tokenizer"), "--model.pretrained", "", "--gpus-per-host", "1"]
    planned: list[Config] = []

    def end(config: Config, *others: Any) -> None:
        planned.append(config)
        raise InputError("planned")

    monkeypatch.setattr(sys, "argv", ["plan", *given])
    monkeypatch.setattr(plan, "make_plan", end)
    monkeypatch.setattr(plan, "prepare_jax", lambda: None)
    with pytest.raises(InputError, match="^planned$"):
        plan.main()
    (config,) = planned
    assert config.preference.reference == reference and config.runs_reference == (reference == "auto")


def test_objectives_without_a_reference_ignore_log_probabilities(folder: Path) -> None:
    settings = {"training.objective": "cpo", "evaluation.paths": (str(folder / "limited"),)}
    data = pack(folder, "a-compared", "other", **settings)
    assert data.reference is None
    assert all(rows[0].reference is None for rows in (*data.training, *data.validation.values()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"trains all of it: prepare the data with --reference MODEL .*, or train adapters with --lora.rank$"),
        (
            ADAPTERS | {"training.trainable": ("*norm*",)},
            r"with --reference MODEL .*, or set --training.trainable \(\)",
        ),
        (ADAPTERS | {"lora.pretrained": "runs/sft"}, r"begins with lora.pretrained=runs/sft: prepare .*convert merge"),
    ],
)
def test_a_model_that_is_not_its_own_reference_needs_log_probabilities(
    folder: Path, settings: dict[str, Any], message: str
) -> None:
    for path in ("plain", "b.jsonl"):
        with pytest.raises(InputError, match=rf"dpo compares with a reference model: {path} holds no .*{message}"):
            pack(folder, path, **settings)


@pytest.mark.parametrize("settings", [{}, ADAPTERS])
def test_data_with_different_references_are_refused(folder: Path, settings: dict[str, Any]) -> None:
    for paths in (("a-compared", "plain"), ("b.jsonl", "a-compared")):
        message = r"a-compared holds log-probabilities by the reference models/x, and .* holds none: prepare both with"
        with pytest.raises(InputError, match=message):
            pack(folder, *paths, **settings)
        with pytest.raises(InputError, match=message):
            pack(folder, paths[0], **settings, **{"evaluation.paths": (str(folder / paths[1]),)})
    with pytest.raises(
        InputError, match="a-compared holds .* models/x, and other holds those of models/y: prepare both"
    ):
        pack(folder, "a-compared", "other", **settings)


def test_rows_hold_no_document_without_a_log_probability(folder: Path) -> None:
    assert pack(folder, "limited", **{"training.sequence_length": 100}).reference is not None
    with pytest.raises(InputError, match="models/x has read no longer .* set at most --training.sequence-length 100"):
        pack(folder, "a-compared", "limited")
