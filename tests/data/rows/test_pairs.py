"""Packing of pairs: both documents in one row, the chosen one first, whatever the lengths are."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.rows import packing
from jaxopt_llm.data.rows.loader import Loader, read_validation_batches
from jaxopt_llm.data.rows.packing import PackedRows, measure_waste
from jaxopt_llm.data.tokens.pieces import (
    IndexedPiece,
    StoredLogProbabilities,
    TokenStream,
    join_all,
    join_ranges,
    split_held_out,
)
from jaxopt_llm.model.batch import Batch

pytestmark = pytest.mark.core
Document = tuple[list[int], list[bool]]  # tokens, and whether each is learned

SIZE = 40


def log_probability(number: Any) -> Any:
    """Return the one of a document of this number by the reference."""
    return -0.5 - np.asarray(number, np.float32)


def make_pairs(
    lengths: list[int], seed: int = 0, learned: float = 0.5, compared: bool = False
) -> tuple[TokenStream, list[list[Document]]]:
    """Return pairs of documents of these lengths, as a stream of two pieces and one by one.

    The first token of a document is its number, and the others are random.
    """
    random = np.random.default_rng(seed)
    tokens = [np.append(number, random.integers(1000, 2000, size - 1)) for number, size in enumerate(lengths)]
    masks = [random.random(size) < learned for size in lengths]
    half = len(lengths) // 4 * 2
    pieces = []
    for part in (slice(half), slice(half, None)):
        ends = np.cumsum([each.size for each in tokens[part]])
        keys = np.repeat(random.integers(0, 2**63, ends.size // 2).astype(np.uint64), 2)
        arrays, mask = (np.concatenate(tokens[part]), ends, keys), np.concatenate(masks[part])
        reference = (
            StoredLogProbabilities("a model", "0", 0, log_probability(np.arange(len(lengths))[part]))
            if compared
            else None
        )
        pieces.append(IndexedPiece("pairs", *arrays, mask=mask, pairs=True, reference=reference))
    documents = [
        (ids.tolist(), [False, *mask[1:].tolist()]) for ids, mask in zip(tokens, masks, strict=True)
    ]  # nothing predicts a first token
    return join_all(pieces), [documents[at : at + 2] for at in range(0, len(documents), 2)]


def random_lengths(seed: int, count: int = 400) -> list[int]:
    """Return lengths of which some pairs are longer than a row of SIZE tokens, and some exactly as long."""
    lengths = np.random.default_rng(seed).integers(1, SIZE * 3 // 4, count)
    lengths[:2] = SIZE // 2 + 1  # a pair takes two tokens less than it has
    lengths[2:4] = SIZE // 2 + 1, SIZE // 2 + 2
    return lengths.tolist()


def unpack(row: Batch) -> list[list[Document]]:
    """Return the pairs of a row."""
    documents = []
    for segment in range(1, int(row.segment_ids.max()) + 1):
        (places,) = np.nonzero(row.segment_ids == segment)
        assert np.array_equal(places, np.arange(places[0], places[0] + places.size))
        assert np.array_equal(row.positions[places], np.arange(places.size))
        assert np.array_equal(row.targets[places[:-1]], row.tokens[places[1:]])
        tokens = [int(row.tokens[places[0]]), *row.targets[places].tolist()]
        documents.append((tokens, [False, *row.loss_mask[places].tolist()]))
    assert not row.loss_mask[row.segment_ids == 0].any() and len(documents) % 2 == 0
    return [list(pair) for pair in zip(documents[::2], documents[1::2], strict=True)]


def takes(pair: list[Document]) -> int:
    """Return the tokens of a row that a pair takes."""
    return sum(len(tokens) - 1 for tokens, _ in pair)


def is_learned(pair: list[Document]) -> bool:
    return all(any(mask) for _, mask in pair)


@pytest.mark.parametrize("limit", [0, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_every_pair_that_fits_is_in_one_row_of_each_epoch(seed: int, limit: int) -> None:
    stream, pairs = make_pairs(random_lengths(seed), seed, learned=0.3)
    rows = PackedRows(stream, SIZE, 2000, "pairs", documents_per_row=limit)
    expected = [pair for pair in pairs if takes(pair) <= SIZE and is_learned(pair)]
    assert pairs[0] in expected or not is_learned(pairs[0])
    assert rows.pairs and 100 < len(expected) < len(pairs)
    found = []
    for epoch in (None, (0, 0), (0, 1), (1, 0)):
        read = [unpack(rows.read(index, epoch)) for index in range(len(rows))]
        assert sorted(itertools.chain(*read)) == sorted(expected)
        assert all(1 <= len(row) <= (limit // 2 or SIZE) for row in read)
        found.append(read)
    if limit != 2:  # of rows of one pair, epochs only change the order
        together = [{tuple(pair[0][0][0] for pair in row) for row in read} for read in found]
        assert all(len(a & b) < 0.8 * len(a) for a, b in itertools.combinations(together, 2))
    assert found[0] == sorted(found[0], key=lambda row: min(pair[0][0][0] for pair in row))


@pytest.mark.parametrize("held_out", [False, True])
def test_a_row_has_the_log_probability_of_each_document(held_out: bool) -> None:
    """It stands at a token that the loss counts, so that the sum over them is that of the document."""
    stream, _ = make_pairs([max(length, 2) for length in random_lengths(2)], learned=0.3, compared=True)
    if held_out:
        stream = join_ranges(stream.pieces, split_held_out(stream.pieces, 0.3)[1])
    rows, found = PackedRows(stream, SIZE, 2000), 0
    for epoch in (None, (0, 1)):
        for index in range(len(rows)):
            row = rows.read(index, epoch)
            assert row.reference.dtype == np.float32
            assert not np.any(row.reference[~row.loss_mask])
            for segment in range(1, int(row.segment_ids.max()) + 1):
                places = row.segment_ids == segment
                assert np.sum(row.reference[places]) == log_probability(row.tokens[places][0])
                assert np.count_nonzero(row.reference[places]) == 1
                found += 1
    assert found > 100
    assert PackedRows(stream.without("reference"), SIZE, 2000)[0].reference is None


def test_what_is_dropped_is_counted() -> None:
    stream, pairs = make_pairs(random_lengths(0), learned=0.3)
    rows = PackedRows(stream, SIZE, 2000, "the set")
    long = sum(takes(pair) > SIZE for pair in pairs)
    unlearned = sum(0 < takes(pair) <= SIZE and not is_learned(pair) for pair in pairs)
    kept = [pair for pair in pairs if takes(pair) <= SIZE and is_learned(pair)]
    filled, learned = sum(map(takes, kept)), sum(sum(mask) for pair in kept for _, mask in pair)
    assert long > 20 and unlearned > 20
    assert rows.summary == (
        f"the set: {len(rows)} rows of whole pairs, {filled / len(rows) / SIZE:.0%} filled; the loss counts "
        f"{learned / filled:.0%} of the tokens; {long} of 200 pairs are longer than a row and dropped; "
        f"{unlearned} pairs with an answer without tokens that the loss counts are dropped"
    )


def test_a_pair_takes_exactly_a_row() -> None:
    for second, fits in ((21, True), (22, False)):
        stream, pairs = make_pairs([21, second, 3, 3], learned=1)
        rows = PackedRows(stream, SIZE, 2000)
        read = [unpack(rows[index]) for index in range(len(rows))]
        assert read == ([[pairs[0]], [pairs[1]]] if fits else [[pairs[1]]])


@pytest.mark.parametrize("block", [1, 30, 10_000])
def test_packing_does_not_depend_on_how_documents_are_read(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, pairs = make_pairs(random_lengths(1), learned=0.3)
    monkeypatch.setattr(packing, "_BLOCK", block)
    monkeypatch.setattr(packing, "_MASK_BLOCK", block)
    rows = PackedRows(stream, SIZE, 2000)
    read = itertools.chain(*(unpack(rows[index]) for index in range(len(rows))))
    assert sorted(read) == sorted(pair for pair in pairs if takes(pair) <= SIZE and is_learned(pair))


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.95])
def test_splits_are_rows_of_pairs(share: float) -> None:
    stream, pairs = make_pairs([max(length, 2) for length in random_lengths(2)], learned=1)
    ranges = split_held_out(stream.pieces, share)
    found = []
    for each in ranges:
        split = join_ranges(stream.pieces, each)
        assert split.pairs and split.documents % 2 == 0
        rows = PackedRows(split, SIZE, 2000)
        found += itertools.chain(*(unpack(rows[index]) for index in range(len(rows))))
    assert sorted(found) == sorted(pair for pair in pairs if takes(pair) <= SIZE and is_learned(pair))


def test_batches_of_training_and_validation_hold_pairs() -> None:
    stream, pairs = make_pairs(random_lengths(3), learned=0.6)
    rows = PackedRows(stream, SIZE, 2000)
    loader = Loader([rows], [1.0], 4, 0)
    expected = sorted(pair for pair in pairs if takes(pair) <= SIZE and is_learned(pair))
    steps = -(-len(rows) // 4)
    training = [loader.batch_at(step) for step in range(steps)]
    for batches in (training, read_validation_batches(rows, 4, steps)):
        read = [unpack(jax.tree.map(lambda field, at=at: field[at], batch)) for batch in batches for at in range(4)]
        found = sorted(itertools.chain(*read[: len(rows)]))
        assert found == expected


def test_settings_that_would_divide_pairs_are_refused() -> None:
    stream, pairs = make_pairs([3, 3, 4, 4], learned=1)
    for treatment in ("cut", "split"):
        with pytest.raises(
            InputError, match=f"chats holds pairs of answers, and data.long_documents={treatment} would"
        ):
            PackedRows(stream, SIZE, 2000, "chats", long_documents=treatment)
    with pytest.raises(InputError, match="chats holds pairs of answers, and data.documents_per_row=1 leaves no room"):
        PackedRows(stream, SIZE, 2000, "chats", documents_per_row=1)
    rows = [PackedRows(stream, SIZE, 2000, long_documents=each)[0] for each in ("auto", "drop")]
    assert [unpack(row) for row in rows] == [[pairs[1], pairs[0]]] * 2
    with pytest.raises(InputError, match="no row of training.sequence_length=3 has a token that the loss counts"):
        PackedRows(stream, 3, 2000)


def test_an_index_without_the_second_document_is_damaged() -> None:
    for ends in ([2, 4, 6], [2, 2]):
        piece = IndexedPiece("x", np.arange(ends[-1]), np.array(ends), np.zeros(len(ends), np.uint64), pairs=True)
        with pytest.raises(InputError, match="chats: the index is damaged, a document of a pair is empty or missing"):
            PackedRows(join_all([piece]), SIZE, 2000, "chats")


def test_an_id_outside_the_vocabulary_is_named_with_its_document() -> None:
    stream, _ = make_pairs([3, 3, 4, 4], learned=1)
    stream.pieces[1].tokens[5] = 5000  # type: ignore[index]
    with pytest.raises(InputError, match="pairs, document 1 has the token id 5000"):
        PackedRows(stream, SIZE, 2000)[0]


def test_the_waste_of_a_limit_is_that_of_whole_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of 8 tokens in rows of 32: 4 in a row, or as many as half the limit."""
    stream, _ = make_pairs([5] * 64, learned=1)
    wastes = [measure_waste(stream, 32, "auto", limit) for limit in (16, 8, 6, 4, 3, 2, 1)]
    assert wastes == pytest.approx([0, 0, 1 - 8 / 11, 1 / 2, 3 / 4, 3 / 4, 1])
    for more, waste in ((2, 1 - 4 / 8), (7, 1 - 5 / 9)):  # the sample ends in either document
        monkeypatch.setattr(packing, "_SAMPLE", 10 * 16 + more)
        assert measure_waste(stream, 32, "auto", 4) == pytest.approx(waste)
