"""Scores of a reference model are the log-probabilities of whole documents, each computed alone."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import folders
import jax
import numpy as np
import pytest
from chats import write_tokenizer
from texts import write_byte_tokenizer

from jaxopt_llm import load_pretrained
from jaxopt_llm.config import Config, DataConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.pieces import IndexedPiece
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.inference import models
from jaxopt_llm.inference import reference_scores as scores
from jaxopt_llm.inference.reference_scores import Scorer, choose_length, find_context, open_reference, use_all_devices

LENGTH = 24  # of a row


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder_with_tokenizer(tmp_path_factory.mktemp("models") / "reference")


@pytest.fixture(scope="module")
def documents() -> IndexedPiece:
    """Return documents of which some exceed a row, and the loss counts nothing of others."""
    random = np.random.default_rng(0)
    lengths = np.append([LENGTH + 1, LENGTH + 2, 1, 2], random.integers(2, LENGTH + 5, 40))
    ends = np.cumsum(lengths)
    mask = random.random(ends[-1]) < np.repeat(random.choice([0, 0.5, 1], lengths.size), lengths)
    ids = random.integers(0, 256, ends[-1]).astype("<u2")
    return IndexedPiece("documents", ids, ends, np.zeros(ends.size, np.uint64), mask)


@pytest.fixture(scope="module")
def expected(folder: Path, documents: IndexedPiece) -> list[float]:
    """Return the sum of each document by its own logits. What follows a document in its row has no effect on them."""
    assert documents.mask is not None
    ends, sums = documents.ends, []
    bounds = list(itertools.pairwise([0, *ends.tolist()]))
    ids = np.stack([np.resize(documents.tokens[first:last], LENGTH + 5) for first, last in bounds]).astype(np.int32)
    logits = load_pretrained(folder).logits(ids)
    found = np.asarray(jax.nn.log_softmax(logits), np.float64)
    for row, (first, last) in enumerate(bounds):
        predicted = found[row, np.arange(last - first - 1), ids[row, 1 : last - first]]
        sums.append(float(predicted @ documents.mask[first + 1 : last]) if last - first <= LENGTH + 1 else np.nan)
    return sums


@pytest.mark.parametrize("devices", [1, 8])
def test_scores_are_those_of_documents_alone(
    devices: int, folder: Path, documents: IndexedPiece, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.load_model(folder)
    if devices > 1:
        source = use_all_devices(source)
    assert source.placement.mesh.size == devices
    monkeypatch.setattr(scores, "TOKENS_PER_DEVICE", 2 * LENGTH)
    score, read = Scorer(source, LENGTH), []
    found = score(documents, read.append)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.isnan(found).sum() > 3 and np.sum(found == 0) > 3 and np.sum(found < -10) > 10
    assert sum(read) == documents.size and len(read) > 1
    ends = documents.ends[:4]  # the last ones have nothing to score
    assert documents.mask is not None
    few = replace(documents, tokens=documents.tokens[:60], ends=ends, mask=np.zeros(60, bool))
    assert np.isnan(score(few, read.append)).tolist() == [False, True, False, False]


def test_rows_hold_the_longest_document_up_to_the_context() -> None:
    assert choose_length(300, 8192) == (2048, 0)
    assert choose_length(2049, 8192) == (2048, 0)
    assert choose_length(2050, 8192) == (2176, 0)
    assert choose_length(9000, 8192) == (8192, 8192)
    assert choose_length(300, 256) == (256, 256)
    assert choose_length(257, 256) == (256, 0)


def test_the_context_is_what_a_model_was_trained_for(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 99}))
    for weights in folder.glob("*.safetensors*"):
        (tmp_path / weights.name).symlink_to(weights)
    config = models.open_config(tmp_path)
    assert find_context(config) == 99
    run: Config = replace_fields(Config(), {"model.pretrained": str(tmp_path), "training.sequence_length": 77})
    assert find_context(run) == 99
    scratch: Config = replace_fields(Config(), {"training.sequence_length": 77})
    assert find_context(scratch) == 77
    assert find_context(replace_fields(scratch, {"model.positions": "learned", "model.max_positions": 55})) == 55


def test_the_reference_is_identified_by_its_weights(folder: Path, tmp_path: Path) -> None:
    data = DataConfig(tokenizer=str(folder), content="preference")
    tokenizer = load_tokenizer(data)
    found = open_reference(str(folder), data, tokenizer)
    assert found.name == str(folder) and found.step is None and re.fullmatch("[0-9a-f]{64}", found.sha256)
    other = folders.folder(tmp_path / "other", replace(folders.CONFIG, layers=3))
    write_byte_tokenizer(other / "tokenizer.json")
    assert open_reference(str(other), data, tokenizer).sha256 != found.sha256
    write_tokenizer(other)
    with pytest.raises(
        InputError, match=rf"--reference {other}: it has another tokenizer, BOS or EOS than --tokenizer"
    ):
        open_reference(str(other), data, tokenizer)
