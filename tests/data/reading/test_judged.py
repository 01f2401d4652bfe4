"""Rows with judged answers: TRL's shapes, labels, and the answers to other prompts beside them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import templates
from chats import CHATML, write_tokenizer
from corpora import documents_of, prepare
from test_conversation import write

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading import source
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.corpus import open_all_documents, open_corpus
from jaxopt_llm.data.tokens.pieces import TokenStream
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.prepare import preview

Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "chat.jinja").write_text(CHATML)
    return DataConfig(content="unpaired", chat_template=str(tmp_path / "chat.jinja"), held_out=0.3)


def read(config: DataConfig, *paths: Path) -> TokenStream:
    given = replace(config, paths=tuple(map(str, paths)))
    return open_all_documents(given, load_tokenizer(given))[0]


def describe(stream: TokenStream) -> list[tuple[str, str, float]]:
    """Return the question, the learned answer and the label of each document."""
    tokenizer, found = load_tokenizer(DataConfig()), []
    for start, tokens in zip(stream.document_starts(0, stream.size).tolist(), documents_of(stream), strict=True):
        learned = stream.read_mask(start, len(tokens))
        question = tokenizer.decode(tokens[: int(learned.argmax())]).split("user\n")[1].partition("<|im_end|>")[0]
        answer = tokenizer.decode(np.asarray(tokens)[learned].tolist()).split("<|im_end|>")[0]
        found.append((question, answer, stream.read_label(start)))
    return found


ROWS = [
    {"prompt": "p", "completion": "a", "label": True},
    {"prompt": "p", "completion": "b", "label": False},
    {"prompt": "q", "completion": "c", "label": False},
    {"prompt": "a longer one", "completion": "d", "label": True},
    {"prompt": "a longer one", "completion": "e", "label": True},
]
# The first ones get the answer to the first other prompt, and each other one that to the last other prompt before it.
DOCUMENTS = [("p", "a", 1.0), ("p", "c", 1.0), ("p", "b", 0.0), ("p", "c", 0.0), ("q", "c", 0.0), ("q", "b", 0.0)]
DOCUMENTS += [("a longer one", "d", 1.0), ("a longer one", "c", 1.0)]
DOCUMENTS += [("a longer one", "e", 1.0), ("a longer one", "c", 1.0)]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_a_row_is_its_answer_and_the_answer_to_another_prompt(suffix: str, config: DataConfig, tmp_path: Path) -> None:
    stream = read(config, write(tmp_path / f"a.{suffix}", ROWS))
    assert describe(stream) == DOCUMENTS and stream.pairs == "unpaired"
    messages = [
        {**row, "prompt": [user(row["prompt"])], "completion": [assistant(row["completion"])]}
        for row in ROWS  # TRL's conversational shape
    ]
    if suffix != "csv":
        assert describe(read(config, write(tmp_path / f"b.{suffix}", messages))) == DOCUMENTS


def test_a_mismatched_document_is_a_rendered_conversation(config: DataConfig, tmp_path: Path) -> None:
    """Its tokens and what is learned of it are those of a row with this prompt and this answer."""
    stream = read(config, write(tmp_path / "a.jsonl", ROWS))
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer, _ in DOCUMENTS]
    plain = read(replace(config, content="pairs"), write(tmp_path / "b.jsonl", rows))
    for found, expected in ((stream.read, plain.read), (stream.read_mask, plain.read_mask)):
        assert found(0, stream.size).tolist() == expected(0, plain.size).tolist()


def test_pairs_are_one_answer_of_each_kind(config: DataConfig, tmp_path: Path) -> None:
    pairs = [{"prompt": f"p{n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(2)]
    expected = [("p0", "yes 0", 1.0), ("p0", "yes 1", 1.0), ("p0", "no 0", 0.0), ("p0", "yes 1", 0.0)]
    expected += [("p1", "yes 1", 1.0), ("p1", "no 0", 1.0), ("p1", "no 1", 0.0), ("p1", "no 0", 0.0)]
    path = write(tmp_path / "a.jsonl", pairs)
    assert describe(read(config, path)) == expected
    both = read(config, path, write(tmp_path / "b.csv", ROWS))  # a file of each shape
    assert describe(both) == expected + DOCUMENTS


def test_labels_are_true_or_false(config: DataConfig, tmp_path: Path) -> None:
    named = replace(config, columns=("label=kto_tag", "completion=answer"))
    kinds = [True, 0, "TRUE", "0", 1.0]
    rows = [{"prompt": f"p{n}", "answer": "a", "kto_tag": label} for n, label in enumerate(kinds)]
    labels = [label for _, _, label in describe(read(named, write(tmp_path / "a.jsonl", rows)))]
    assert labels[::2] == labels[1::2] == [1, 0, 1, 0, 1]
    for label in (2, 0.5, "good", [True]):
        path = write(tmp_path / "b.jsonl", [*ROWS, {**ROWS[0], "label": label}])
        with pytest.raises(InputError, match=r"line 6: with a label that is neither true nor false \(it is "):
            read(config, path)
    with pytest.raises(InputError, match=r"without the fields of the form unpaired \(completion, label, prompt\)"):
        read(config, write(tmp_path / "c.jsonl", [{"prompt": "p", "completion": "a"}]))
    told = r"it has completion, label, prompt; --data.content unpaired and --training.objective kto train on it"
    with pytest.raises(InputError, match=told):
        read(replace(config, content="preference"), write(tmp_path / "d.jsonl", ROWS))
    told = r"--data.content unpaired and --training.objective kto train on it; --data.columns label= leaves"
    with pytest.raises(InputError, match=told):
        read(replace(config, content="chat"), write(tmp_path / "d.jsonl", ROWS))
    (problem,) = replace(config, paths=("a.jsonl",), label_field="good").problems()
    assert problem.endswith("set --data.label-field '' and --data.columns label=good")


def test_a_part_with_one_prompt_is_skipped_and_counted(config: DataConfig, tmp_path: Path) -> None:
    given = replace(config, paths=(str(write(tmp_path / "a.jsonl", ROWS[:2])), str(write(tmp_path / "b.jsonl", ROWS))))
    stream, skipped = open_all_documents(given, load_tokenizer(given))
    assert stream.documents == len(DOCUMENTS)
    assert skipped.describe() == ["2 in a part of a file without a second prompt"]


def test_a_turn_that_the_template_rewrites_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "qwen", templates.QWEN_3, templates.SPECIAL)
    first = assistant("<think>\nhm\n</think>\n\nein")
    row = {"prompt": [user("one")], "completion": [first, user("two"), assistant("zwei")], "label": True}
    path = write(tmp_path / "a.jsonl", [row, {**row, "prompt": [user("other")]}])
    given = DataConfig(tokenizer=str(folder), content="unpaired")
    with pytest.raises(InputError, match="with an answer of several turns that the chat template rewrites"):
        read(given, path)
    assert read(replace(given, learn_turns="last"), path).documents == 4


def test_rows_have_the_labels_of_their_documents(config: DataConfig, tmp_path: Path) -> None:
    stream = read(config, write(tmp_path / "a.jsonl", ROWS))
    rows = PackedRows(stream, 290, 258)
    assert "whole pairs" in rows.summary and len(rows) < 5
    found = []
    for index in range(len(rows)):
        row = rows[index]
        assert row.labels is not None and not row.labels[row.segment_ids == 0].any()
        for segment in range(1, int(row.segment_ids.max()) + 1):
            (label,) = np.unique(row.labels[row.segment_ids == segment])
            found.append(float(label))
    assert found[::2] == found[1::2] and sorted(found[::2]) == sorted(float(row["label"]) for row in ROWS)


def test_a_prepared_corpus_is_the_same(config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"q {n // 2}", "completion": "x" * (n % 5 + 1), "label": n % 3 == 0} for n in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr(source, "PART_BYTES", 600)
    monkeypatch.setattr(prepared, "SHARD_BYTES", 700)

    def open_at(path: Path, config: DataConfig) -> tuple[list[tuple[str, str, float]], ...]:
        corpus = open_corpus(replace(config, paths=(str(path),)), load_tokenizer(config))
        assert corpus.pairs == "unpaired" and corpus.held_out is not None
        return describe(corpus.sources[0].training), describe(corpus.held_out)

    folder = prepare(tmp_path / "prepared", path, config, "the model")
    assert len(prepared.read_shard_records(folder)) > 2
    direct = open_at(path, config)
    assert open_at(folder, config) == open_at(folder, DataConfig(held_out=0.3)) == direct
    for training, held_out in (direct, direct[::-1]):  # a document and its prompt with another answer stay together
        assert training and {each[0::2] for each in training[::2]} >= {each[0::2] for each in training[1::2]}
        assert not {(q, a, n) for q, a, n in training[::2]} & {(q, a, n) for q, a, n in held_out[::2]}
    prepared.verify_corpus(folder, 1)


def test_pairs_of_another_kind_do_not_mix(config: DataConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    pair = write(tmp_path / "b.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    preference = prepare(tmp_path / "prepared", pair, replace(config, content="preference"))
    with pytest.raises(InputError, match=r"a.jsonl holds answers that are judged one by one, and .*prepared does not"):
        read(config, path, preference)


def test_the_preview_names_the_kinds(config: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", ROWS[1:])
    preview(replace(config, paths=(str(path),)), 3)
    shown = capsys.readouterr()
    assert shown.err == ""
    documents = shown.out.split("--- ")[1:]
    kinds = [each.split(":")[0].partition(", ")[2] for each in documents]
    assert kinds[:4] == ["line 1, undesirable", "line 1, mismatched", "line 2, undesirable", "line 2, mismatched"]
    assert kinds[4:] == ["line 3, desirable", "line 3, mismatched"]
    assert all(f"⟦{answer}<|im_end|>" in each for answer, each in zip("bccbdc", documents, strict=True))
