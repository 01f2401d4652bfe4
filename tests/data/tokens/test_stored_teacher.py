"""What a teacher says of the tokens of a prepared corpus: kept by shard, read with rows, verified."""

import json
from pathlib import Path
from typing import Any

import corpora
import numpy as np
import pytest
from chats import write_tokenizer

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading import source
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.prepared import verify_corpus
from jaxopt_llm.data.tokens.scored import TeacherWriter

KINDS = ("text", "chat")


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "SHARD_BYTES", 2**9)
    monkeypatch.setattr(source, "PART_BYTES", 2**9)


@pytest.fixture(params=KINDS)
def given(tmp_path: Path, request: pytest.FixtureRequest, small_shards: None) -> tuple[Path, DataConfig]:
    """Write texts or conversations for several shards. Return their file and the settings of `prepare`."""
    texts, path = ["7" * (n % 23 + 1) + str(n) for n in range(30)], tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    if request.param == "chat":
        turns = [[("user", "count"), ("assistant", text), ("user", "and"), ("assistant", text[:2])] for text in texts]
        rows = [{"messages": [dict(zip(("role", "content"), turn, strict=True)) for turn in each]} for each in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, DataConfig(content=request.param, tokenizer=str(write_tokenizer(tmp_path / "tokenizer")))


@pytest.mark.parametrize("long_documents", ["split", "cut", "drop"])
def test_a_row_has_what_the_teacher_says_of_its_targets(
    given: tuple[Path, DataConfig], tmp_path: Path, long_documents: Any
) -> None:
    path, config = given
    corpus = corpora.read(corpora.prepare(tmp_path / "taught", path, config, teacher="the model"), config)
    assert corpus.held_out is not None
    counted = 0
    for stream in (corpus.sources[0].training, corpus.held_out):
        rows = PackedRows(stream, 60, 512, long_documents=long_documents)
        for index in range(len(rows)):
            row, epoch = rows[index], rows.read(index, (3, 1))
            for each in (row, epoch):
                assert each.teacher_ids.shape == (60, 3) and each.teacher_log_probabilities.shape == (60, 4)
                assert (each.teacher_ids.dtype, each.teacher_log_probabilities.dtype) == (np.int32, np.float16)
                inside = each.loss_mask
                np.testing.assert_array_equal(each.teacher_ids[inside, 0], each.targets[inside])
                assert not np.any(each.teacher_ids[~inside]) and not np.any(each.teacher_log_probabilities[~inside])
            counted += int(row.loss_mask.sum())
            if long_documents != "split":
                places = -row.teacher_log_probabilities[row.loss_mask, -1]
                np.testing.assert_array_equal(places, row.positions[row.loss_mask] + 1)
    if long_documents == "split":
        (piece,) = corpus.held_out.pieces
        assert counted == piece.teacher.values.size
    plain = corpora.read(corpora.prepare(tmp_path / "plain", path, config), config)
    assert not plain.held_out.holds("teacher") and plain.sha256 != corpus.sha256
    assert not corpus.held_out.without("teacher").holds("teacher")


def test_a_killed_teacher_continues_with_the_next_shard(given: tuple[Path, DataConfig], tmp_path: Path) -> None:
    path, config = given
    whole = corpora.prepare(tmp_path / "whole", path, config, teacher="the model")
    names = "teacher.bin", "teacher_ends.bin", prepared.TEACHER
    expected = {name: (whole / name).read_bytes() for name in names}
    killed = corpora.prepare(tmp_path / "killed", path, config)
    while True:
        writer = TeacherWriter(killed, "<u2", 3, 512)
        if len(writer) == len(writer.tokens):
            break
        corpora.teach(writer)
        for name in names:  # a kill during the next shard
            with (killed / name).open("ab") as file:
                file.write(b"half")
    assert len(writer) > 1 and {name: (killed / name).read_bytes() for name in names} == expected
    (killed / "teacher.bin").write_bytes(expected["teacher.bin"][:-1])
    with pytest.raises(InputError, match=r"teacher.bin is truncated: it has \d+ bytes of \d+; remove"):
        TeacherWriter(killed, "<u2", 3, 512)


def test_a_changed_byte_is_found(given: tuple[Path, DataConfig], tmp_path: Path) -> None:
    path, config = given
    taught = corpora.prepare(tmp_path / "taught", path, config, teacher="the model")
    plain = corpora.prepare(tmp_path / "plain", path, config)
    (shards, size), (_, size_of_plain) = (verify_corpus(each, 1) for each in (taught, plain))
    added = sum((taught / name).stat().st_size for name in ("teacher.bin", "teacher_ends.bin"))
    assert shards > 1 and size == size_of_plain + added
    for name in ("teacher", "teacher_ends"):
        file = taught / f"{name}.bin"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InputError, match=rf"is damaged: bytes [\d,]+ to [\d,]+ of {name}.bin, shard \d+"):
            verify_corpus(taught, 1)
        file.write_bytes(content[:-4])
        with pytest.raises(InputError, match=rf"{name}.bin is truncated or belongs to another corpus"):
            corpora.read(taught, config)
        file.write_bytes(content)
    manifest = taught / prepared.MANIFEST
    left = {name: value for name, value in json.loads(manifest.read_text()).items() if name != "teacher"}
    manifest.write_text(json.dumps(left))
    with pytest.raises(InputError, match="has no log-probabilities of its teacher: prepare it again"):
        corpora.read(taught, config)


def test_ids_take_as_few_bytes_as_the_vocabulary_allows() -> None:
    sizes = [prepared.teacher_dtype(64, size).itemsize for size in (2**16, 2**16 + 1)]
    assert sizes == [64 * 2 + 65 * 2, 64 * 4 + 65 * 2]
