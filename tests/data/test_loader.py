"""Batches as a function of (seed, step), and the fixed held-out batches."""

from dataclasses import fields

import numpy as np
import pytest

from jaxopt_llm.data.loader import Loader, held_out_batches
from jaxopt_llm.data.packing import PackedRows, token_stream
from jaxopt_llm.data.tokenizer import ByteTokenizer
from jaxopt_llm.errors import InputError
from jaxopt_llm.model.batch import Batch


def numbered_rows(count: int) -> PackedRows:
    """Rows of 4 tokens, each of which holds its own number: row i is the document [i, i] with its delimiters."""
    # The extra byte is the last row's last target.
    return PackedRows(token_stream([bytes([i, i]) for i in range(count)] + [b"x"], ByteTokenizer()), 4)


def numbers(batch: Batch) -> list[int]:
    return [int(n) for n in batch.tokens[:, 1]]


def order(seed: int, rows: int, epoch: int) -> list[int]:
    loader = Loader(numbered_rows(rows), batch_size=1, seed=seed)
    return [numbers(loader.batch_at(epoch * rows + i))[0] for i in range(rows)]


def assert_same(a: Batch, b: Batch) -> None:
    for field in fields(a):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


def test_batch_is_stacked_numpy_rows() -> None:
    rows = numbered_rows(10)
    batch = Loader(rows, batch_size=3, seed=0).batch_at(0)
    for field in fields(batch):
        array = getattr(batch, field.name)
        assert isinstance(array, np.ndarray) and array.shape == (3, 4)
        assert array.dtype == getattr(rows[0], field.name).dtype
        for b, row in enumerate(numbers(batch)):
            np.testing.assert_array_equal(array[b], getattr(rows[row], field.name))


def test_batch_at_is_pure() -> None:
    steps = [0, 1, 2, 3, 4, 1000, 10**9]
    loader = Loader(numbered_rows(10), batch_size=4, seed=7)
    first = {step: loader.batch_at(step) for step in steps}
    for step in reversed(steps):
        assert_same(first[step], loader.batch_at(step))
        assert_same(first[step], Loader(numbered_rows(10), batch_size=4, seed=7).batch_at(step))


def test_the_batch_size_only_cuts_the_sequence_of_rows() -> None:
    # 10 rows do not divide by 4 or 3: batches span epochs, and no row is dropped.
    sequence = [row for epoch in range(3) for row in order(seed=7, rows=10, epoch=epoch)]
    for batch_size in (1, 3, 4, 12):
        loader = Loader(numbered_rows(10), batch_size, seed=7)
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
    """A run that is resumed under another Grain must read the same rows: if this fails, runs do not resume."""
    assert order(seed=0, rows=10, epoch=0) == [1, 2, 4, 5, 9, 7, 8, 6, 0, 3]
    assert order(seed=0, rows=10, epoch=1) == [9, 6, 1, 8, 2, 0, 3, 5, 4, 7]


def test_held_out_batches_are_spread_over_the_split() -> None:
    batches = held_out_batches(numbered_rows(30), batch_size=3, count=2)
    assert [numbers(b) for b in batches] == [[0, 5, 10], [15, 20, 25]]


def test_held_out_batches_are_at_most_one_pass_of_full_batches() -> None:
    batches = held_out_batches(numbered_rows(10), batch_size=3, count=100)
    assert [n for b in batches for n in numbers(b)] == list(range(9))


def test_fewer_held_out_rows_than_one_batch_is_an_input_error_with_the_numbers() -> None:
    with pytest.raises(InputError, match="10 rows of 4 tokens.* batch of 11"):
        held_out_batches(numbered_rows(10), batch_size=11, count=1)


def test_a_batch_size_below_one_is_an_input_error() -> None:
    with pytest.raises(InputError, match="batch size"):
        Loader(numbered_rows(10), batch_size=0, seed=0)
    with pytest.raises(InputError, match="batch size"):
        held_out_batches(numbered_rows(10), batch_size=0, count=1)


def test_a_negative_seed_is_an_input_error() -> None:
    with pytest.raises(InputError, match="run.seed"):
        Loader(numbered_rows(10), batch_size=1, seed=-1)
