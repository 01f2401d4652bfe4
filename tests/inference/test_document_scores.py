"""Scores of packed documents, against those of each document in a row of its own."""

import json
from pathlib import Path

import numpy as np
import pytest
import toy

from jaxopt_llm.config import Config, ModelConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens.pieces import IndexedPiece, join_all
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.inference.document_scores import describe_scores, read_scores, write_scores
from jaxopt_llm.inference.models import LoadedModel
from jaxopt_llm.model.decoder import Decoder

pytestmark = pytest.mark.core
LENGTH = 24
SIZES = {"width": 16, "layers": 1, "pattern": ("global",), "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 16}


def make_rows(documents_per_row: int = 0, pairs: bool = False, labels: bool = True) -> PackedRows:
    random = np.random.default_rng(0)
    ends = np.cumsum(random.integers(2, 10, 30))
    tokens, keys = random.integers(0, 256, ends[-1]), np.zeros(ends.size, np.uint64)
    found = (np.arange(ends.size) % 3).astype(np.float32) if labels else None
    piece = IndexedPiece("documents", tokens, ends, keys, pairs=pairs, labels=found)
    return PackedRows(join_all([piece]), LENGTH, 260, "documents", "auto", documents_per_row, scored=True)


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
def test_packed_documents_have_the_scores_of_each_alone(axes: dict[str, int]) -> None:
    model = Decoder(ModelConfig(**SIZES, vocabulary_size=260, scores=3))
    config: Config = replace_fields(Config(model=model.config), {})
    tokenizer = load_tokenizer(config.data)
    source = LoadedModel(config, tokenizer, model, toy.params(model.specs), toy.placement(**axes), 0)
    alone = read_scores(source, make_rows(documents_per_row=1), 7)
    assert alone.shape == (30, 3) and len({*alone.ravel().tolist()}) == 90
    for rows in (make_rows(), make_rows(pairs=True)):
        assert len(rows) < 15
        np.testing.assert_allclose(read_scores(source, rows, 4), alone, rtol=1e-4, atol=1e-5)


def test_scores_are_compared_with_what_is_known(tmp_path: Path) -> None:
    classes = np.tile(np.eye(3, dtype=np.float32), (10, 1))
    classes[:3] = classes[1]  # one of them is right
    loss = np.log(np.e + 2) - 1 + 2 / 30
    assert describe_scores(classes, make_rows()) == f"93.3% of 30 documents have the right class, loss {loss:.4f}"
    one = np.arange(30, dtype=np.float32)[:, None] % 3 + 0.5
    assert describe_scores(one, make_rows()) == "mean squared error 0.2500 of 30 documents"
    assert describe_scores(one, make_rows(labels=False)) == "30 documents, mean scores 1.5000"
    pairs = one.copy()
    pairs[:2] = np.nan
    expected = "the chosen answer of 35.7% of 14 pairs has the larger score, margin 0.0714"
    assert describe_scores(pairs, make_rows(pairs=True)) == expected
    write_scores(pairs[:3], tmp_path / "new" / "scores.jsonl")
    lines = (tmp_path / "new" / "scores.jsonl").read_text().splitlines()
    assert [json.loads(line)["scores"] for line in lines] == [None, None, [2.5]]
