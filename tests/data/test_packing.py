"""Packed rows against an obvious, slow reading of the same documents."""

import itertools
from dataclasses import fields

import numpy as np
import pytest

from jaxopt_llm.data.packing import PackedRows, TokenStream, check_ids, token_stream
from jaxopt_llm.data.source import Document
from jaxopt_llm.data.tokenizer import ByteTokenizer
from jaxopt_llm.errors import InputError
from jaxopt_llm.model.batch import Batch

tokenizer = ByteTokenizer()
BEGINNING, END = tokenizer.beginning_of_document, tokenizer.end_of_document


def random_documents(seed: int, count: int, longest: int) -> list[bytes]:
    random = np.random.default_rng(seed)
    return [random.bytes(int(n)) for n in random.integers(1, longest + 1, count)]


# Documents much shorter than a row, much longer, and single bytes, of which many share a row.
CASES = {
    "short": (random_documents(0, 50, 10), 16),
    "long": (random_documents(1, 5, 100), 16),
    "single bytes": (random_documents(2, 40, 1), 7),
    "one token rows": (random_documents(3, 4, 5), 1),
    "one document": ([bytes(range(100))], 10),
    "rows end where documents end": ([b"ab"] * 12, 4),
    "row and a target": ([b"abc"], 4),
}


def slow_rows(documents: list[bytes], length: int) -> list[dict[str, list[int]]]:
    stream = [(token, number) for number, d in enumerate(documents) for token in [BEGINNING, *d, END]]
    rows = []
    for first in range(0, len(stream) - length, length):
        row: dict[str, list[int]] = {field.name: [] for field in fields(Batch)}
        segment, position, previous = 0, 0, None
        for (token, number), (target, target_number) in itertools.pairwise(stream[first : first + length + 1]):
            if number != previous:
                segment, position, previous = segment + 1, 0, number
            row["tokens"].append(token)
            row["targets"].append(target)
            row["loss_mask"].append(number == target_number)
            row["segment_ids"].append(segment)
            row["positions"].append(position)
            position += 1
        rows.append(row)
    return rows


def read(documents: list[bytes], length: int) -> list[Batch]:
    rows = PackedRows(token_stream(documents, tokenizer), length)
    return [rows[i] for i in range(len(rows))]


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_the_slow_reading(case: str) -> None:
    rows = [{f.name: getattr(row, f.name).tolist() for f in fields(row)} for row in read(*CASES[case])]
    assert rows == slow_rows(*CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_every_token_is_a_target_once_but_the_first_of_the_stream_and_the_tail(case: str) -> None:
    documents, length = CASES[case]
    stream = token_stream(documents, tokenizer)
    targets = np.concatenate([row.targets for row in read(documents, length)])
    assert np.array_equal(targets, stream.tokens[1 : 1 + targets.size])
    assert 0 <= stream.tokens.size - 1 - targets.size < length


@pytest.mark.parametrize("case", CASES)
def test_loss_is_on_everything_but_beginnings_of_documents(case: str) -> None:
    for row in read(*CASES[case]):
        assert np.array_equal(row.loss_mask, row.targets != BEGINNING)


def test_stream_is_the_delimited_documents() -> None:
    stream = token_stream([b"ab", b"", b"c"], tokenizer)
    assert stream.tokens.tolist() == [BEGINNING, 97, 98, END, BEGINNING, END, BEGINNING, 99, END]
    assert stream.starts.tolist() == [0, 4, 6]


def test_a_document_continued_from_the_row_before_restarts() -> None:
    _, second = read([b"abcdefghi"], 4)
    assert second.positions.tolist() == [0, 1, 2, 3]
    assert second.segment_ids.tolist() == [1, 1, 1, 1]


def test_shapes_and_types() -> None:
    row = read([b"abcdef"], 4)[0]
    for field in fields(row):
        array = getattr(row, field.name)
        assert isinstance(array, np.ndarray) and array.shape == (4,)
        assert array.dtype == (np.bool_ if field.name == "loss_mask" else np.int32)


def test_rows_cannot_change_the_stream() -> None:
    row = read([b"abcdef"], 4)[0]
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(row.tokens)[0] = 0


def test_a_row_outside_the_source_is_an_index_error() -> None:
    rows = PackedRows(token_stream([b"abcdef"], tokenizer), 3)
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[index]


@pytest.mark.parametrize("documents", [[], [b"ab"]])
def test_too_little_for_one_row_is_an_input_error_with_the_numbers(documents: list[bytes]) -> None:
    tokens = sum(len(d) + 2 for d in documents)
    with pytest.raises(InputError, match=f"{len(documents)} documents hold {tokens} tokens.* 4 reads 5"):
        PackedRows(token_stream(documents, tokenizer), 4)


def test_a_sequence_length_below_one_is_an_input_error() -> None:
    with pytest.raises(InputError, match="sequence_length"):
        PackedRows(token_stream([b"ab"], tokenizer), 0)


@pytest.mark.parametrize("wrong", [-1, 300])
def test_an_id_outside_the_vocabulary_is_an_input_error_that_says_where(wrong: int) -> None:
    documents = [Document("a.py", b"?"), Document("b.py", b"?"), Document("c.py", b"?")]
    ids = np.array([0, 1, 299, 2, wrong, 5, 6, wrong], np.int32)
    stream = TokenStream(ids, starts=np.array([0, 3, 5]))
    with pytest.raises(InputError, match=f"b.py has the token id {wrong}, outside model.vocabulary_size=300"):
        check_ids(stream, documents, 300)
    check_ids(TokenStream(ids[:4], stream.starts), documents, 300)
