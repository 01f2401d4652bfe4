"""Log-probabilities by a reference model in a prepared corpus: kept by shard, read with documents, verified."""

import json
from dataclasses import replace
from pathlib import Path

import corpora
import numpy as np
import pytest
from chats import write_tokenizer

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading import source
from jaxopt_llm.data.tokens import prepared
from jaxopt_llm.data.tokens.prepared import verify_corpus
from jaxopt_llm.data.tokens.scored import LogProbabilityWriter

DOCUMENTS = 80


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, DataConfig]:
    """Write pairs for several shards. Return their file and the settings with which they are prepared."""
    monkeypatch.setattr(prepared, "SHARD_BYTES", 2**8)
    monkeypatch.setattr(source, "PART_BYTES", 2**8)
    rows = [{"prompt": f"count to {n}", "chosen": "1 " * (n % 9 + 1), "rejected": "no"} for n in range(DOCUMENTS // 2)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, DataConfig(content="preference", tokenizer=str(write_tokenizer(tmp_path / "tokenizer")))


def test_documents_are_read_with_their_log_probabilities(given: tuple[Path, DataConfig], tmp_path: Path) -> None:
    path, config = given
    corpus = corpora.read(corpora.prepare(tmp_path / "compared", path, config, "the model", limit=7), config)
    assert corpus.held_out is not None
    found = []
    for stream in (corpus.sources[0].training, corpus.held_out):
        (piece,) = stream.pieces
        assert piece.reference is not None
        assert (piece.reference.model, piece.reference.sha256, piece.reference.limit) == (
            "the model",
            "the model" * 2,
            7,
        )
        starts = stream.document_starts(0, stream.size)
        found += stream.read_reference(starts).tolist()
    assert sorted(found, reverse=True) == corpora.some_log_probabilities(DOCUMENTS).tolist()
    plain = corpora.read(corpora.prepare(tmp_path / "plain", path, config), config)
    assert not plain.sources[0].training.holds("reference") and plain.sha256 != corpus.sha256


def test_a_killed_reference_continues_with_the_next_shard(given: tuple[Path, DataConfig], tmp_path: Path) -> None:
    path, config = given
    whole = corpora.prepare(tmp_path / "whole", path, config, "the model")
    expected = {name: (whole / name).read_bytes() for name in ("reference.bin", prepared.REFERENCE)}
    killed = corpora.prepare(tmp_path / "killed", path, config)
    sizes = []
    for shard in range(5):
        writer = LogProbabilityWriter(killed, "<u2")
        assert len(writer) == shard and len(writer.tokens) > 5
        piece = writer.open_next()
        sizes.append(piece.groups)
        assert writer.longest >= np.diff(piece.ends).max() and piece.ends[-1] == piece.size == writer.tokens[shard]
        assert piece.mask is not None and piece.mask.size == piece.size
        writer.append(corpora.some_log_probabilities(sum(sizes))[-piece.groups :])
        for name in expected:  # a kill during the next append
            with (killed / name).open("ab") as file:
                file.write(b"half")
    writer = LogProbabilityWriter(killed, "<u2")
    while len(writer) < len(writer.tokens):
        sizes.append(writer.open_next().groups)
        writer.append(corpora.some_log_probabilities(sum(sizes))[-sizes[-1] :])
    assert {name: (killed / name).read_bytes() for name in expected} == expected
    (killed / "reference.bin").write_bytes(expected["reference.bin"][:-1])
    with pytest.raises(InputError, match=r"reference.bin is truncated: it has 319 bytes of 320; remove"):
        LogProbabilityWriter(killed, "<u2")


def test_a_changed_log_probability_is_found(given: tuple[Path, DataConfig], tmp_path: Path) -> None:
    path, config = given
    compared = corpora.prepare(tmp_path / "compared", path, config, "the model")
    plain = corpora.prepare(tmp_path / "plain", path, config)
    (shards, size), (_, size_of_plain) = (verify_corpus(each, 1) for each in (compared, plain))
    assert shards > 5 and size == size_of_plain + 4 * DOCUMENTS
    content = (compared / "reference.bin").read_bytes()
    (compared / "reference.bin").write_bytes(content[:-1] + b"\0")
    with pytest.raises(
        InputError, match=rf"is damaged: bytes \d+ to 320 of reference.bin, shard {shards - 1}; restore"
    ):
        verify_corpus(compared, 1)
    (compared / "reference.bin").write_bytes(content[:-4])
    with pytest.raises(InputError, match=r"reference.bin is truncated or belongs to another corpus: it has 316 bytes"):
        corpora.read(compared, config)


def test_a_corpus_without_the_log_probabilities_of_its_reference_is_refused(
    given: tuple[Path, DataConfig], tmp_path: Path
) -> None:
    path, config = given
    folder = corpora.prepare(tmp_path / "compared", path, config, "the model", limit=7)
    manifest = folder / prepared.MANIFEST
    left = {name: value for name, value in json.loads(manifest.read_text()).items() if name != "reference"}
    manifest.write_text(json.dumps(left))
    with pytest.raises(InputError, match="has no log-probabilities of its reference: prepare it again"):
        corpora.read(folder, config)


def test_turns_that_a_corpus_learns_are_not_left_out_later(given: tuple[Path, DataConfig], tmp_path: Path) -> None:
    path, config = given
    for turns in ("all", "last"):
        folder = corpora.prepare(tmp_path / turns, path, replace(config, learn_turns=turns))
        if turns == "last":
            corpora.read(folder, replace(config, learn_turns="last"))
            continue
        with pytest.raises(InputError, match="was prepared to learn all turns"):
            corpora.read(folder, replace(config, learn_turns="last"))
