"""What `prepare --teacher` asks of a model, against its logits of each part of a document alone."""

import json
from pathlib import Path
from typing import Any

import corpora
import folders
import numpy as np
import pytest
from chats import write_tokenizer

from jaxopt_llm import load_pretrained
from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.pieces import IndexedPiece
from jaxopt_llm.data.tokens.scored import TeacherWriter
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.inference import reference
from jaxopt_llm.inference.reference import complete_corpus, divide_long, divide_shard, open_reference

CONTEXT, TOP_K = 32, 5


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a model with a short context."""
    folder = folders.folder_with_tokenizer(tmp_path_factory.mktemp("models") / "teacher")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": CONTEXT}))
    return folder


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_teacher_says_what_it_finds_most_likely(
    teacher: Path, tmp_path: Path, has_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents have fewer tokens than the context, as many, and several times as many."""
    monkeypatch.setattr(reference, "BLOCK_TOKENS", 100)  # several blocks
    monkeypatch.setattr(reference, "TOKENS_PER_DEVICE", 64)
    sizes = [1, 2, CONTEXT, CONTEXT + 1, CONTEXT + 2, 3 * CONTEXT + 5, 9]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": "abcdefghi"[n % 9] * n}) + "\n" for n in sizes))
    data = DataConfig(tokenizer=str(teacher), eos="")
    folder = corpora.prepare(tmp_path / "corpus", tmp_path / "rows.jsonl", data)
    model = open_reference(str(teacher), "--teacher", data, load_tokenizer(data))
    writer = TeacherWriter(folder, "<u2", TOP_K, model.vocabulary_size)
    tokens = np.asarray(writer.open_next().tokens[:]).astype(np.int32)
    ends = writer.open_next().ends
    mask = np.random.default_rng(0).random(tokens.size) < 0.6 if has_mask else np.ones(tokens.size, bool)
    if has_mask:
        (folder / "mask.bin").write_bytes(mask.tobytes())
    read: list[int] = []
    found = complete_corpus(model, data, writer, read.append)
    assert found.items() >= {"vocabulary_size": model.vocabulary_size, "limit": CONTEXT}.items()
    assert sum(read) == tokens.size

    wanted_ids: list[Any] = []
    wanted: list[Any] = []
    counts = []
    compute = load_pretrained(teacher).logits
    for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        counts.append(int(mask[begin + 1 : end].sum()))
        for first in range(begin, end - 1, CONTEXT):
            part = tokens[first : min(first + CONTEXT + 1, end)]
            padded = np.pad(part[:-1], (0, CONTEXT + 1 - part.size))  # later tokens change no logits
            logits = np.asarray(compute(padded[None])[0, : part.size - 1], np.float64)
            log_q = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
            log_q -= logits.max(-1, keepdims=True)
            order = np.argsort(-log_q, axis=-1)
            ordered = np.take_along_axis(log_q, order, axis=-1)
            rest = np.log(np.exp(ordered[:, TOP_K:]).sum(-1, keepdims=True))
            counted = mask[first + 1 : first + part.size]
            wanted_ids.append(order[counted, :TOP_K])
            wanted.append(np.concatenate([ordered[:, :TOP_K], rest], axis=-1)[counted])
    values = np.fromfile(folder / "teacher.bin", writer.dtype)
    assert values.size == found["rows"] == sum(counts)
    np.testing.assert_array_equal(np.fromfile(folder / "teacher_ends.bin", "<i8"), np.cumsum(counts))
    np.testing.assert_array_equal(values["ids"], np.concatenate(wanted_ids))
    np.testing.assert_allclose(values["log_probabilities"].astype(np.float64), np.concatenate(wanted), rtol=6e-4)


def test_parts_of_documents_share_one_token() -> None:
    ends = np.array([0, 3, 10, 10, 11, 16])
    piece = IndexedPiece("some", np.arange(16), ends, np.zeros(6, np.uint64), mask=np.arange(16) % 2 == 0)
    blocks = [*divide_shard(piece)]
    assert len(blocks) == 1 and blocks[0].size == 16
    divided = divide_long(blocks[0], 3)
    parts = [part.tolist() for part in np.split(divided.tokens, divided.ends[:-1])]
    assert parts == [[0, 1, 2], [3, 4, 5, 6], [6, 7, 8, 9], [11, 12, 13, 14], [14, 15]]
    assert divided.mask is not None and divided.mask.tolist() == [token % 2 == 0 for token in divided.tokens]


def test_a_teacher_of_another_tokenizer_is_refused(teacher: Path, tmp_path: Path) -> None:
    data = DataConfig(tokenizer=str(write_tokenizer(tmp_path / "other")))
    with pytest.raises(InputError, match=f"^--teacher {teacher}: it has another tokenizer, BOS or EOS than"):
        open_reference(str(teacher), "--teacher", data, load_tokenizer(data))
