"""JSON arrays and CSV files: the same documents as in other formats, large values, and what is damaged."""

import bz2
import csv
import gzip
import io
import itertools
import json
import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corpora import prepare, read, some_documents, splits
from texts import write_jsonl, write_parquet

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading import files, json_rows, source
from jaxopt_llm.data.reading.files import File, find_files
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.reading.source import read_documents, split_into_parts
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.corpus import open_all_documents
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer


def to_array(rows: Sequence[dict[str, Any]]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def to_lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def to_csv(rows: Sequence[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(rows[0]))
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()


WRITERS = {
    "array": ("json", to_array),
    "array in jsonl": ("jsonl", to_array),
    "lines": ("json", to_lines),
    "csv": ("csv", to_csv),
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}


def contents(path: Path, config: DataConfig | None = None) -> list[bytes]:
    """Return the content of every document, in order."""
    config = config or DataConfig()
    files = find_files(str(path), config)
    parts = itertools.chain.from_iterable(split_into_parts(file, config) for file in files)
    return [document.content for part in parts for document in read_documents(part, config, Skipped())]


def skipped_in(path: Path, **settings: Any) -> list[str]:
    config = DataConfig(paths=(str(path),), malformed="skip", **settings)
    return open_all_documents(config, ByteTokenizer())[1].describe()


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("writer", WRITERS)
def test_the_documents_are_those_of_jsonl(
    writer: str, compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run and prepared, with the same split. Texts have newlines, quotes, commas and NUL bytes."""
    documents = [*some_documents(), 'say "hi", then\n"go"\r\n', ",", '"']
    config = DataConfig(held_out=0.3)
    expected = splits(read(write_jsonl(tmp_path / "expected.jsonl", documents), config))
    suffix, encode = WRITERS[writer]
    path = tmp_path / f"a.{suffix}{compression}"
    rows = [{"id": number, "text": each} for number, each in enumerate(documents)]
    path.write_bytes(COMPRESSIONS[compression](encode(rows)))
    found = read(path, config)
    assert splits(found) == expected and len(expected[1]) > 3
    assert splits(read(prepare(tmp_path / "prepared", path, config), config)) == expected
    monkeypatch.setattr(source, "PART_BYTES", 1000)
    monkeypatch.setattr(json_rows, "_BLOCK", 50)
    monkeypatch.setattr(prepared, "SHARD_BYTES", 5000)
    assert splits(read(path, config)) == expected
    assert splits(read(prepare(tmp_path / "shards", path, config), config)) == expected


def test_any_array_is_read(tmp_path: Path) -> None:
    chance = random.Random(0)

    def value(depth: int) -> Any:
        kind = chance.randrange(6)
        if kind == 0:
            return chance.choice([True, None, -1.5e-7, 12345678901234567890, float("-inf")])
        if kind == 1 and depth:
            return [value(depth - 1) for _ in range(chance.randrange(4))]
        if kind == 2 and depth:
            return {chance.choice("abc"): value(depth - 1) for _ in range(chance.randrange(4))}
        return "".join(chance.choice(["a", '"', "\\", "é", "🙂", "\n", "]", "{", ","]) for _ in range(9))

    path = tmp_path / "a.json"
    for _ in range(100):
        values = [value(3) for _ in range(chance.randrange(6))]
        path.write_text("\ufeff" * chance.randrange(2) + json.dumps(values, indent=chance.choice([None, 1])) + "\n")
        assert [found for _, found in json_rows._read_array(File("a", path, "json"))] == values


def test_memory_holds_a_few_rows_of_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(to_csv([{"text": f"{number:04}" * 1000} for number in range(2000)]))
    config = DataConfig()
    (part,) = split_into_parts(File(path.name, path, "csv"), config)
    tracemalloc.start()
    count = sum(len(document.content) for document in read_documents(part, config, Skipped()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 2000 * 4000 and peak < 3_000_000


def test_fields_of_more_than_128_kib_and_of_too_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x" * 200_000
    for suffix, encode in (("json", to_array), ("csv", to_csv)):
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(encode([{"text": text}, {"text": "y"}]))
        assert contents(path) == [text.encode(), b"y"]
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr(json_rows, "_MAX_ARRAY", 1000)
    with pytest.raises(InputError, match="a.json: the array has more than 1,000 characters and must fit in memory"):
        contents(tmp_path / "a.json")
    with pytest.raises(InputError, match="a.csv: a document is larger than"):
        contents(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text('text\n"' + "x\n" * 600 + '"\n')
    with pytest.raises(InputError, match="a.csv, line 2: the row cannot be read .field larger than"):
        contents(tmp_path / "a.csv", DataConfig(malformed="skip"))


DAMAGED = {
    "neither": ("a.json", '{"data": [\n{"text": "a"}]}', "a.json: neither a JSON array nor one JSON object per line"),
    "text": ("a.json", "hello", "a.json: neither a JSON array nor one JSON object per line"),
    "cut in a row": ("a.json", '[{"text": "a"},\n {"text": "b', "a.json, line 2: not valid JSON: Unterminated string"),
    "cut after a row": ("a.json", '[{"text": "a"}\n', "a.json, line 2: a comma or the end of the array is missing"),
    "a quote": ("a.json", '[{"text": "a"},\n{"text: "b"}]', "a.json, line 2: not valid JSON: .*; repair the array"),
    "a comma": ("a.json", '[{"text": "a"}\n{"text": "b"}]', "a.json, line 2: a comma or the end of the array"),
    "two arrays": ("a.json", '[{"text": "a"}]\n[{"text": "b"}]', "a.json, line 2: text follows the end of the array"),
    "an open quote": ("a.csv", 'id,text\n1,a\n2,"b\n3,c\n', "a.csv, line 3: the row cannot be read .unexpected end"),
    "no header": ("a.csv", "a,b\nc,d\n", r"a.csv: no column 'text' among \['a', 'b'\].*the first row is the header"),
    "two columns": ("a.csv", "text,text\na,b\n", "a.csv: several columns are named 'text'"),
    "a bad header": ("a.csv", '"a"b,text\na,b\n', "a.csv, line 1: not valid CSV .*repair the header"),
}


@pytest.mark.parametrize("malformed", ["error", "skip"])
@pytest.mark.parametrize("case", DAMAGED)
def test_damage_that_hides_other_rows_is_never_skipped(case: str, malformed: Any, tmp_path: Path) -> None:
    name, content, message = DAMAGED[case]
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message) as found:
        contents(tmp_path / name, DataConfig(malformed=malformed))
    assert "\n" not in str(found.value)


def test_a_cut_off_compressed_file(tmp_path: Path) -> None:
    for suffix, encode in (("json", to_array), ("csv", to_csv)):
        path = tmp_path / f"a.{suffix}.gz"
        rows = [{"text": str(random.Random(number).random())} for number in range(500)]
        path.write_bytes(gzip.compress(encode(rows))[:-20])
        with pytest.raises(InputError, match=rf"a.{suffix}.gz: cannot be read .*check that it is complete"):
            contents(path, DataConfig(malformed="skip"))


def test_malformed_rows_are_counted_by_reason_with_the_first_as_example(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_bytes(b'id,text\n\n1,"two\nlines"\n2,caf\xe9\n3\n4,"d"e\n5,\n6\n7,"f"g\n8,last\n')
    assert contents(table, DataConfig(malformed="skip")) == [b"two\nlines", b"last"]
    fields = "with a number of fields that differs from the header's"
    assert skipped_in(table) == [
        "1 empty",
        f"1 not UTF-8 (first: {table}, line 5)",
        f"2 not valid CSV (first: {table}, line 7)",
        f"2 {fields} (first: {table}, line 6)",
    ]
    with pytest.raises(InputError, match=r"a.csv, line 5: not UTF-8 .*data.malformed"):
        contents(table)
    array = tmp_path / "a.json"
    array.write_bytes(b'[{"text": "a"}, 1,\n{"text": "caf\xe9"}, [], {"text": 2}, {"other": ""}]')
    assert skipped_in(array) == [
        f"1 not UTF-8 (first: {array}, row 3)",
        f"2 not a JSON object (first: {array}, row 2)",
        f"1 without text in column 'text' (first: {array}, row 5)",
        f"1 without the column 'text' (first: {array}, row 6)",
    ]
    with pytest.raises(InputError, match=r"a.json, row 2: not a JSON object; .*data.malformed"):
        contents(array)


@pytest.mark.parametrize("size", [40, 10**6])
def test_lines_and_rows_are_counted_from_the_start_of_the_file(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any part of the file, compressed, and in the row groups of Parquet."""
    monkeypatch.setattr(source, "PART_BYTES", size)
    monkeypatch.setattr(files, "_BLOCK", 30)
    lines = [json.dumps({"text": f"document {number}"}) for number in range(60)]
    lines[40:40] = ["", '{"text": ']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    for each in (path, tmp_path / "a.jsonl.gz"):
        assert skipped_in(each) == [f"1 not valid JSON (first: {each}, line 42)"]
        with pytest.raises(InputError, match=f"{each.name}, line 42: not valid JSON .Expecting value, column"):
            contents(each)
    parquet = write_parquet(tmp_path / "a.parquet", [*["x"] * 30, None, "y"])  # row groups of 7 rows
    assert skipped_in(parquet) == [f"1 without text in column 'text' (first: {parquet}, row 31)"]
    (tmp_path / "a.txt").write_bytes(b"one\ntwo<|end|>three\nfour<|end|>\ncaf\xe9")
    with pytest.raises(InputError, match=r"a.txt, line 3: not UTF-8"):
        contents(tmp_path / "a.txt", DataConfig(separator="<|end|>"))


def test_preparing_in_shards_counts_as_a_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(60)]
    for number in (20, 35, 50):
        lines[number] = "{"
    lines[30], lines[31] = "[1]", '{"text": ""}'
    for name in ("a", "b"):  # files of the same name: the example must name the right one
        (tmp_path / name).mkdir()
        path = tmp_path / name / "c.jsonl"
        path.write_text("\n".join(lines if name == "b" else lines[:15]))
    monkeypatch.setattr(source, "PART_BYTES", 100)
    monkeypatch.setattr(prepared, "SHARD_BYTES", 150)
    config = DataConfig(malformed="skip")
    pattern = tmp_path / "*" / "c.jsonl"
    folder = prepare(tmp_path / "prepared", pattern, config)
    files = find_files(str(pattern), config)
    shards = prepared.group_into_shards(files, [split_into_parts(file, config) for file in files])
    found = prepared.add_skipped(prepared.read_shard_records(folder), shards).describe()
    assert found == skipped_in(pattern) and len(shards) > 5
    assert found == [
        "1 empty",
        f"1 not a JSON object (first: {path}, line 31)",
        f"3 not valid JSON (first: {path}, line 21)",
    ]
    records = (folder / prepared.SHARDS).read_text()
    assert str(tmp_path) not in records  # the place of the files does not change the prepared bytes


def test_a_folder_gives_json_and_csv_only_if_they_are_named(tmp_path: Path) -> None:
    """A file such as dataset_info.json beside a corpus must not change it."""
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    for name in ("b.json", "c.csv", "d.json.gz"):
        (tmp_path / name).write_bytes(b"")

    def names(pattern: str, **settings: Any) -> list[str]:
        return [file.name for file in find_files(str(tmp_path / pattern), replace(DataConfig(), **settings))]

    assert names("") == ["a.jsonl"]
    assert names("", format="json") == ["b.json", "d.json.gz"] and names("", format="csv") == ["c.csv"]
    assert names("*.[jc]s*") == ["a.jsonl", "b.json", "c.csv", "d.json.gz"]
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(InputError, match=r"b.json, are read only if they are named; name them with a glob"):
        names("")
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / "a.py").touch()
    with pytest.raises(InputError, match=r"the folder has no file with a suffix of \.txt, .*correct the path, or set"):
        names("")
    assert names("", format="text") == ["a.py"]


def test_the_corpus_of_known_files_never_changes(tmp_path: Path) -> None:
    """A run would not resume. The hashes are those of the version before JSON arrays and CSV."""
    documents = [f"document {number} " * (number % 7 + 1) + "é🙂\n" for number in range(60)]
    config = DataConfig(held_out=0.2)
    jsonl, parquet = write_jsonl(tmp_path / "a.jsonl", documents), write_parquet(tmp_path / "a.parquet", documents)
    (tmp_path / "a.txt").write_text("<|end|>".join(documents))
    for path, settings, expected in (
        (jsonl, config, "102a0bb28f8f00065511e1b1e84b6f957199e1da61e3c0abcc639d077897b620"),
        (parquet, config, "3c6e27e873f53702b7c1b555a5b5305f2cc07120e84bd4f06b1ab445bd8fc867"),
        (
            tmp_path / "a.txt",
            replace(config, separator="<|end|>"),
            "102a0bb28f8f00065511e1b1e84b6f957199e1da61e3c0abcc639d077897b620",
        ),
    ):
        corpus = read(path, settings)
        assert corpus.sha256 == expected, path
        held_out = [int(bytes(each[1:-1]).split()[1]) for each in splits(corpus)[1]]
        assert held_out == [6, 8, 10, 11, 12, 33, 35, 37, 45, 46, 54, 55, 58], path
