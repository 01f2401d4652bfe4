"""Corpora: all formats give the same tokens, and unreadable documents are rejected, or skipped and counted."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import documents_of, prepare, read, some_documents, splits
from texts import train_tokenizer, write_jsonl, write_megatron, write_parquet, write_text

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading import source
from jaxopt_llm.data.reading.files import find_files
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.corpus import open_all_documents, open_corpus
from jaxopt_llm.data.tokens.pieces import fingerprint_file
from jaxopt_llm.data.tokens.tokenizer import Tokenizer, load_tokenizer


def every_document(path: Path, config: DataConfig) -> list[list[int]]:
    training, held_out = splits(read(path, config))
    return training + held_out


def expected_documents(documents: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    encoded = [ids.tolist() for ids in tokenizer.encode([each.encode() for each in documents])]
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    return [[*bos, *ids, tokenizer.eos] for ids in encoded]


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    if request.param == "bytes":
        return DataConfig(held_out=0.3)
    file = train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", some_documents())
    return DataConfig(held_out=0.3, tokenizer=str(file))


def test_every_format_holds_the_same_tokens(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = some_documents()
    expected = expected_documents(documents, load_tokenizer(config))
    arrays = [np.array(each) for each in expected]
    text = read(write_text(tmp_path / "text", documents), config)
    jsonl = write_jsonl(tmp_path / "a.jsonl", documents)
    texts = {
        "jsonl": jsonl,
        "compressed": write_jsonl(tmp_path / "a.jsonl.gz", documents),
        "parquet": write_parquet(tmp_path / "a.parquet", documents),
        "prepared": prepare(tmp_path / "prepared", jsonl, config),
    }
    monkeypatch.setattr(source, "PART_BYTES", 1000)
    monkeypatch.setattr(prepared, "SHARD_BYTES", 5000)
    texts["prepared in shards"] = prepare(tmp_path / "shards", jsonl, config)
    assert len((texts["prepared in shards"] / prepared.SHARDS).read_text().splitlines()) > 3
    training, held_out = splits(text)
    assert len(held_out) > 3 and sorted([*training, *held_out]) == sorted(expected)
    assert [each for each in expected if each in training] == training
    for name, path in texts.items():
        assert splits(read(path, config)) == (training, held_out), name
    np.save(tmp_path / "a.npy", np.concatenate(arrays))
    tokens = {
        "numpy": tmp_path / "a.npy",
        "megatron": write_megatron(tmp_path / "a_document", arrays),
        "megatron, 32 bits": write_megatron(tmp_path / "b_document", arrays, "<i4", 4).with_suffix(".bin"),
    }
    for name, path in tokens.items():
        assert len(splits(read(path, config))[1]) > 3
        assert sorted(every_document(path, config)) == sorted(expected), name


@pytest.mark.parametrize("size", [1, 7, 50, 333, 10**6])
def test_jsonl_is_read_whole_wherever_its_parts_are_cut(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [f"{i}" * (i % 5 + 1) for i in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n", 7).removesuffix(b"\n"))
    monkeypatch.setattr(source, "PART_BYTES", size)
    found = every_document(path, DataConfig(held_out=0.2))
    assert sorted(found) == sorted([256, *each.encode(), 257] for each in documents)


def test_a_glob_and_a_folder_take_what_they_say(tmp_path: Path) -> None:
    for name in (
        "a/1.jsonl",
        "a/2.jsonl",
        "a/b/3.parquet",
        "a/b/notes.rst",
        "a/.hidden/4.jsonl",
        "c.txt",
        "a/m.idx",
        "a/m.bin",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")

    def names(pattern: str, **settings: Any) -> list[str]:
        return [f"{file.name} {file.format}" for file in find_files(str(tmp_path / pattern), DataConfig(**settings))]

    assert names("a") == ["1.jsonl jsonl", "2.jsonl jsonl", "b/3.parquet parquet", "m.idx megatron"]
    assert names("a", format="jsonl") == ["1.jsonl jsonl", "2.jsonl jsonl"]
    assert len(names("a", format="text")) == 6
    assert names("*/*.jsonl") == ["1.jsonl jsonl", "2.jsonl jsonl"]
    assert names("**/*.parquet") == ["3.parquet parquet"]
    assert names("a/m") == names("a/m.*") == names("a/m.bin") == ["m.idx megatron"]
    assert names("a/b/notes.rst", format="text") == ["notes.rst text"]
    for pattern, message in (
        ("*.jsonl", "no such file"),
        ("nothing", "no such file"),
        ("a/b/notes.rst", "data.format"),
    ):
        with pytest.raises(InputError, match=f"data.paths .*{message}"):
            names(pattern)


LINES = {
    "not UTF-8": (b'{"text": "caf\xe9"}', "not UTF-8"),
    "half a pair": (b'{"text": "\\ud83d"}', "not UTF-8"),
    "cut": (b'{"text": "caf', "not valid JSON"),
    "another type": (b'{"text": 3}', "without text in column 'text'"),
    "null": (b'{"text": null}', "without text in column 'text'"),
    "no object": (b"[1]", "not a JSON object"),
}


@pytest.mark.parametrize("case", LINES)
def test_malformed_lines_are_rejected_or_counted(case: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": ""}\n' + LINES[case][0] + b'\n{"text": "two"}\n')
    with pytest.raises(InputError, match=r"a.jsonl, line 3: .*data.malformed"):
        read(path, DataConfig())
    reason = LINES[case][1]
    skipping = read(path, DataConfig(malformed="skip"))
    assert skipping.skipped.counts == Counter({reason: 1, "empty": 1})
    assert f"; 1 empty; 1 {reason} (first: {path}, line 3)" in str(skipping)
    replacing = read(path, DataConfig(malformed="replace"))
    replaced = reason == "not UTF-8"
    assert replacing.skipped.counts == Counter({"not UTF-8, replaced" if replaced else reason: 1, "empty": 1})
    contents = {bytes(each[1:-1]).decode() for each in every_document(path, DataConfig(malformed="replace"))}
    assert {"one", "two"} < contents if replaced else {"one", "two"} == contents
    if case == "not UTF-8":
        assert contents == {"one", "two", "caf\N{REPLACEMENT CHARACTER}"}


def test_malformed_text_and_parquet_are_treated_alike(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    content = [b"one", b"caf\xe9", b"", b"two", None]
    parquet.write_table(pyarrow.table({"text": pyarrow.array(content, pyarrow.binary())}), tmp_path / "a.parquet")
    for number, each in enumerate(content[:-1]):
        (tmp_path / f"{number}.txt").write_bytes(each)
    for path, where, others in (
        (tmp_path / "*.txt", "1.txt", {}),
        (tmp_path / "a.parquet", "row 2", {"without text in column 'text'": 1}),
    ):
        with pytest.raises(InputError, match=f"{where}.*: not UTF-8"):
            read(path, DataConfig())
        assert read(path, DataConfig(malformed="skip")).skipped.counts == {"not UTF-8": 1, "empty": 1, **others}
        assert read(path, DataConfig(malformed="replace")).skipped.counts == {
            "not UTF-8, replaced": 1,
            "empty": 1,
            **others,
        }


def test_a_missing_or_wrong_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a.jsonl.*no column 'text' among \['body', 'id'\].*data.text_field"):
        read(write_jsonl(tmp_path / "a.jsonl", ["x", "y"], "body"), DataConfig())
    path = write_parquet(tmp_path / "a.parquet", ["x", "y"], "body")
    with pytest.raises(InputError, match=r"a.parquet: no column 'text' among \['id', 'body'\].*data.text_field"):
        read(path, DataConfig())
    with pytest.raises(InputError, match="column 'id' cannot be read as text"):
        read(path, DataConfig(text_field="id"))
    assert len(every_document(path, DataConfig(text_field="body"))) == 2


def test_a_column_that_no_row_has_is_rejected_with_any_policy(tmp_path: Path) -> None:
    """A misspelt name would skip all rows of a corpus. Single rows without the column are skipped and counted."""
    skipping = DataConfig(malformed="skip", held_out=0.3)
    many = write_jsonl(tmp_path / "many.jsonl", [f"{i}" for i in range(200)], "body")
    few = write_jsonl(tmp_path / "few.jsonl", ["x", "y"], "body")
    late = tmp_path / "late.jsonl"
    late.write_bytes(many.read_bytes() + b'{"text": "a"}\n')
    mixed = tmp_path / "mixed.jsonl"
    for path in (many, few, late):
        with pytest.raises(InputError, match=rf"{path.name}.*(no|before it has a) column 'text'.*data.text_field"):
            read(path, skipping)
    for path in (many, few):
        mixed.write_bytes(b'{"text": "a"}\n' + path.read_bytes() + b'{"text": "b"}\n')
        assert read(mixed, skipping).skipped.counts == {"without the column 'text'": 200 if path == many else 2}


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert sorted(bytes(each[1:-1]) for each in every_document(path, DataConfig())) == [b"one", b"two"]


def test_a_character_across_blocks_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_BLOCK", 4)
    text = "aé∂🙂" * 5
    path = write_jsonl(tmp_path / "a.jsonl", [text, "x"])
    assert sorted(bytes(each[1:-1]).decode() for each in every_document(path, DataConfig())) == [text, "x"]
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xff" + text.encode())
    with pytest.raises(InputError, match=f"not UTF-8 .invalid start byte at byte {len(text.encode())} of the text"):
        read(tmp_path / "a.txt", DataConfig())


def test_a_file_is_read_once(tmp_path: Path) -> None:
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [name, name * 2])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    for paths in (("*.jsonl",), ("[ab].jsonl", "a.jsonl"), (".", "b.jsonl"), ("a.jsonl", "./a.jsonl")):
        config = DataConfig(paths=tuple(f"{tmp_path}/{path}" for path in paths))
        for opened in (open_corpus, open_all_documents):
            with pytest.raises(InputError, match=r"both read .*/[ab]\.jsonl, so its documents would occur twice"):
                opened(config, load_tokenizer(config))


def test_a_prepared_corpus_is_found_in_a_folder_and_by_a_glob(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    write_jsonl(tmp_path / "texts" / "a.jsonl", ["one", "two"])
    prepare(tmp_path / "texts" / "ready", write_jsonl(tmp_path / "b.jsonl", ["three", "four"]), DataConfig())
    for pattern in ("texts", "texts/**", "texts/*"):
        names = [f"{f.name} {f.format}" for f in find_files(str(tmp_path / pattern), DataConfig())]
        assert names == ["a.jsonl jsonl", "ready prepared"], pattern
    assert len(every_document(tmp_path / "texts", DataConfig())) == 4
    (only,) = find_files(str(tmp_path / "texts"), DataConfig(format="prepared"))
    assert only.name == "ready"
    assert [f.name for f in find_files(str(tmp_path / "texts"), DataConfig(format="text"))] == ["a.jsonl"]


def test_a_wrong_index_is_rejected_when_it_is_read(tmp_path: Path) -> None:
    arrays = [np.arange(5), np.arange(7), np.arange(9), np.arange(3)]
    sequences, header = 8, 34
    pointers, boundaries = header + 4 * sequences, header + 12 * sequences
    for name, at, change, message in (
        ("gap", pointers + 8 * 3, 6, "sequences are not contiguous"),
        ("falling", boundaries + 8 * 2, 3, "boundaries are not in increasing order|index is damaged"),
        ("outside", boundaries + 8 * 2, 5, "sequences that do not exist"),
        ("first", boundaries, 1, "do not cover 8 sequences"),
        ("last", boundaries + 8 * 4, 1, "do not cover 8 sequences"),
    ):
        index = write_megatron(tmp_path / name, arrays).with_suffix(".idx")
        content = bytearray(index.read_bytes())
        content[at] += change
        index.write_bytes(content)
        with pytest.raises(InputError, match=f"{name}.*{message}"):
            every_document(index, DataConfig(held_out=0.3))


def test_wrong_document_ends_are_rejected_when_they_are_read(tmp_path: Path) -> None:
    folder = prepare(tmp_path / "prepared", write_jsonl(tmp_path / "a.jsonl", list("abcdefgh")), DataConfig())
    file = prepared.array_path(folder, "ends")
    whole = np.fromfile(file, "<i8")
    for document in range(8):
        changed = whole.copy()
        changed[document] ^= 2**40
        changed.tofile(file)
        message = "the index is damaged" if document < 7 else "the last document does not end at the last token"
        with pytest.raises(InputError, match=message):
            every_document(folder, DataConfig())


def test_damaged_files_are_named(tmp_path: Path) -> None:
    arrays = [np.arange(5), np.arange(7)]
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    (tmp_path / "b.npy").write_bytes(b"x")
    write_jsonl(tmp_path / "a.jsonl.gz", ["x" * 999, "y"])
    write_parquet(tmp_path / "a.parquet", ["x", "y"])
    for name in ("cut", "bin", "magic", "lonely"):
        write_megatron(tmp_path / name, arrays)
    (tmp_path / "lonely.bin").unlink()
    (tmp_path / "magic.idx").write_bytes(b"IDX" + (tmp_path / "magic.idx").read_bytes()[3:])
    for name, kept in (("cut.idx", -4), ("bin.bin", -2), ("a.jsonl.gz", -20), ("a.parquet", -9)):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept])
    cases = {
        "a.npy": "one-dimensional",
        "b.npy": "not a readable .npy",
        "a.jsonl.gz": "check that it is complete",
        "a.parquet": "not a readable Parquet",
        "cut": "cut.idx is truncated",
        "bin": "bin.bin is truncated: it has 11 tokens of 12",
        "magic": "not an index",
        "lonely": "lonely.bin: the file is missing",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message):
            read(tmp_path / name, DataConfig())


def test_an_incomplete_corpus_or_one_of_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    documents = some_documents()
    file = str(train_tokenizer(tmp_path / "tokenizer.json", documents))
    folder = prepare(tmp_path / "prepared", write_jsonl(tmp_path / "a.jsonl", documents), DataConfig(tokenizer="bytes"))
    with pytest.raises(InputError, match="prepared with another tokenizer .data.tokenizer=bytes"):
        read(folder, DataConfig(tokenizer=file))
    for path in [prepared.array_path(folder, name) for name in ("tokens", "ends", "keys")]:
        content = path.read_bytes()
        path.write_bytes(content[:-8])
        with pytest.raises(InputError, match=f"{path.name} is truncated"):
            read(folder, DataConfig())
        path.write_bytes(content)
    manifest = (folder / prepared.MANIFEST).read_text()
    (folder / prepared.MANIFEST).write_text(manifest[:-40])
    with pytest.raises(InputError, match="manifest.json is damaged"):
        read(folder, DataConfig())
    (folder / prepared.MANIFEST).unlink()
    with pytest.raises(InputError, match="not finished: run jaxopt_llm.prepare again"):
        read(folder, DataConfig())


@pytest.mark.parametrize("suffix", ["jsonl", "npy", "megatron"])
def test_the_hash_depends_on_tokens_and_not_on_the_path(suffix: str, tmp_path: Path) -> None:
    """Token files are hashed by samples and by their size."""
    found = []
    for number, documents in enumerate(
        (["one", "two"], ["one", "two"], ["one", "twO"], ["on", "etwo"], ["one", "two", "x"])
    ):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / f"a.{suffix}"
        arrays = [np.array([256, *each.encode(), 257]) for each in documents]
        if suffix == "npy":
            np.save(path, np.concatenate(arrays))
        elif suffix == "megatron":
            path = write_megatron(path, arrays).with_suffix(".idx")
        else:
            write_jsonl(path, documents)
        found.append(read(path, DataConfig()).sha256)
    assert found[0] == found[1] and len(set(found)) == 4


def test_a_large_file_is_sampled_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    path, content = tmp_path / "tokens", bytearray(10**7)
    path.write_bytes(content)
    found = [fingerprint_file(path)]
    for place in (0, len(content) // 2, len(content) - 1):
        changed = content.copy()
        # Longer than the distance of two samples.
        changed[place : place + 200_000] = bytes([1]) * len(changed[place : place + 200_000])
        path.write_bytes(changed)
        found.append(fingerprint_file(path))
    assert len(set(found)) == 4


def test_weights_and_sources(tmp_path: Path) -> None:
    paths = tuple(str(write_jsonl(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(20)])) for name in "abc")
    config = DataConfig(paths=paths, held_out=0.2)
    tokenizer = load_tokenizer(config)
    (whole,) = open_corpus(config, tokenizer).sources  # one source: an epoch reads every token once
    mixed = open_corpus(replace(config, weights=(3.0, 0.0, 1.0)), tokenizer)
    assert [(each.name, each.weight) for each in mixed.sources] == [(paths[0], 3.0), (paths[2], 1.0)]
    training = documents_of(whole.training)
    assert [d for each in mixed.sources for d in documents_of(each.training)] == [
        d for d in training if d[1] != ord("b")
    ]
    assert not any(each[1] == ord("b") for each in documents_of(mixed.held_out))


def test_invalid_settings() -> None:
    for settings, message in (
        ({"paths": ("a", "b"), "weights": (1.0,)}, "1 values for 2 data.paths"),
        ({"paths": ("a", "b"), "weights": (1.0, -1.0)}, "weights must not be negative"),
        ({"paths": ("a", "b"), "weights": (0.0, 0.0)}, "all weights are 0, so no data would be read"),
        ({"paths": ("a", "a")}, "a more than once"),
    ):
        (problem,) = DataConfig(**settings).problems()
        assert message in problem


def test_a_separator_divides_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one<|end|>two\n<|end|>")
    config = DataConfig(separator="<|end|>")
    assert sorted(bytes(each[1:-1]) for each in every_document(tmp_path / "a.txt", config)) == [b"one", b"two\n"]
    assert read(tmp_path / "a.txt", config).skipped.counts == {"empty": 1}


@pytest.mark.parametrize("documents", [[], ["alone"], ["", "alone"]])
def test_too_few_documents(documents: list[str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="training and evaluation need at least one each|0 documents; add documents"):
        read(write_jsonl(tmp_path / "a.jsonl", documents), DataConfig())


def test_at_least_one_document_is_held_out(tmp_path: Path) -> None:
    corpus = read(write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"]), DataConfig(held_out=1e-9))
    assert (corpus.sources[0].training.documents, corpus.held_out.documents) == (2, 1)


def test_never_all_documents_are_held_out(tmp_path: Path) -> None:
    corpus = read(write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"]), DataConfig(held_out=1 - 1e-9))
    assert (corpus.sources[0].training.documents, corpus.held_out.documents) == (1, 2)
