"""Best fit of whole documents, compared with a simple packing of one document after another."""

import itertools
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from chats import write_tokenizer
from guides import read_blocks

from jaxopt_llm.config import DataConfig
from jaxopt_llm.data.rows import packing
from jaxopt_llm.data.rows.loader import Loader
from jaxopt_llm.data.rows.packing import BestFit, Group, Lengths, PackedRows, Places, count_rows, round_up, split_rows
from jaxopt_llm.data.tokens.corpus import open_all_documents
from jaxopt_llm.data.tokens.pieces import IndexedPiece, TokenStream, join_all
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.model.batch import Batch

pytestmark = pytest.mark.core


def random_lengths(seed: int, size: int, count: int) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(size / 6), 0.8, count).astype(np.int64)
    return np.clip(lengths, 1, size)


def slow_rooms(lengths: Sequence[int], size: int) -> list[int]:
    """Return the room that best-fit decreasing leaves in each row."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        best = min(fitting, default=size)
        if fitting:
            rooms.remove(best)
        rooms.append(best - length)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(6))
def test_a_length_at_a_time_is_best_fit_decreasing(seed: int) -> None:
    size = [40, 64, 100][seed % 3]  # lengths below 128 are not rounded
    lengths = random_lengths(seed, size, 300)
    groups = Lengths(lengths, size, 0).decreasing
    different = np.unique(lengths)[::-1]
    rooms = [size - sum(different[part.length] * part.places for part in group.parts) for group in groups]
    assert sorted(np.repeat(rooms, [group.rows for group in groups])) == slow_rooms(lengths.tolist(), size)


def check_packing(groups: list[Group], packings: Lengths, size: int, limit: int) -> None:
    """Check that every document has one place, and that rows have room for theirs."""
    used: list[list[int]] = [[] for _ in packings.counts]
    for group in groups:
        assert sum(int(packings.lengths[part.length]) * part.places for part in group.parts) <= size
        assert 1 <= group.documents <= (limit or size) and group.rows > 0
        for part in group.parts:
            used[part.length] += range(part.first, part.first + group.rows * part.places)
    assert [sorted(each) for each in used] == [[*range(count)] for count in packings.counts]
    assert count_rows(groups) == packings.rows


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_every_document_has_one_place_and_every_epoch_as_many_rows(seed: int, limit: int) -> None:
    size = 100
    lengths = random_lengths(seed, size, 1 + 300 * seed)
    packings = Lengths(lengths, size, limit)
    for groups in (packings.decreasing, *(packings.pack_epoch(7, epoch) for epoch in range(5))):
        check_packing(groups, packings, size, limit)


def test_an_epoch_that_needs_fewer_rows_splits_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Best-fit decreasing packs these into 5 rows, and the perturbed orders of some epochs into 4."""
    lengths = np.array([53, 46, 44, 43, 38, 36, 31, 25, 22, 21, 18, 15])
    packings, added = Lengths(lengths, 100, 0), list[int]()
    assert packings.rows == 5
    monkeypatch.setattr(packing, "split_rows", lambda groups, more: added.append(more) or split_rows(groups, more))
    for epoch in range(40):
        check_packing(packings.pack_epoch(0, epoch), packings, 100, 0)
    assert {*added} == {0, 1}


@pytest.mark.parametrize("more", range(5))
def test_rows_are_split_without_losing_a_document(more: int) -> None:
    groups = [Group(2, (Places(0, 1, 0), Places(1, 2, 0))), Group(3, (Places(1, 1, 4),))]
    split = split_rows(groups, more)
    for length, documents in ((0, 2), (1, 7)):
        parts = [(group.rows, part) for group in split for part in group.parts if part.length == length]
        places = [place for rows, part in parts for place in range(part.first, part.first + rows * part.places)]
        assert sorted(places) == [*range(documents)]
    assert count_rows(split) == 5 + more


@pytest.mark.parametrize("size", [1, 127, 128, 1000, 2048, 100_000])
def test_lengths_are_rounded_up_by_less_than_a_64th_and_never_beyond_a_row(size: int) -> None:
    lengths = np.arange(1, size + 1)
    packings = Lengths(lengths, size, 0)
    rounded = round_up(lengths, size)
    assert (rounded >= lengths).all() and (rounded <= np.minimum(lengths * (1 + 1 / 64), size)).all()
    assert np.array_equal(np.repeat(packings.lengths, packings.counts), rounded[::-1])
    assert packings.counts.size <= 64 * (1 + np.log2(max(size / 64, 1)) + 1)


def test_a_million_documents_are_packed_a_length_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Group] = []
    monkeypatch.setattr(Group, "skip", lambda group, rows, skip=Group.skip: groups.append(group) or skip(group, rows))
    packings = Lengths(random_lengths(0, 2048, 10**6), 2048, 0)
    assert len(groups) < 20 * packings.counts.size < 10_000
    assert len(packings.decreasing) < 5 * packings.counts.size


def test_packed_documents_need_few_bytes_each() -> None:
    lengths = random_lengths(0, 2048, 10**6)
    starts = np.cumsum(lengths) - lengths
    tracemalloc.start()
    rows = BestFit(starts, lengths, 2048, 0)
    held, _ = tracemalloc.get_traced_memory()
    for row in range(0, len(rows), 100):
        rows.find_documents(row, (0, 0))
    later, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 12 * lengths.size + 8 * len(rows) + 2**20
    assert later - held < 4 * lengths.size + 2**20


# ---- Rows of an epoch.


def numbered(lengths: Sequence[int] | np.ndarray) -> TokenStream:
    """Return documents of one token more than these lengths. All tokens of document i are i."""
    sizes = np.asarray(lengths, np.int64) + 1
    tokens = np.repeat(np.arange(sizes.size), sizes)
    keys = np.zeros(sizes.size, np.uint64)
    return join_all([IndexedPiece("numbers", tokens, np.cumsum(sizes), keys, mask=np.ones(tokens.size, bool))])


def documents_of(batch: Batch) -> list[list[int]]:
    """Return the documents in each row of a batch."""
    return [
        [int(row[segments == segment][0]) for segment in range(1, segments.max() + 1)]
        for row, segments in zip(batch.tokens, batch.segment_ids, strict=True)
    ]


LENGTHS = [9, 2, 5, 4, 6, 3, 7, 2, 4, 1, 8, 4, 3, 1, 6, 2]


def make_loader(seed: int = 3, batch_size: int = 2, local_rows: Sequence[int] | None = None) -> Loader:
    rows = PackedRows(numbered(LENGTHS), 10, len(LENGTHS), "numbers")
    assert len(rows) == 7
    return Loader([rows], [1.0], batch_size, seed, local_rows)


def read(loader: Loader, steps: Sequence[int]) -> list[list[int]]:
    return [row for step in steps for row in documents_of(loader.batch_at(step))]


ORDER = [
    [[6, 12], [14, 8], [5, 7, 15], [2, 3, 13], [4, 11], [10, 1], [0, 9]],
    [[2, 11, 9], [0], [4, 5, 13], [10, 15], [6, 12], [14, 1], [8, 3, 7]],
]


def test_the_packing_of_a_seed_never_changes() -> None:
    """A run that is resumed in another process, with another Python or NumPy, must read the same rows."""
    rows = read(make_loader(), range(7))
    assert [rows[:7], rows[7:]] == ORDER
    assert rows != read(make_loader(seed=4), range(7))
    for epoch in ORDER:
        assert sorted(itertools.chain(*epoch)) == [*range(len(LENGTHS))]


@pytest.mark.parametrize("processes", [1, 4])
def test_a_run_that_resumes_in_a_later_epoch_reads_the_same_rows(processes: int) -> None:
    """7 rows, so that batches of 4 have rows of two epochs."""
    whole = make_loader(batch_size=4)
    expected = {step: documents_of(whole.batch_at(step)) for step in range(12)}
    for first in (5, 2, 11):  # in epochs 2, 1 and 6
        parts = [range(process, 4, processes) for process in range(processes)]
        resumed = [make_loader(batch_size=4, local_rows=part) for part in parts]
        for step in range(first, 12):
            rows = {
                row: documents
                for part, loader in zip(parts, resumed, strict=True)
                for row, documents in zip(part, documents_of(loader.batch_at(step)), strict=True)
            }
            assert [rows[row] for row in range(4)] == expected[step]


def test_the_batch_size_only_cuts_the_sequence_of_rows() -> None:
    sequence = read(make_loader(batch_size=1), range(24))
    for batch_size in (2, 3, 8):
        assert read(make_loader(batch_size=batch_size), range(24 // batch_size)) == sequence


def test_each_epoch_packs_other_documents_together() -> None:
    """Of the pairs of documents in a row, few are in one row again, although most lengths are of one document."""
    lengths = np.random.default_rng(0).permutation(np.arange(1, 121)) * 5
    rows = BestFit(np.cumsum(lengths) - lengths, lengths, 2048, 0)

    def pairs(epoch: int) -> set[tuple[int, int]]:
        found = (sorted(rows.find_documents(row, (0, epoch))[0].tolist()) for row in range(len(rows)))
        return {(a, b) for documents in found for at, a in enumerate(documents) for b in documents[at + 1 :]}

    first, *later = map(pairs, range(4))
    assert all(len(first & each) < 0.3 * len(first) for each in later)


def test_rows_without_an_epoch_are_in_the_order_of_the_documents() -> None:
    rows = PackedRows(numbered(LENGTHS), 10, len(LENGTHS), "numbers")
    found = documents_of(jax.tree.map(lambda *fields: np.stack(fields), *map(rows.read, range(7))))
    assert [min(row) for row in found] == sorted(min(row) for row in found)
    assert sorted(itertools.chain(*found)) == [*range(len(LENGTHS))]


# ---- How full rows are.


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    """The 500 chats that docs/guides/finetune.md makes."""
    folder = tmp_path_factory.mktemp("chats")
    (block,) = (each for each in read_blocks("finetune") if "get_docstring" in each.code)
    subprocess.run([sys.executable, "-c", block.code], cwd=folder, check=True, capture_output=True)
    files = tuple(str(folder / name) for name in ("chats.jsonl", "val.jsonl"))
    config = DataConfig(paths=files, content="chat", tokenizer=str(write_tokenizer(folder / "tokenizer")))
    stream, _ = open_all_documents(config, load_tokenizer(config))
    assert stream.documents == 500
    return stream


@pytest.mark.parametrize("length", [256, 512, 2048])
def test_rows_of_chats_are_full(sample: TokenStream, length: int) -> None:
    """No packing can have fewer rows than the tokens fill."""
    rows = PackedRows(sample, length, 420, "chats")
    for epoch in (None, (0, 0), (0, 1)):
        filled = sum(int((rows.read(index, epoch).segment_ids > 0).sum()) for index in range(len(rows)))
        assert filled == sample.size - 500  # the last token of a document is only a target
        assert filled >= 0.95 * length * len(rows) and len(rows) <= 1.03 * -(-filled // length)
        assert f": {len(rows)} rows of whole documents, {filled / length / len(rows):.0%} filled" in rows.summary


@pytest.mark.parametrize("size", [256, 2048, 8192])
def test_rows_of_documents_of_many_lengths_are_full(size: int) -> None:
    lengths = random_lengths(1, size, 20_000)
    for limit, full in ((0, 0.985), (16, 0.98)):
        assert lengths.sum() > full * size * Lengths(lengths, size, limit).rows
