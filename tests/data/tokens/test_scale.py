"""Resources that must not grow with a corpus: file descriptors, memory per document, bytes read of a file."""

import io
import os
import resource
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from texts import write_jsonl, write_megatron

from jaxopt_llm.config import DataConfig
from jaxopt_llm.data.reading import files, source
from jaxopt_llm.data.reading.skipped import Skipped
from jaxopt_llm.data.tokens import pieces, prepared
from jaxopt_llm.data.tokens.corpus import open_corpus
from jaxopt_llm.data.tokens.indexed import DelimitedPiece, open_megatron
from jaxopt_llm.data.tokens.pieces import (
    FileArray,
    IndexedPiece,
    Piece,
    TokenStream,
    hash_indices,
    join_all,
    join_ranges,
    split_held_out,
)
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer


@contextmanager
def descriptors(most: int) -> Iterator[None]:
    """Limit the file descriptors to the open ones and `most` more."""
    open_now = max(int(name) for name in os.listdir("/dev/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def peak(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    work()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def array(path: Path, values: np.ndarray) -> FileArray:
    values.tofile(path)
    return FileArray(path, values.dtype, values.size)


def test_more_files_than_descriptors(tmp_path: Path) -> None:
    for number in range(200):
        np.save(tmp_path / f"{number:03}.npy", np.array([number, number, 257], "<u2"))
    with descriptors(pieces._MAX_OPEN + 20):
        corpus = open_corpus(DataConfig(paths=(str(tmp_path),)), ByteTokenizer())
        for stream in (*(source.training for source in corpus.sources), corpus.held_out):
            for _ in range(2):
                assert stream.read(0, stream.size)[2::3].tolist() == [257] * (stream.size // 3)


def test_a_prepared_corpus_with_many_shards_has_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from corpora import prepare

    monkeypatch.setattr(source, "PART_BYTES", 50)
    monkeypatch.setattr(prepared, "SHARD_BYTES", 50)
    of = write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(300)])
    folder = prepare(tmp_path / "prepared", of, DataConfig())
    assert len((folder / prepared.SHARDS).read_text().splitlines()) > 200
    assert len(list(folder.iterdir())) == 6


DOCUMENTS = 2**18


def indexed(folder: Path) -> Piece:
    ends = np.arange(1, DOCUMENTS + 1) * 3
    arrays = (np.zeros(ends[-1], "<u2"), ends, hash_indices(0, DOCUMENTS))
    return IndexedPiece("indexed", *(array(folder / str(number), values) for number, values in enumerate(arrays)))


def megatron(folder: Path) -> Piece:
    write_megatron(folder / "a", np.split(np.zeros(DOCUMENTS * 2, np.int64), DOCUMENTS))
    return open_megatron("megatron", folder / "a.idx")


@pytest.mark.parametrize("make", [indexed, megatron])
def test_opening_needs_memory_only_for_held_out_documents(
    make: Callable[[Path], Piece], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = make(tmp_path)
    monkeypatch.setattr(pieces, "_KEYS", 2**10)
    streams: list[TokenStream] = []

    def work() -> None:
        streams.extend(join_ranges([piece], runs) for runs in split_held_out([piece], 0.002))

    assert peak(work) < DOCUMENTS  # bytes: less than one per document, 16 per held-out document
    training, held_out = streams
    assert training.size + held_out.size == piece.size
    assert training.documents + held_out.documents == DOCUMENTS and 300 < held_out.documents < 800
    assert peak(lambda: training.document_starts(training.size // 2, 1000)) < 2**16


class Counting:
    """Array that counts the elements read from it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.size, self.dtype, self.read = values, values.size, values.dtype, 0

    def __getitem__(self, where: slice) -> np.ndarray:
        found = self.values[where]
        self.read += found.size
        return found


def test_a_numpy_file_is_read_only_where_documents_are_held_out() -> None:
    values = np.ones(2**23, np.uint16)
    values[99::100] = 0
    piece = DelimitedPiece("a.npy", Counting(values), 0)  # type: ignore[arg-type]
    training, held_out = (join_ranges([piece], runs) for runs in split_held_out([piece], 0.05))
    assert piece.tokens.read < values.size / 4  # type: ignore[union-attr]
    assert 0.03 < held_out.size / values.size < 0.07
    assert training.size + held_out.size == values.size and training.documents is None
    for part in (training, held_out):
        assert part.document_starts(0, part.size).tolist() == list(range(0, part.size, 100))


def test_a_numpy_file_that_grows_keeps_its_split() -> None:
    """This holds up to the next power of two."""
    values = np.arange(1, 8001) % 7
    held_out = []
    for size in (4200, 8000):
        piece = DelimitedPiece("a.npy", values[:size], 0)
        _, runs = split_held_out([piece], 0.1)
        held_out.append({int(begin) for begin in piece.group_starts(runs[0].ravel())})
    assert len(held_out[0]) > 50 and held_out[0] - {4200} <= held_out[1]


def test_preparing_holds_a_few_documents_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [f"{number:04}" * 1000 for number in range(1000)]
    compressed = write_jsonl(tmp_path / "a.jsonl.gz", documents)
    text = tmp_path / "a.txt"
    text.write_text("<|end|>".join(documents))
    monkeypatch.setattr(pieces, "_BATCH_BYTES", 2**16)
    monkeypatch.setattr(source, "PART_BYTES", 2**30)
    config = DataConfig(separator="<|end|>")
    found = []
    for number, (path, kind) in enumerate(((compressed, "jsonl"), (text, "text"))):
        file = source.File(path.name, path, kind)
        (parts,) = [source.split_into_parts(file, config)]
        assert peak(lambda n=number, p=parts: prepared.write_shard(tmp_path, n, p, config, ByteTokenizer())) < 4_000_000
        found.append((tmp_path / f"shard-{number:05}.tokens").read_bytes())
    assert found[0] == found[1] and len(found[0]) == 2 * 4002 * 1000


@pytest.mark.parametrize("size", [1, 7, 50, 333, 10**6])
@pytest.mark.parametrize("separator", ["\n\n", "aba", "<|end|>", "x"])
def test_text_is_read_whole_wherever_its_parts_are_cut(
    separator: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separators may overlap: the split must be that of the whole file."""
    random = np.random.default_rng(0)
    alphabet = ["\n", "a", "b", "x", separator, "ab", "é"]
    text = "".join(alphabet[i] for i in random.integers(0, len(alphabet), 600))
    (tmp_path / "a.txt").write_text(text + "\n" * 30 + "ab" * 20 + "." + separator)
    content = (tmp_path / "a.txt").read_bytes()
    config = DataConfig(separator=separator)
    monkeypatch.setattr(source, "PART_BYTES", size)
    monkeypatch.setattr(source, "_BLOCK", 40)
    file = source.File("a.txt", tmp_path / "a.txt", "text")
    skipped = Skipped()
    found = [
        d.content
        for part in source.split_into_parts(file, config)
        for d in source.read_documents(part, config, skipped)
    ]
    expected = content.split(separator.encode())
    assert found == [each for each in expected if each]
    assert skipped.counts["empty"] == sum(not each for each in expected)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_one_document_across_all_parts_is_read_about_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [0]

    class Stream(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            found = super().read(size)
            read[0] += len(found)
            return found

        def readline(self, size: int | None = -1) -> bytes:
            found = super().readline(size)
            read[0] += len(found)
            return found

    def opened(file: files.File) -> BinaryIO:
        return Stream(file.path.read_bytes())

    monkeypatch.setattr(source, "PART_BYTES", 1000)
    monkeypatch.setattr(source, "_BLOCK", 100)
    monkeypatch.setattr(files, "open_stream", opened)
    path = tmp_path / name
    path.write_text('{"text": "' + "x" * 100_000 + '"}\n{"text": "y"}\n\n\n')
    file, config = files.File(name, path, files.SUFFIXES[path.suffix]), DataConfig(separator="\n\n")
    parts = source.split_into_parts(file, config)
    assert len(parts) == 101
    found = [d.content for part in parts for d in source.read_documents(part, config, Skipped())]
    assert max(map(len, found)) >= 100_000
    assert read[0] < 3 * path.stat().st_size


def test_a_document_too_large_for_memory_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 1000)
    (tmp_path / "a.txt").write_text("x" * 1001)
    write_jsonl(tmp_path / "a.jsonl", ["x" * 1001])
    write_jsonl(tmp_path / "a.jsonl.gz", ["x" * 1001])
    for name, separator in (("a.txt", ""), ("a.txt", "<|end|>"), ("a.jsonl", ""), ("a.jsonl.gz", "")):
        with pytest.raises(source.InputError, match=rf"{name}.*a document is larger than.*data.separator"):
            config = DataConfig(paths=(str(tmp_path / name),), separator=separator)
            open_corpus(config, ByteTokenizer())


def test_a_whole_stream_has_every_document() -> None:
    piece = IndexedPiece("a", np.arange(6), np.array([2, 2, 6]), np.zeros(3, np.uint64))
    stream = join_all([piece, piece])
    assert (stream.size, stream.documents) == (12, 6)
    assert stream.document_starts(0, 12).tolist() == [0, 2, 2, 6, 8, 8]
    assert stream.document_starts(3, 4).tolist() == [6] and stream.describe_position(7) == "a, document 0"
