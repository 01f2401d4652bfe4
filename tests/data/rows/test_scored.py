"""Rows of documents that get scores: whole documents with all their tokens, and the label of each."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import CHATML, conversation
from corpora import prepare

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens.corpus import open_all_documents, open_corpus
from jaxopt_llm.data.tokens.pieces import TokenStream
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.model.batch import Batch

SIZE = 60
BOS, EOS = 256, 257  # of the byte tokenizer


def unpack(row: Batch) -> list[tuple[list[int], float | None]]:
    """Return the documents of a row, each with its label."""
    found = []
    for segment in range(1, int(row.segment_ids.max()) + 1):
        (places,) = np.nonzero(row.segment_ids == segment)
        assert np.array_equal(row.positions[places], np.arange(places.size)) and row.loss_mask[places].all()
        labels = {None} if row.labels is None else {*row.labels[places].tolist()}
        found.append((row.tokens[places].tolist(), labels.pop()))
        assert not labels
    assert not row.loss_mask[row.segment_ids == 0].any()
    return found


def read(config: DataConfig) -> TokenStream:
    return open_all_documents(config, load_tokenizer(config))[0]


def read_rows(rows: PackedRows) -> list[tuple[list[int], float | None]]:
    return [each for index in range(len(rows)) for each in unpack(rows.read(index, (0, 3)))]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    lines = [",".join(f'"{value}"' for value in row.values()) for row in rows]
    path.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
    return path


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "jsonl": write_jsonl,
    "csv": write_csv,
    "parquet": write_parquet,
}


@pytest.mark.core
@pytest.mark.parametrize("suffix", WRITERS)
def test_rows_have_all_tokens_and_the_label_of_each_document(suffix: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    texts = {f"{number} " + "x" * int(random.integers(0, 50)): number / 4 for number in range(60)}
    rows = [{"id": 0, "score": label, "text": text} for text, label in texts.items()]
    path = WRITERS[suffix](tmp_path / f"rows.{suffix}", rows)
    config = DataConfig(paths=(str(path),), label_field="score")
    expected = sorted(([BOS, *text.encode(), EOS], label) for text, label in texts.items())
    found = read_rows(PackedRows(read(config), SIZE, 258, scored=True))
    assert sorted(found) == expected
    prepare(tmp_path / "prepared", path, config)
    prepared = DataConfig(paths=(str(tmp_path / "prepared"),), label_field="score")
    assert sorted(read_rows(PackedRows(read(prepared), SIZE, 258, scored=True))) == expected

    corpus = open_corpus(replace(config, held_out=0.3), load_tokenizer(config))
    parts = [
        read_rows(PackedRows(each, SIZE, 258, scored=True)) for each in (corpus.sources[0].training, corpus.held_out)
    ]
    assert all(parts) and sorted([*parts[0], *parts[1]]) == expected
    others = [{**row, "score": 0.5} for row in rows]
    changed = WRITERS[suffix](tmp_path / f"others.{suffix}", others)
    other = open_corpus(replace(config, paths=(str(changed),), held_out=0.3), load_tokenizer(config))
    assert other.sha256 != corpus.sha256


def test_a_longer_document_keeps_its_first_tokens_or_is_dropped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * (SIZE - 2)}, {"text": "y" * (SIZE - 1)}])
    stream = read(DataConfig(paths=(str(path),)))
    cut, dropped = (
        sorted(len(tokens) for tokens, _ in read_rows(PackedRows(stream, SIZE, 258, "a", each, scored=True)))
        for each in ("auto", "drop")
    )
    assert cut == [SIZE, SIZE] and dropped == [SIZE]
    with pytest.raises(InputError, match="a: data.long_documents=split would divide documents, which get one score"):
        PackedRows(stream, SIZE, 258, "a", "split", scored=True)


def test_conversations_and_pairs_have_labels(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CHATML)
    config = DataConfig(chat_template=str(tmp_path / "chat.jinja"), content="chat", label_field="label")
    rows = [{"messages": conversation(number)[:2], "label": number % 2 == 0} for number in range(6)]
    plain = read(replace(config, paths=(str(write_jsonl(tmp_path / "a.jsonl", rows)),)))
    labels = [label for _, label in read_rows(PackedRows(plain, 400, 258, scored=True))]
    assert sorted(labels) == [0.0] * 3 + [1.0] * 3
    answers = [{"prompt": "?", "chosen": "a" * (1 + n), "rejected": "no", "label": n} for n in range(6)]
    paired = read(replace(config, paths=(str(write_jsonl(tmp_path / "b.jsonl", answers)),)))
    rows_of_pairs = PackedRows(paired, 400, 258, scored=True)
    found = [unpack(rows_of_pairs[index]) for index in range(len(rows_of_pairs))]
    for row in found:
        for (chosen, one), (rejected, two) in zip(row[::2], row[1::2], strict=True):
            assert one == two == bytes(chosen).count(b"a") - bytes(rejected).count(b"a") - 1
    assert sum(map(len, found)) == 12
    with pytest.raises(InputError, match="with the field label, which judges answers"):
        read(replace(config, paths=(str(tmp_path / "a.jsonl"),), label_field=""))


def test_text_files_have_no_labels(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(InputError, match=r"a.txt: data.label_field=label requires JSONL"):
        read(DataConfig(paths=(str(tmp_path / "a.txt"),), label_field="label"))
