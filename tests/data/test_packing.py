"""Packed rows against an obvious, slow reading of the same documents."""

import itertools
from dataclasses import fields

import numpy as np
import pytest
from texts import piece, stream

from jaxopt_llm.data.packing import PackedRows
from jaxopt_llm.data.tokenizer import ByteTokenizer
from jaxopt_llm.data.tokens import IndexedPiece, join, join_whole
from jaxopt_llm.errors import InputError
from jaxopt_llm.model.batch import Batch

BEGINNING, END = ByteTokenizer.beginning, ByteTokenizer.end


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
    for first in range(0, len(stream) - 1, length):
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
        rows.append({name: values + [0] * (length - len(values)) for name, values in row.items()})
    return rows


def read(documents: list[bytes], length: int) -> list[Batch]:
    rows = packed(documents, length)
    return [rows[i] for i in range(len(rows))]


def packed(documents: list[bytes], length: int) -> PackedRows:
    return PackedRows(stream(documents), length, ByteTokenizer.vocabulary_size)


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_the_slow_reading(case: str) -> None:
    rows = [{f.name: getattr(row, f.name).tolist() for f in fields(row)} for row in read(*CASES[case])]
    assert rows == slow_rows(*CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_every_token_is_a_target_once_but_the_first_of_the_stream(case: str) -> None:
    documents, length = CASES[case]
    rows, tokens = read(documents, length), stream(documents).read(0, stream(documents).size)
    for name, expected in (("tokens", tokens[:-1]), ("targets", tokens[1:])):
        assert np.array_equal(np.concatenate([getattr(row, name)[row.segment_ids > 0] for row in rows]), expected)


@pytest.mark.parametrize("seed", range(5))
def test_chosen_documents_of_several_pieces_are_one_stream(seed: int) -> None:
    """As if they had been copied together, whatever was left out between them."""
    random = np.random.default_rng(seed)
    lists = [random_documents(100 * seed + i, int(random.integers(0, 9)), 12) for i in range(6)]
    masks = [random.random(len(each)) < 0.6 for each in lists]
    copied = [d for each, mask in zip(lists, masks, strict=True) for d, kept in zip(each, mask, strict=True) if kept]
    runs = [np.flatnonzero(mask)[:, None] + [0, 1] for mask in masks]
    joined, expected = join([piece(each) for each in lists], runs), stream(copied)
    assert (joined.size, joined.documents) == (expected.size, len(copied))
    for first, stop in random.integers(0, joined.size + 1, (50, 2)):
        count = max(int(stop) - int(first), 1)
        if first < joined.size:
            count = min(count, joined.size - int(first))
            assert joined.read(int(first), count).tolist() == expected.read(int(first), count).tolist()
            assert joined.borders(int(first), count).tolist() == expected.borders(int(first), count).tolist()


@pytest.mark.parametrize("case", CASES)
def test_loss_is_on_everything_but_beginnings_of_documents(case: str) -> None:
    for row in read(*CASES[case]):
        assert np.array_equal(row.loss_mask, (row.targets != BEGINNING) & (row.segment_ids > 0))


def test_stream_is_the_delimited_documents() -> None:
    found = stream([b"ab", b"", b"c"])
    assert found.read(0, 9).tolist() == [BEGINNING, 97, 98, END, BEGINNING, END, BEGINNING, 99, END]
    assert found.borders(0, 9).tolist() == [0, 4, 6]
    assert found.borders(1, 5).tolist() == [4]


def test_a_document_continued_from_the_row_before_restarts() -> None:
    _, second, _ = read([b"abcdefghi"], 4)
    assert second.positions.tolist() == [0, 1, 2, 3]
    assert second.segment_ids.tolist() == [1, 1, 1, 1]


def test_shapes_and_types() -> None:
    row = read([b"abcdef"], 4)[0]
    for field in fields(row):
        array = getattr(row, field.name)
        assert isinstance(array, np.ndarray) and array.shape == (4,)
        assert array.dtype == (np.bool_ if field.name == "loss_mask" else np.int32)


def test_a_row_outside_the_source_is_an_index_error() -> None:
    rows = packed([b"abcdef"], 3)
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[index]


@pytest.mark.parametrize("documents", [[], [b"ab"]])
def test_too_little_for_one_row_is_an_input_error_with_the_numbers(documents: list[bytes]) -> None:
    tokens = sum(len(d) + 2 for d in documents)
    with pytest.raises(InputError, match=f"has {len(documents)} documents, {tokens} tokens.* 4 reads 5"):
        packed(documents, 4)


def test_a_sequence_length_below_one_is_an_input_error() -> None:
    with pytest.raises(InputError, match="sequence_length"):
        packed([b"ab"], 0)


@pytest.mark.parametrize("wrong", [-1, 300, 2**32 + 5])
def test_an_id_outside_the_vocabulary_is_an_input_error_that_says_where(wrong: int) -> None:
    ids = np.array([0, 1, 299, 2, wrong, 5, 6, 7], np.int64)
    of = IndexedPiece("b.npy", ids, ends=np.array([3, 5, 8]), keys=np.zeros(3, np.uint64))
    rows = PackedRows(join_whole([of]), 2, vocabulary_size=300)
    rows[0], rows[3]
    for row in (1, 2):
        with pytest.raises(InputError, match=f"b.npy, document 1 has the token id {wrong}, outside.*=300"):
            rows[row]
