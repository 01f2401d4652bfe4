"""Labels that are names of classes: their order, where they come from, and the numbers of the documents."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from corpora import prepare
from pyarrow import parquet
from test_conversation import write

from jaxopt_llm.config import Config, DataConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.labels import find_label_names
from jaxopt_llm.data.tokens.corpus import open_all_documents
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.run.setup import resolve_label_names

NAMES = ["good", "bad", "fine", "good"]
CONFIG = DataConfig(label_field="mood")


def rows(labels: list[Any]) -> list[dict[str, Any]]:
    return [{"text": f"text {number}", "mood": label} for number, label in enumerate(labels)]


def find(*paths: Path, **settings: Any) -> tuple[str, ...]:
    return find_label_names(replace(CONFIG, paths=tuple(map(str, paths)), **settings))


def read(path: Path, names: tuple[str, ...]) -> list[float]:
    given = replace(CONFIG, paths=(str(path),), label_names=names)
    stream, _ = open_all_documents(given, load_tokenizer(given))
    return [stream.read_label(start) for start in stream.document_starts(0, stream.size).tolist()]


def declare(path: Path, names: list[str], labels: list[int]) -> Path:
    """Write a table as `datasets` does, with a feature ClassLabel."""
    features = {"text": {"dtype": "string", "_type": "Value"}, "mood": {"names": names, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pyarrow.Table.from_pylist(rows(labels)).replace_schema_metadata(metadata)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return path
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_texts_are_sorted(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{suffix}", rows(NAMES))
    names = find(path)
    assert names == ("bad", "fine", "good") and read(path, names) == [2, 0, 1, 2]
    other = write(tmp_path / f"b.{suffix}", rows(["awful"]))
    assert find(path, other) == ("awful", *names)
    assert find(write(tmp_path / f"c.{suffix}", rows([2, 0, 1]))) == ()
    assert find(path, label_names=("good", "fine", "bad")) == ("good", "fine", "bad")
    with pytest.raises(InputError, match=r"that is none of the classes .it is 'awful'; the classes are bad, fine"):
        read(other, names)
    with pytest.raises(InputError, match="name the classes with --data.label-names"):
        read(other, ())


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_feature_of_datasets_has_an_order(suffix: str, tmp_path: Path) -> None:
    path = declare(tmp_path / f"a.{suffix}", ["good", "bad", "fine"], [0, 2, 1])
    names = find(path)
    assert names == ("good", "bad", "fine") and read(path, names) == [0, 2, 1]
    texts = write(tmp_path / "b.jsonl", rows(["fine"]))
    assert find(texts, path) == names and read(texts, names) == [2]
    other = declare(tmp_path / f"c.{suffix}", ["bad", "good", "fine"], [0])
    with pytest.raises(InputError, match="has the classes good, bad, fine, and .* has bad, good, fine; give all of"):
        find(path, other)
    with pytest.raises(InputError, match="data.label_names has the classes fine, and .* has good, bad, fine"):
        find(path, label_names=("fine",))


def test_a_prepared_corpus_keeps_its_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(NAMES))
    folder = prepare(tmp_path / "prepared", path, replace(CONFIG, label_names=("good", "fine", "bad")))
    names = find(folder)
    assert names == ("good", "fine", "bad") and read(folder, names) == read(path, names) == [0, 2, 1, 0]
    plain = prepare(tmp_path / "numbers", write(tmp_path / "b.jsonl", rows([1, 0])), CONFIG)
    assert find(plain) == ()


def test_documents_to_evaluate_have_the_same_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(NAMES))
    folder = prepare(tmp_path / "prepared", path, replace(CONFIG, label_names=("good", "fine", "bad")))
    settings = {"training.objective": "classify", "model.scores": 3, "data": CONFIG, "data.paths": (str(path),)}
    config = replace_fields(Config(), settings)
    assert resolve_label_names(config).data.label_names == ("bad", "fine", "good")
    with pytest.raises(InputError, match="evaluation.paths: data.label_names has the classes bad, fine, good, and "):
        resolve_label_names(replace_fields(config, {"evaluation.paths": (f"other={folder}",)}))
