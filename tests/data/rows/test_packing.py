"""Packed rows, compared with a simple, slow implementation."""

import itertools
from dataclasses import MISSING, fields

import numpy as np
import pytest
from texts import piece, stream

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.rows import packing
from jaxopt_llm.data.rows.packing import PackedRows, measure_waste, split_by_documents
from jaxopt_llm.data.tokens.pieces import IndexedPiece, TokenStream, join_all, join_ranges
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer
from jaxopt_llm.distributed.activity import Activity
from jaxopt_llm.model.batch import Batch

READ = [field for field in fields(Batch) if field.default is MISSING]  # of any data
BOS, EOS = ByteTokenizer.bos, ByteTokenizer.eos


def random_documents(seed: int, count: int, longest: int) -> list[bytes]:
    random = np.random.default_rng(seed)
    return [random.bytes(int(n)) for n in random.integers(1, longest + 1, count)]


# Documents much shorter than a row, much longer documents, and single bytes, many of which share a row.
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
    stream = [(token, number) for number, d in enumerate(documents) for token in [BOS, *d, EOS]]
    rows = []
    for first in range(0, len(stream) - 1, length):
        row: dict[str, list[int]] = {field.name: [] for field in READ}
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
    rows = [{f.name: getattr(row, f.name).tolist() for f in READ} for row in read(*CASES[case])]
    assert rows == slow_rows(*CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_every_token_except_the_first_is_a_target_once(case: str) -> None:
    documents, length = CASES[case]
    rows, tokens = read(documents, length), stream(documents).read(0, stream(documents).size)
    for name, expected in (("tokens", tokens[:-1]), ("targets", tokens[1:])):
        assert np.array_equal(np.concatenate([getattr(row, name)[row.segment_ids > 0] for row in rows]), expected)


@pytest.mark.parametrize("seed", range(5))
def test_chosen_documents_of_several_pieces_are_one_stream(seed: int) -> None:
    """The stream must equal a copy of the chosen documents."""
    random = np.random.default_rng(seed)
    lists = [random_documents(100 * seed + i, int(random.integers(0, 9)), 12) for i in range(6)]
    masks = [random.random(len(each)) < 0.6 for each in lists]
    copied = [d for each, mask in zip(lists, masks, strict=True) for d, kept in zip(each, mask, strict=True) if kept]
    runs = [np.flatnonzero(mask)[:, None] + [0, 1] for mask in masks]
    joined, expected = join_ranges([piece(each) for each in lists], runs), stream(copied)
    assert (joined.size, joined.documents) == (expected.size, len(copied))
    for first, stop in random.integers(0, joined.size + 1, (50, 2)):
        count = max(int(stop) - int(first), 1)
        if first < joined.size:
            count = min(count, joined.size - int(first))
            assert joined.read(int(first), count).tolist() == expected.read(int(first), count).tolist()
            assert (
                joined.document_starts(int(first), count).tolist()
                == expected.document_starts(int(first), count).tolist()
            )


@pytest.mark.parametrize("case", CASES)
def test_the_loss_counts_everything_except_first_tokens(case: str) -> None:
    for row in read(*CASES[case]):
        assert np.array_equal(row.loss_mask, (row.targets != BOS) & (row.segment_ids > 0))


def test_stream_is_the_delimited_documents() -> None:
    found = stream([b"ab", b"", b"c"])
    assert found.read(0, 9).tolist() == [BOS, 97, 98, EOS, BOS, EOS, BOS, 99, EOS]
    assert found.document_starts(0, 9).tolist() == [0, 4, 6]
    assert found.document_starts(1, 5).tolist() == [4]


def test_a_document_continued_from_the_row_before_restarts() -> None:
    _, second, _ = read([b"abcdefghi"], 4)
    assert second.positions.tolist() == [0, 1, 2, 3]
    assert second.segment_ids.tolist() == [1, 1, 1, 1]


def test_shapes_and_types() -> None:
    row = read([b"abcdef"], 4)[0]
    for field in READ:
        array = getattr(row, field.name)
        assert isinstance(array, np.ndarray) and array.shape == (4,)
        assert array.dtype == (np.bool_ if field.name == "loss_mask" else np.int32)


def test_a_row_outside_the_source_is_an_index_error() -> None:
    rows = packed([b"abcdef"], 3)
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows[index]


def test_data_without_a_token_to_predict_is_an_input_error_with_the_numbers() -> None:
    with pytest.raises(InputError, match="has 0 documents, 0 tokens, so there is no token to predict"):
        packed([], 4)


def test_less_than_a_row_is_one_padded_row() -> None:
    (row,) = packed([b"ab"], 8)
    assert row.loss_mask.tolist() == [True] * 3 + [False] * 5
    assert row.segment_ids.tolist() == [1] * 3 + [0] * 5


@pytest.mark.parametrize("wrong", [-1, 300, 2**32 + 5])
def test_an_id_outside_the_vocabulary_is_an_input_error_with_its_position(wrong: int) -> None:
    ids = np.array([0, 1, 299, 2, wrong, 5, 6, 7], np.int64)
    of = IndexedPiece("b.npy", ids, ends=np.array([3, 5, 8]), keys=np.zeros(3, np.uint64))
    rows = PackedRows(join_all([of]), 2, vocabulary_size=300)
    rows[0], rows[3]
    for row in (1, 2):
        with pytest.raises(InputError, match=f"b.npy, document 1 has the token id {wrong}, outside.*=300"):
            rows[row]


def conversations(lengths: list[int], seed: int = 0) -> tuple[TokenStream, list[tuple[list[int], list[bool]]]]:
    """Return documents of these lengths, as a stream of two pieces and as tokens with their mask."""
    random = np.random.default_rng(seed)
    documents = [(random.integers(0, 256, size), random.random(size) < 0.5) for size in lengths]
    half = len(documents) // 2
    pieces = []
    for each in (documents[:half], documents[half:]):
        tokens, mask = (np.concatenate(arrays) for arrays in zip(*each, strict=True))
        ends = np.cumsum([tokens.size for tokens, _ in each], dtype=np.int64)
        pieces.append(IndexedPiece("chats", tokens, ends, np.zeros(len(each), np.uint64), mask=mask))
    return join_all(pieces), [(tokens.tolist(), mask.tolist()) for tokens, mask in documents]


LENGTHS = {
    "short": [3, 4, 2, 5, 1, 1, 7, 3],
    "exactly a row": [9, 9, 4, 5, 9],
    "longer": [3, 30, 4, 10, 10, 2, 11, 50],
    "many": np.random.default_rng(1).integers(1, 14, 200).tolist(),
}


def unpack(row: Batch) -> list[tuple[list[int], list[bool]]]:
    """Return the documents of a row as tokens with their mask, in which the first token is never learned."""
    documents = []
    for segment in range(1, int(row.segment_ids.max()) + 1):
        (places,) = np.nonzero(row.segment_ids == segment)
        assert np.array_equal(row.positions[places], np.arange(places.size))
        assert np.array_equal(row.targets[places[:-1]], row.tokens[places[1:]])
        tokens = [int(row.tokens[places[0]]), *row.targets[places].tolist()]
        documents.append((tokens, [False, *row.loss_mask[places].tolist()]))
    padding = row.segment_ids == 0
    for field in READ:
        assert not getattr(row, field.name)[padding].any()
    return documents


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("case", LENGTHS)
def test_rows_of_whole_documents_hold_each_learned_document_once(case: str, drop: bool) -> None:
    stream, documents = conversations(LENGTHS[case])
    rows = PackedRows(stream, 8, 256, long_documents="drop" if drop else "cut")
    expected = [(tokens[:9], [False, *mask[1:9]]) for tokens, mask in documents if len(tokens) <= 9 or not drop]
    learned = [document for document in expected if any(document[1])]
    for epoch in (None, (0, 0), (0, 1)):
        read = [rows.read(index, epoch) for index in range(len(rows))]
        assert {getattr(row, field.name).shape for row in read for field in READ} == {(8,)}
        assert sorted(itertools.chain(*map(unpack, read))) == sorted(learned)
    long = sum(size > 9 for size in LENGTHS[case])
    done = f"{long} of {len(documents)} documents are longer than a row and {'dropped' if drop else 'cut'}"
    assert (done in rows.summary) == (long > 0)
    unlearned = len(expected) - len(learned) - sum(len(tokens) == 1 for tokens, _ in expected)
    assert (f"; {unlearned} documents without tokens that the loss counts are dropped" in rows.summary) == (
        unlearned > 0
    )


def test_long_documents_are_cut_for_conversations_and_split_otherwise() -> None:
    masked, _ = conversations(LENGTHS["longer"])
    plain = stream([b"abcdefghijkl", b"mn"])
    assert PackedRows(masked, 8, 256).summary and not PackedRows(plain, 8, 258).summary
    split = PackedRows(masked, 8, 256, long_documents="split")
    assert len(split) == 15 and not split.summary
    tokens, mask = masked.read(0, masked.size), masked.read_mask(0, masked.size)
    for number in range(len(split)):
        row = split[number]
        for at in range(8):
            if row.loss_mask[at]:
                assert mask[8 * number + at + 1] and row.targets[at] == tokens[8 * number + at + 1]
    cut = PackedRows(plain, 8, 258, long_documents="cut")
    assert [row.tokens.tolist() for row in map(cut.__getitem__, range(2))] == [
        [256, *b"abcdefg"],
        [256, *b"mn", 0, 0, 0, 0, 0],
    ]


def test_documents_without_targets_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the first token, or only tokens behind the cut, would be counted, and wherever reading is divided."""
    masked, _ = conversations([9, 9, 9, 40])
    for each in masked.pieces:
        assert isinstance(each.mask, np.ndarray)
        each.mask[:] = False
    first, second = (each.mask for each in masked.pieces)
    first[[0, 3]] = True  # type: ignore[index]
    second[[0, 9, 18, 40]] = True  # type: ignore[index]
    for block in (1, 20, 1000):
        monkeypatch.setattr(packing, "_MASK_BLOCK", block)
        rows = PackedRows(masked, 8, 256)
        assert len(rows) == 1 and rows[0].loss_mask.tolist() == [at == 2 for at in range(8)]
        assert "3 documents without tokens that the loss counts are dropped" in rows.summary
        assert "the loss counts 12% of the tokens" in rows.summary
    first[3] = False  # type: ignore[index]
    with pytest.raises(InputError, match="has 4 documents, 67 tokens, but no row .* has a token that the loss counts"):
        PackedRows(masked, 8, 256)


def test_packing_that_reads_all_documents_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BLOCK", 8)
    monkeypatch.setattr(packing, "_MASK_BLOCK", 8)
    masked, _ = conversations(LENGTHS["short"])
    counted = Activity()

    def count_beats(source: TokenStream, limit: int) -> int:
        counted.enter("prepare", 0)
        rows = PackedRows(source, 8, 258, documents_per_row=limit, pulse=counted)
        assert counted.progress is not None and len(rows)
        return counted.progress.beats

    assert count_beats(masked, 0) >= -(-masked.size // 8) + masked.size // 16
    plain = stream([b"ab"] * 12)
    assert (count_beats(plain, 2), count_beats(plain, 0)) == (-(-plain.size // 8), 0)


# ---- A limit of the documents in a row.


@pytest.mark.parametrize("limit", [1, 2, 3, 16])
@pytest.mark.parametrize("case", CASES)
def test_rows_have_at_most_so_many_documents(case: str, limit: int) -> None:
    """And every token that is no document's first is a target once."""
    documents, length = CASES[case]
    source = stream(documents)
    rows = PackedRows(source, length, ByteTokenizer.vocabulary_size, documents_per_row=limit)
    targets = []
    for index in range(len(rows)):
        row = rows[index]
        ids = row.segment_ids[row.segment_ids > 0]
        assert len(np.unique(ids)) <= limit and row.tokens.size == length
        targets += row.targets[row.loss_mask].tolist()
    starts = source.document_starts(0, source.size)
    assert targets == np.delete(source.read(0, source.size), starts).tolist()


@pytest.mark.parametrize("case", CASES)
def test_a_limit_that_no_row_reaches_changes_nothing(case: str) -> None:
    documents, length = CASES[case]
    limited = PackedRows(stream(documents), length, ByteTokenizer.vocabulary_size, documents_per_row=length + 1)
    rows = read(documents, length)
    assert len(limited) == len(rows)
    for index, row in enumerate(rows):
        for field in READ:
            np.testing.assert_array_equal(getattr(limited[index], field.name), getattr(row, field.name))


def slow_splits(starts: list[int], size: int, length: int, limit: int) -> list[list[int]]:
    rows, position = [], 0
    while position < size - 1:
        end = min(position + length + 1, size)
        begun = [start for start in starts if position < start <= end]
        if len(begun) >= limit:
            row, next_position = [position, begun[limit - 1]], begun[limit - 1]
        else:
            row, next_position = [position, end], position + length
        rows += [row] if row[1] - row[0] > 1 else []
        position = next_position
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_the_limit_cannot_reach_are_skipped_in_one_step(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = np.concatenate([random.integers(1, [4, 200, 9][part % 3], 30) for part in range(6)])
    starts, size = np.cumsum([0, *sizes[:-1]]), int(sizes.sum())
    for length, limit in ((16, 2), (16, 4), (5, 1), (40, 7)):
        found = split_by_documents(starts, size, length, limit)
        assert found.tolist() == slow_splits(starts.tolist(), size, length, limit)


def test_whole_documents_with_a_limit() -> None:
    masked, _ = conversations([4] * 10)
    rows = {limit: PackedRows(masked, 17, 256, "a", "cut", limit) for limit in (0, 3)}
    for limit, most in ((0, 5), (3, 3)):
        counts = [int(row.segment_ids.max()) for row in map(rows[limit].read, range(len(rows[limit])))]
        assert max(counts) == most and len(counts) == -(-sum(counts) // most)


def test_the_waste_of_a_limit() -> None:
    source = stream([b"ab"] * 64)  # 4 tokens each, with their delimiters
    assert measure_waste(source, 32, "split", 16) == 0
    assert measure_waste(source, 32, "split", 4) == pytest.approx(1 - 8 / 16)
    assert measure_waste(source, 32, "cut", 4) == pytest.approx(1 - 7 / 16)  # the last token takes no place
    assert measure_waste(stream([bytes(range(100))]), 16, "split", 1) == 0
