"""Which rows each step reads, and reading them ahead of the step."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import grain
import jax
import numpy as np

from jaxopt_llm.data.packing import PackedRows
from jaxopt_llm.errors import InputError, Preempted
from jaxopt_llm.model.batch import Batch

_AHEAD = 2  # batches beside the one that is asked for
PARTING = 5.0  # seconds that reading is given to end


class Loader:
    """Training batches without end, as a pure function of (seed, step): there is no position to save or restore.

    Step reads global rows step * B to step * B + B - 1. A mixture gives global row r to one of its sources, so that of
    any first n rows each has its share to within one row (two, of three sources; ...), as that source's next row.
    Row k of a source is row k % len(rows) of the shuffle of its epoch k // len(rows): every epoch reads every row
    once, in another order. A batch may span two epochs.

    Args:
        sources: rows of the training split.
        weights: share of each source, relative to their sum.
        batch_size: B, sequences per step over all devices.
        seed: of the shuffles, at least 0.
        own: which of a batch's rows this process reads, counted from 0 (default: all).

    Raises:
        InputError: a batch size below 1, or a negative seed.
    """

    def __init__(
        self,
        sources: Sequence[PackedRows],
        weights: Sequence[float],
        batch_size: int,
        seed: int,
        own: Sequence[int] | None = None,
    ) -> None:
        _check_batch_size(batch_size)
        if seed < 0:
            raise InputError(f"run.seed is {seed}: it must be at least 0")
        self._batch_size = batch_size
        self._own = range(batch_size) if own is None else own
        self._names = [rows.name for rows in sources]
        self._shares = _integers(weights)
        # shuffle(seed=seed) would give epoch e the order of epoch e - 1 under seed + 1; seed() hashes the seed first.
        self._shuffled = [
            grain.MapDataset.source(rows).seed(seed + (number << 32)).shuffle().repeat()
            for number, rows in enumerate(sources)
        ]
        self.reading = ""  # the source that batch_at reads from, for whoever waits for it

    def batch_at(self, step: int) -> Batch:
        """Returns this process's rows of the batch of a step, counted from 0: NumPy arrays [own rows, S]."""
        return _stack(self.rows_at(step))

    def rows_at(self, step: int) -> Iterator[Batch]:
        """The rows of `batch_at`, one by one: fields [S]."""
        for row in self._own:
            source, number = mixed(step * self._batch_size + row, self._shares)
            self.reading = self._names[source]
            yield self._shuffled[source][number]


def mixed(row: int, shares: Sequence[int]) -> tuple[int, int]:
    """Which source gives a global row of a mixture, and how many rows it has given before."""
    remaining = sum(shares)
    for source, share in enumerate(shares[:-1]):
        before, after = (count * share // remaining for count in (row, row + 1))
        if after > before:
            return source, before
        row, remaining = row - before, remaining - share
    return len(shares) - 1, row


def read_ahead(
    loader: Loader, first: int, stall_seconds: float, stopping: Callable[[], bool]
) -> Generator[tuple[Batch, float], None, None]:
    """Yields the batches from step `first` on, each with the seconds that it was waited for; reads in the background
    until it is closed.

    Raises what reading raises; InputError where one batch takes longer than `stall_seconds`; Preempted where it is
    waited for one and `stopping()`.
    """
    asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    read: queue.SimpleQueue[Batch | Exception] = queue.SimpleQueue()

    closed = threading.Event()

    def serve() -> None:
        for step in iter(asked.get, None):
            try:
                read.put(_stack(itertools.takewhile(lambda _: not closed.is_set(), loader.rows_at(step))))
            except Exception as error:
                read.put(error)

    # A daemon: a read that never returns must not keep the process.
    thread = threading.Thread(target=serve, name="read-ahead", daemon=True)
    thread.start()
    try:
        for step in range(first, first + _AHEAD):
            asked.put(step)
        for step in itertools.count(first + _AHEAD):
            asked.put(step)
            clock = time.perf_counter()
            while (batch := _next(read)) is None:
                if stopping():
                    raise Preempted(step - _AHEAD)
                if time.perf_counter() - clock > stall_seconds:
                    raise InputError(
                        f"no batch in {stall_seconds:g} s: reading data.paths {loader.reading} stalls; see to its "
                        "storage, or raise data.stall_seconds"
                    )
            if isinstance(batch, Exception):
                raise batch
            yield batch, time.perf_counter() - clock
    finally:
        closed.set()
        asked.put(None)
        # A thread that comes back from a library's code while the interpreter ends would abort the process. One that
        # reads from storage that stalls is not waited for.
        thread.join(timeout=PARTING)


def _next(read: queue.SimpleQueue[Batch | Exception]) -> Batch | Exception | None:
    """None where there is none in a moment."""
    try:
        return read.get(timeout=0.2)
    except queue.Empty:
        return None


def held_out_batches(rows: PackedRows, batch_size: int, count: int, own: Sequence[int] | None = None) -> list[Batch]:
    """Returns at most `count` batches of rows spread evenly over the split: the same ones at every evaluation.

    Spread, because documents come in order and the first rows would all be from a few of them.

    Args:
        rows: the held-out split.
        batch_size: B, sequences per batch over all devices.
        count: most batches to read; never more than one pass.
        own: which of a batch's rows this process reads, counted from 0 (default: all).

    Raises:
        InputError: not enough rows for one batch, or none with anything to predict.
    """
    _check_batch_size(batch_size)
    if len(rows) < batch_size:
        raise InputError(
            f"the held-out split has {len(rows)} rows of {rows.sequence_length} tokens, fewer than one batch of "
            f"{batch_size}: raise data.held_out, or lower the batch size or the sequence length"
        )
    count = min(count, len(rows) // batch_size)
    spread = grain.MapDataset.source(rows)[:: len(rows) // (count * batch_size)]
    own = range(batch_size) if own is None else own
    if not any(np.any(spread[row].loss_mask) for row in range(count * batch_size)):
        raise InputError("the held-out split has nothing to predict: no document there has a token after its first")
    return [_stack(spread[first + row] for row in own) for first in range(0, count * batch_size, batch_size)]


def _stack(rows: Iterable[Batch]) -> Batch:
    batch: Batch = jax.tree.map(lambda *fields: np.stack(fields), *rows)
    return batch


def _integers(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers, to a millionth of their sum: row numbers times floats would lose rows."""
    return [max(round(weight / sum(weights) * 10**6), 1) for weight in weights]


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"the batch size is {batch_size}: it must be at least 1")
