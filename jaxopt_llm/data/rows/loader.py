"""Assignment of rows to steps, and a background thread that reads batches ahead of the step."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import grain
import jax
import numpy as np

from jaxopt_llm.core.errors import InputError, Preempted
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.model.batch import Batch

_AHEAD = 2  # batches that are read in addition to the requested one
JOIN_SECONDS = 5.0  # longest wait for the end of the reading thread


class Loader:
    """Endless training batches as a pure function of (seed, step): there is no position to save or restore.

    Step s reads global rows s * B to s * B + B - 1. In a mixture, each global row is the next row of one source. Of any
    first n rows, each source has its share to within one row (for three sources two rows, and so on). Row k of a source
    is row k % len(rows) of the shuffle of its epoch k // len(rows): every epoch reads every row once, in another order.
    Rows of whole documents are packed anew for every epoch. A batch may contain rows of two epochs.

    Args:
        sources: rows of the training split.
        weights: share of each source, relative to their sum.
        batch_size: B, sequences per step over all devices.
        seed: seed of the shuffles, at least 0.
        local_rows: indices of the rows of a batch that this process reads (default: all).

    Attributes:
        current_source: what is being read, for messages.
    """

    def __init__(
        self,
        sources: Sequence[PackedRows],
        weights: Sequence[float],
        batch_size: int,
        seed: int,
        local_rows: Sequence[int] | None = None,
    ) -> None:
        self._batch_size = batch_size
        self._local_rows = range(batch_size) if local_rows is None else local_rows
        self._names = [rows.name for rows in sources]
        self._shares = _integer_shares(weights)
        self._shuffled = [_ShuffledRows(rows, seed + (index << 32)) for index, rows in enumerate(sources)]
        self.current_source = ""

    def batch_at(self, step: int, cancelled: Callable[[], bool] = lambda: False) -> Batch:
        """Return this process's rows of the batch of a step (the first is 0): NumPy arrays [local rows, S].

        If `cancelled()` becomes True meanwhile, the rest is not read.
        """
        return _stack(itertools.takewhile(lambda _: not cancelled(), self.rows_at(step)))

    def rows_at(self, step: int) -> Iterator[Batch]:
        """Yield the rows of `batch_at` one by one: fields [S]."""
        for row in self._local_rows:
            source, index = pick_source(step * self._batch_size + row, self._shares)
            self.current_source = f"data.paths {self._names[source]}"
            yield self._shuffled[source][index]


class _ShuffledRows:
    """Endless rows of one source: each epoch has another order and, of whole documents, another packing."""

    def __init__(self, rows: PackedRows, seed: int) -> None:
        self._rows, self._seed = rows, seed
        # shuffle(seed=seed) would give epoch e the order of epoch e - 1 under seed + 1; seed() hashes the seed first.
        self._order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat()

    def __getitem__(self, index: int) -> Batch:
        return self._rows.read(self._order[index], (self._seed, index // len(self._rows)))


def pick_source(row: int, shares: Sequence[int]) -> tuple[int, int]:
    """Return the source of a global row of a mixture, and the number of rows that this source gave before."""
    remaining = sum(shares)
    for source, share in enumerate(shares[:-1]):
        before, after = (count * share // remaining for count in (row, row + 1))
        if after > before:
            return source, before
        row, remaining = row - before, remaining - share
    return len(shares) - 1, row


class BatchSource(Protocol):
    """Batches by step. current_source: name of what is being read, for messages."""

    current_source: str

    def batch_at(self, step: int, cancelled: Callable[[], bool] = ...) -> Any: ...


def read_ahead(
    loader: BatchSource, first: int, stall_seconds: float, stopping: Callable[[], bool]
) -> Generator[tuple[Any, float], None, None]:
    """Yield (batch, seconds waited for it) for the steps from `first`. A thread reads ahead until this is closed.

    Raises:
        InputError: a batch takes longer than `stall_seconds`.
        Preempted: `stopping()` returns True during a wait for a batch.
        Exception: reading a batch raised it.
    """
    requested: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    closed = threading.Event()

    def serve() -> None:
        for step in iter(requested.get, None):
            try:
                results.put(loader.batch_at(step, closed.is_set))
            except Exception as error:
                results.put(error)

    # A daemon thread, because a read that never returns must not keep the process alive.
    thread = threading.Thread(target=serve, name="read-ahead", daemon=True)
    thread.start()
    try:
        for step in range(first, first + _AHEAD):
            requested.put(step)
        for step in itertools.count(first + _AHEAD):
            requested.put(step)
            clock = time.perf_counter()
            while (batch := _poll(results)) is None:
                if stopping():
                    raise Preempted(step - _AHEAD)
                if time.perf_counter() - clock > stall_seconds:
                    problem = f"no batch in {stall_seconds:g} s: reading {loader.current_source} stalls"
                    raise InputError(f"{problem}; check its storage, or increase watchdog.floor_seconds")
            if isinstance(batch, Exception):
                raise batch
            yield batch, time.perf_counter() - clock
    finally:
        closed.set()
        requested.put(None)
        # A thread that returns from a library's C code while the interpreter shuts down would abort the process. The
        # wait is limited, because the thread may hang in a read from stalled storage.
        thread.join(timeout=JOIN_SECONDS)


def _poll(results: queue.SimpleQueue[Any]) -> Any:
    """Return the next result, or None if there is none within 0.2 s."""
    try:
        return results.get(timeout=0.2)
    except queue.Empty:
        return None


def read_validation_batches(
    rows: PackedRows, batch_size: int, count: int, local_rows: Sequence[int] | None = None
) -> list[Batch]:
    """Return at most `count` batches of rows, spread evenly over a validation set, the same at every evaluation.

    They are spread because documents are in order, so the first rows would all come from a few documents. Every row
    occurs at most once. The last batch is padded with rows that the loss does not count.

    Args:
        rows: the held-out split, or another validation set.
        batch_size: B, sequences per batch over all devices.
        count: maximum number of batches.
        local_rows: indices of the rows of a batch that this process reads (default: all).

    Raises:
        InputError: the loss counts no token of the rows.
    """
    read = min(len(rows), count * batch_size)
    spread = grain.MapDataset.source(rows)[:: len(rows) // read]
    local_rows = range(batch_size) if local_rows is None else local_rows
    if not any(np.any(spread[row].loss_mask) for row in range(read)):
        raise InputError(f"{rows.name} has no token to predict; add longer documents")

    def read_row(row: int) -> Batch:
        return spread[row] if row < read else jax.tree.map(np.zeros_like, spread[0])

    return [_stack(read_row(first + row) for row in local_rows) for first in range(0, read, batch_size)]


def read_in_order(rows: PackedRows, batch_size: int) -> Iterator[Batch]:
    """Yield all rows in order, in batches with fields [B, S]. The last one is padded with empty rows."""
    empty = jax.tree.map(np.zeros_like, rows[0])
    for first in range(0, len(rows), batch_size):
        yield _stack(rows[row] if row < len(rows) else empty for row in range(first, first + batch_size))


def _stack(rows: Iterable[Batch]) -> Batch:
    return jax.tree.map(lambda *fields: np.stack(fields), *rows)


def _integer_shares(weights: Sequence[float]) -> list[int]:
    """Return weights as integers, in millionths of their sum. With floats, row counts would be rounded."""
    return [max(round(weight / sum(weights) * 10**6), 1) for weight in weights]
