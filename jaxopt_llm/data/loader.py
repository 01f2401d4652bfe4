"""Which rows each step reads."""

import grain

from jaxopt_llm.data.packing import PackedRows
from jaxopt_llm.errors import InputError
from jaxopt_llm.model.batch import Batch


class Loader:
    """Training batches without end, as a pure function of (seed, step): there is no position to save or restore.

    Global row r is row r % len(rows) of the shuffle of epoch r // len(rows), and step reads global rows
    step * B to step * B + B - 1. Every epoch reads every row once, in another order; a batch may span two epochs.

    Args:
        rows: the training split.
        batch_size: B, sequences per step over all devices.
        seed: of the shuffle, at least 0.

    Raises:
        InputError: a batch size below 1 or a negative seed.
    """

    def __init__(self, rows: PackedRows, batch_size: int, seed: int) -> None:
        _check_batch_size(batch_size)
        if seed < 0:
            raise InputError(f"run.seed is {seed}: it must be at least 0")
        # shuffle(seed=seed) would give epoch e the order of epoch e - 1 under seed + 1; seed() hashes the seed first.
        shuffled = grain.MapDataset.source(rows).seed(seed).shuffle()
        self._batches = shuffled.repeat().batch(batch_size, drop_remainder=True)

    def batch_at(self, step: int) -> Batch:
        """Returns the batch of a step, counted from 0: NumPy arrays [B, S]."""
        batch: Batch = self._batches[step]
        return batch


def held_out_batches(rows: PackedRows, batch_size: int, count: int) -> list[Batch]:
    """Returns at most `count` batches of rows spread evenly over the split: the same ones at every evaluation.

    Spread, because documents come in order and the first rows would all be from a few of them.

    Args:
        rows: the held-out split.
        batch_size: B, sequences per batch over all devices.
        count: most batches to read; never more than one pass.

    Raises:
        InputError: not enough rows for one batch.
    """
    _check_batch_size(batch_size)
    if len(rows) < batch_size:
        raise InputError(
            f"the held-out split has {len(rows)} rows of {rows.sequence_length} tokens, fewer than one batch of "
            f"{batch_size}: raise data.held_out, or lower the batch size or the sequence length"
        )
    count = min(count, len(rows) // batch_size)
    spread = grain.MapDataset.source(rows)[:: len(rows) // (count * batch_size)]
    batches = spread.batch(batch_size, drop_remainder=True)
    return [batches[i] for i in range(count)]


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"the batch size is {batch_size}: it must be at least 1")
