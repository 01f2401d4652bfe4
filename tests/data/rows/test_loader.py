"""Training batches as a function of (seed, step), and the fixed held-out batches."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from texts import stream

from jaxopt_llm.core.errors import InputError, Preempted
from jaxopt_llm.data.rows import loader as loading
from jaxopt_llm.data.rows.loader import Loader, pick_source, read_ahead, read_validation_batches
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens.pieces import IndexedPiece, join_all
from jaxopt_llm.model.batch import Batch


def numbered_rows(count: int, first: int = 0) -> PackedRows:
    """Return rows of 4 tokens that hold their number: row i is the document [i, i] with BOS and EOS."""
    return PackedRows(stream([bytes([i, i]) for i in range(first, first + count)]), 4, 258)


def make_loader(rows: int, batch_size: int, seed: int) -> Loader:
    return Loader([numbered_rows(rows)], [1.0], batch_size, seed)


def mixture(weights: list[float], batch_size: int = 4, local_rows: Sequence[int] | None = None) -> Loader:
    """Return a mixture of sources with rows 0 to 9, 100 to 107 and 200 to 204."""
    sources = [numbered_rows(10), numbered_rows(8, 100), numbered_rows(5, 200)]
    return Loader(sources, weights, batch_size, seed=3, local_rows=local_rows)


def numbers(batch: Batch) -> list[int]:
    return [int(n) for n in batch.tokens[:, 1]]


def order(seed: int, rows: int, epoch: int) -> list[int]:
    loader = make_loader(rows, batch_size=1, seed=seed)
    return [numbers(loader.batch_at(epoch * rows + i))[0] for i in range(rows)]


def assert_same(a: Batch, b: Batch) -> None:
    for field in fields(a):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


def test_batch_is_stacked_numpy_rows() -> None:
    rows = numbered_rows(10)
    batch = Loader([rows], [1.0], batch_size=3, seed=0).batch_at(0)
    for field in (field for field in fields(batch) if field.default is MISSING):  # of any data
        array = getattr(batch, field.name)
        assert isinstance(array, np.ndarray) and array.shape == (3, 4)
        assert array.dtype == getattr(rows[0], field.name).dtype
        for b, row in enumerate(numbers(batch)):
            np.testing.assert_array_equal(array[b], getattr(rows[row], field.name))


def test_batch_at_is_pure() -> None:
    steps = [0, 1, 2, 3, 4, 1000, 10**9]
    loader = make_loader(10, batch_size=4, seed=7)
    first = {step: loader.batch_at(step) for step in steps}
    for step in reversed(steps):
        assert_same(first[step], loader.batch_at(step))
        assert_same(first[step], make_loader(10, batch_size=4, seed=7).batch_at(step))


def test_the_batch_size_only_cuts_the_sequence_of_rows() -> None:
    # 10 is not divisible by 4 or 3: batches span epochs, and no row is dropped.
    sequence = [row for epoch in range(3) for row in order(seed=7, rows=10, epoch=epoch)]
    for batch_size in (1, 3, 4, 12):
        loader = make_loader(10, batch_size, seed=7)
        for step in range(30 // batch_size):
            assert numbers(loader.batch_at(step)) == sequence[step * batch_size : (step + 1) * batch_size]


def test_every_epoch_is_another_permutation() -> None:
    orders = [order(seed=0, rows=30, epoch=epoch) for epoch in range(4)]
    assert all(sorted(o) == list(range(30)) for o in orders)
    assert len({tuple(o) for o in [*orders, range(30)]}) == 5


def test_seeds_differ_and_share_no_epoch_shifted_by_one() -> None:
    assert order(seed=0, rows=30, epoch=0) != order(seed=1, rows=30, epoch=0)
    assert order(seed=0, rows=30, epoch=1) != order(seed=1, rows=30, epoch=0)


def test_the_order_of_a_seed_never_changes() -> None:
    """A run that is resumed with another version of Grain must read the same rows; otherwise it cannot resume."""
    assert order(seed=0, rows=10, epoch=0) == [1, 2, 4, 5, 9, 7, 8, 6, 0, 3]
    assert order(seed=0, rows=10, epoch=1) == [9, 6, 1, 8, 2, 0, 3, 5, 4, 7]


def test_held_out_batches_are_spread_over_the_split() -> None:
    batches = read_validation_batches(numbered_rows(30), batch_size=3, count=2)
    assert [numbers(b) for b in batches] == [[0, 5, 10], [15, 20, 25]]


@pytest.mark.parametrize("batch_size", [3, 11])
def test_validation_batches_are_at_most_one_pass_and_the_last_one_is_padded(batch_size: int) -> None:
    batches = read_validation_batches(numbered_rows(10), batch_size, count=100)
    assert len(batches) == -(-10 // batch_size)
    assert {len(batch.tokens) for batch in batches} == {batch_size}
    assert [n for b in batches for n in numbers(b)][:10] == list(range(10))
    padding = jax.tree.map(lambda field: field[10 % batch_size :], batches[-1])
    assert all(not field.any() for field in jax.tree.leaves(padding))


def test_an_epoch_reads_every_token_once() -> None:
    """Check unique tokens in documents of random lengths, so that every lost or repeated token is found."""
    random = np.random.default_rng(0)
    for length in (1, 5, 16, 64):
        ends = np.unique(random.integers(1, 500, 60))
        of = IndexedPiece("numbers", np.arange(ends[-1]), ends, np.zeros(ends.size, np.uint64))
        rows = PackedRows(join_all([of]), length, vocabulary_size=int(ends[-1]))
        loader = Loader([rows], [1.0], batch_size=1, seed=0)
        for epoch in range(2):
            batches = [loader.batch_at(step) for step in range(epoch * len(rows), (epoch + 1) * len(rows))]
            real = [batch.segment_ids > 0 for batch in batches]
            tokens, targets = (
                np.sort(np.concatenate([getattr(batch, name)[r] for batch, r in zip(batches, real, strict=True)]))
                for name in ("tokens", "targets")
            )
            assert np.array_equal(tokens, np.arange(ends[-1] - 1))
            assert np.array_equal(targets, np.arange(1, ends[-1]))
            learnt = np.concatenate([batch.targets[batch.loss_mask] for batch in batches])
            assert np.array_equal(np.sort(learnt), np.setdiff1d(np.arange(ends[-1]), [0, *ends]))


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.7, 0.2, 0.1], [3.0, 1e-3, 1.0]])
def test_a_mixture_gives_each_source_its_share_row_by_row(weights: list[float]) -> None:
    shares = [round(weight / sum(weights) * 10**6) for weight in weights]
    given = [0] * len(weights)
    for row in range(2000):
        source, number = pick_source(row, shares)
        assert number == given[source]
        given[source] += 1
        for count, share in zip(given, shares, strict=True):
            assert abs(count - (row + 1) * share / sum(shares)) < len(shares)
    assert pick_source(10**15, shares)[1] <= 10**15


def test_each_source_of_a_mixture_has_its_own_epochs() -> None:
    loader = mixture([2.0, 1.0, 1.0])
    read = [number for step in range(40) for number in numbers(loader.batch_at(step))]
    for first, rows, share in ((0, 10, 80), (100, 8, 40), (200, 5, 40)):
        given = [number - first for number in read if first <= number < first + 100]
        assert len(given) == share
        epochs = [given[i : i + rows] for i in range(0, share - rows + 1, rows)]
        assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_the_order_of_a_mixture_never_changes() -> None:
    assert [numbers(mixture([2.0, 1.0, 1.0]).batch_at(step)) for step in range(2)] == [
        [200, 4, 100, 6],
        [204, 9, 101, 7],
    ]


def test_a_process_reads_only_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    packed = PackedRows.read
    monkeypatch.setattr(PackedRows, "read", lambda rows, n, *epoch: read.append(n) or packed(rows, n, *epoch))
    weights, local_rows = [0.6, 0.3, 0.1], [3, 0]
    for step in (0, 7):
        whole = numbers(mixture(weights).batch_at(step))
        read.clear()
        assert numbers(mixture(weights, local_rows=local_rows).batch_at(step)) == [whole[row] for row in local_rows]
        assert len(read) == len(local_rows)
    whole = [numbers(batch) for batch in read_validation_batches(numbered_rows(30), 4, count=2)]
    read.clear()
    batches = read_validation_batches(numbered_rows(30), 4, count=2, local_rows=local_rows)
    assert [numbers(batch) for batch in batches] == [[rows[row] for row in local_rows] for rows in whole]
    assert len(read) == 2 * len(local_rows) + 1  # 1 for the check that the loss counts a token


class Slow(Loader):
    """Loader that waits until the test releases it, or fails."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.let, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        self.current_source = "slow.jsonl"

    def rows_at(self, step: int) -> Iterator[Batch]:
        self.asked.append(step)
        self.begun.release()
        self.let.acquire()
        if step == 7:
            raise InputError("damaged")
        yield Batch(step, step, step, step, step)


def test_batches_are_read_ahead_in_order_and_no_further() -> None:
    loader = Slow()
    loader.let.release(n=100)
    batches = read_ahead(loader, 5, 60, lambda: False)
    assert [next(batches)[0].tokens.tolist() for _ in range(2)] == [[5], [6]]
    with pytest.raises(InputError, match="damaged"):
        next(batches)
    assert loader.asked == list(range(5, 5 + len(loader.asked))) and len(loader.asked) <= 5


def test_two_batches_are_read_before_they_are_asked_for() -> None:
    loader = Slow()
    loader.let.release(n=100)
    batches = read_ahead(loader, 0, 60, lambda: False)
    next(batches)
    assert all(loader.begun.acquire(timeout=120) for _ in range(3))
    batches.close()


class Clock:
    """Clock of `read_ahead`, which a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.looked = 0.0, threading.Event()
        self.step = 0.0  # by which every reading advances it
        monkeypatch.setattr(loading, "time", SimpleNamespace(perf_counter=self.look))

    def look(self) -> float:
        self.looked.set()
        self.now += self.step
        return self.now


def test_waiting_is_measured_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the wait and the stall error, without waiting for the reading thread, which never ends."""
    monkeypatch.setattr(loading, "JOIN_SECONDS", 0)
    clock = Clock(monkeypatch)

    class Taking(Slow):
        def rows_at(self, step: int) -> Iterator[Batch]:
            if step == 0:
                assert clock.looked.wait(120)
                clock.now += 3.0
            return super().rows_at(step)

    loader = Taking()
    batches = read_ahead(loader, 0, 10, lambda: False)
    loader.let.release()
    assert next(batches)[1] == 3.0
    clock.step = 4.0
    with pytest.raises(InputError, match="no batch in 10 s: .*slow.jsonl stalls.*watchdog.floor_seconds"):
        next(batches)
    loader.let.release(n=100)
    assert clock.now == 3.0 + 4 * 4.0  # one reading before the wait, and as many as exceed 10 s


def test_a_wait_for_a_batch_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "JOIN_SECONDS", 0)
    stops: list[bool] = []
    batches = read_ahead(loader := Slow(), 3, 60, lambda: bool(stops))
    loader.let.release()
    next(batches)
    stops.append(True)
    with pytest.raises(Preempted, match="step 4"):
        next(batches)
    loader.let.release(n=100)


def test_reading_ends_between_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread must not read the rest of the batch, because an interpreter that shuts down meanwhile would abort."""
    monkeypatch.setattr(loading, "JOIN_SECONDS", 120)
    clock, read = Clock(monkeypatch), []

    class Endless(Slow):
        def rows_at(self, step: int) -> Iterator[Batch]:
            while True:
                read.append(step)
                clock.now += 1.0
                time.sleep(0.001)  # few rows, because the rows of the abandoned batch are stacked
                yield Batch(step, step, step, step, step)

    before = set(threading.enumerate())
    batches = read_ahead(Endless(), 0, 5, lambda: False)
    with pytest.raises(InputError, match="stalls"):
        next(batches)
    assert read and not set(threading.enumerate()) - before


def test_a_held_out_split_without_targets_is_rejected() -> None:
    of = IndexedPiece("ends", np.zeros(40, np.int64), np.arange(1, 41), np.zeros(40, np.uint64))
    rows = PackedRows(join_all([of]), 4, vocabulary_size=1)
    with pytest.raises(InputError, match="the corpus has no token to predict; add longer documents"):
        read_validation_batches(rows, batch_size=2, count=1)
