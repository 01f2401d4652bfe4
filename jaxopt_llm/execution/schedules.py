"""Schedules of a pipeline, as tables: the work of each stage in each tick.

A model on S stages is V·S chunks of consecutive layers, in the order of the model. Chunk c of stage s is the
(c·S + s)-th, so a microbatch goes around the stages V times. In a tick, a stage runs a chunk forward on one microbatch,
then a chunk backward on another one, or only one of the two, or nothing. Its neighbour has the result in the next tick.

A schedule gives the tick in which each chunk runs for each microbatch. All stages keep step, so every chunk runs one
tick after the chunk before it, backward as well as forward. Schedules differ in two things:

    gpipe        All backwards come after all forwards; M microbatches wait in between (Huang et al. 2019,
                 arXiv:1811.06965).
    1f1b         A backward starts in the tick after a microbatch has passed the last chunk; 2S - 1 wait, for any M
                 (Narayanan et al. 2019, arXiv:1806.03377).
    interleaved  The same with several chunks per stage, in rounds of S microbatches; (V + 1)·S - 1 wait, of chunks 1/V
                 as long (Narayanan et al. 2021, arXiv:2104.04473).

No chunk runs forward and backward for the same microbatch in one tick, and the backward of a tick reads before the
forward writes. The two are therefore independent, and XLA runs the collectives of one next to the matmuls of the other,
unless the chunks are so long that their layers run in loops (segments.needs_loop): it schedules loops one after the
other.

If S divides M or V = 1, the forwards take V·M + S - 1 ticks, and so do the backwards, each 1/V of a stage's time. The
idle share is then (S - 1) / (V·M + S - 1), and in the same time fewer chunks wait in 1f1b than in gpipe. If S does not
divide M, the last round of interleaved has fewer microbatches but takes as long as a full round, except for its last
chunk.

Letters: S stages, V chunks of a stage, M microbatches, T ticks.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flax import struct

from jaxopt_llm.config import Schedule

Ticks = tuple[np.ndarray, np.ndarray]  # the tick of each chunk's forward and of its backward, int [V, S, M]


@struct.dataclass
class Work:
    """The forward or the backward half of a table, int32 [T, S].

    microbatch: -1 where the stage does nothing; chunk is then 0.
    buffer: where what the chunk keeps waits for its backward. A stage that does nothing has one in which nothing waits.
    """

    microbatch: Any
    chunk: Any
    buffer: Any

    def microbatches_of(self, stage: int, chunk: int) -> np.ndarray:
        """Return the microbatch that this chunk runs in each tick, int [T], -1 for none."""
        return np.where(self.chunk[:, stage] == chunk, self.microbatch[:, stage], -1)

    @property
    def active(self) -> np.ndarray:
        """Ticks in which any stage does any of this work, bool [T]."""
        return np.any(self.microbatch >= 0, axis=1)


class Ends(NamedTuple):
    """The microbatches at the ends of the model in each tick, int [T], -1 for none.

    embed: enters the first chunk. loss: leaves the last chunk. loss_backward: begins the last chunk's backward.
    embed_backward: leaves the first chunk's backward.
    """

    embed: Any
    loss: Any
    loss_backward: Any
    embed_backward: Any


@dataclass(frozen=True)
class Table:
    """A schedule. chunks: of a stage. buffers: the most inputs that a stage keeps at a time."""

    forward: Work
    backward: Work
    chunks: int
    buffers: int

    @property
    def stages(self) -> int:
        return int(self.forward.microbatch.shape[1])

    @property
    def ends(self) -> Ends:
        first, last = (0, 0), (self.stages - 1, self.chunks - 1)
        return Ends(
            embed=self.forward.microbatches_of(*first),
            loss=self.forward.microbatches_of(*last),
            loss_backward=self.backward.microbatches_of(*last),
            embed_backward=self.backward.microbatches_of(*first),
        )

    @property
    def output_waits(self) -> bool:
        """True if the last chunk begins its backward later than in the tick after its forward."""
        ends = self.ends
        forward_before = np.concatenate([[-1], ends.loss[:-1]])
        return bool(np.any((ends.loss_backward >= 0) & (ends.loss_backward != forward_before)))

    @property
    def idle_share(self) -> float:
        """Share of the half ticks in which a stage has nothing to do while others work."""
        halves = (self.forward, self.backward)
        busy = sum(int(np.sum(half.microbatch >= 0)) for half in halves)
        return 1 - busy / sum(int(np.sum(half.active)) * self.stages for half in halves)

    @property
    def phases(self) -> list[range]:
        """Consecutive ticks that are alike in whether anything runs forward and whether anything runs backward."""
        active = np.stack([self.forward.active, self.backward.active])
        starts = [0, *(1 + np.flatnonzero(np.any(active[:, 1:] != active[:, :-1], axis=0)))]
        return [range(start, end) for start, end in zip(starts, [*starts[1:], active.shape[1]], strict=True)]


def make_table(schedule: Schedule, stages: int, microbatches: int, chunks: int = 1) -> Table:
    return tabulate(*SCHEDULES[schedule](stages, microbatches, chunks))


def make_forward_table(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """Return a table without backwards, in which no input waits."""
    ticks = _forward_ticks(stages, microbatches, chunks)
    zeros = np.zeros((ticks.max() + 1, stages), np.int32)
    idle = Work(zeros - 1, zeros, zeros)
    return Table(_make_work(ticks, np.zeros_like(ticks), zeros), idle, chunks, 0)


def tabulate(forward: np.ndarray, backward: np.ndarray) -> Table:
    """Return the table of a schedule, given the tick of each chunk's forward and backward, int [V, S, M].

    Checks that a chunk runs exactly one tick after the chunk before it (backward: after the chunk behind it) and takes
    the microbatches in order, so that sums round alike in all schedules; that a stage runs one chunk per tick each way;
    and that every backward runs after its forward.
    """
    chunks, stages, microbatches = forward.shape
    assert np.all(forward >= 0), "a forward comes before the first tick"
    for ticks, order in ((forward, 1), (backward, -1)):
        in_order = ticks.reshape(chunks * stages, microbatches)[::order]
        assert np.all(np.diff(in_order, axis=0) == 1), "a chunk does not run one tick after the one before"
        assert np.all(np.diff(ticks) > 0), "a chunk does not take the microbatches in order"
        by_stage = np.swapaxes(ticks, 0, 1).reshape(stages, -1)
        assert all(len(set(row)) == row.size for row in by_stage), "a stage has two chunks in a tick"
    assert np.all(backward > forward), "a backward does not come after its forward"
    buffers = _assign_buffers(forward, backward)
    free = _find_free_buffers(forward, backward, buffers)
    forward_work, backward_work = (_make_work(ticks, buffers, free) for ticks in (forward, backward))
    return Table(forward_work, backward_work, chunks, int(forward_work.buffer.max()) + 1)


def _make_work(tick_of: np.ndarray, buffer_of: np.ndarray, free: np.ndarray) -> Work:
    """Turn the ticks and buffers [V, S, M] of chunks into the work [T, S] of stages. free: buffers [T, S]."""
    chunks, stages, microbatches = np.indices(tick_of.shape)
    microbatch = np.full(free.shape, -1, np.int32)
    chunk, buffer = np.zeros_like(microbatch), free.astype(np.int32)
    microbatch[tick_of, stages], chunk[tick_of, stages], buffer[tick_of, stages] = microbatches, chunks, buffer_of
    return Work(microbatch, chunk, buffer)


def _assign_buffers(forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return a buffer for each input, int [V, S, M]: the one that was free first.

    The input has it from its forward to its backward, which in a tick reads before the forward writes.
    """
    buffers = np.zeros_like(forward)
    for stage in range(forward.shape[1]):
        free_from: list[tuple[int, int]] = []  # a heap of (the first tick in which a buffer is free again, the buffer)
        begin, end = forward[:, stage].ravel(), backward[:, stage].ravel()
        assigned = np.zeros_like(begin)
        for unit in np.argsort(begin):
            has_room = free_from and free_from[0][0] <= begin[unit]
            assigned[unit] = heapq.heappop(free_from)[1] if has_room else len(free_from)
            heapq.heappush(free_from, (int(end[unit]), int(assigned[unit])))
        buffers[:, stage] = assigned.reshape(buffers[:, stage].shape)
    return buffers


def _find_free_buffers(forward: np.ndarray, backward: np.ndarray, buffers: np.ndarray) -> np.ndarray:
    """Return a buffer in which nothing waits, for each tick of forwards and each stage, int [T, S].

    If all are taken, it is one more.
    """
    waits = np.zeros((int(backward.max()) + 1, forward.shape[1], int(buffers.max()) + 2), bool)
    for unit in np.ndindex(*forward.shape):
        waits[forward[unit] : backward[unit], unit[1], buffers[unit]] = True
    waits[np.setdiff1d(np.arange(len(waits)), forward)] = False
    return np.argmin(waits, axis=2)


def _forward_ticks(stages: int, microbatches: int, chunks: int) -> np.ndarray:
    """Return the tick of each forward, int [V, S, M].

    A round of S microbatches passes the first chunks of all stages, then the second ones, and so on.
    """
    chunk, stage, microbatch = np.indices((chunks, stages, microbatches))
    round_index, position = np.divmod(microbatch, stages)
    return stage + (round_index * chunks + chunk) * stages + position


def _gpipe(stages: int, microbatches: int, chunks: int) -> Ticks:
    forward = _forward_ticks(stages, microbatches, chunks)
    return forward, forward.max() + 1 + forward[::-1, ::-1]


def _one_forward_one_backward(stages: int, microbatches: int, chunks: int) -> Ticks:
    forward = _forward_ticks(stages, microbatches, chunks)
    return forward, forward[-1, -1, 0] + 1 + forward[::-1, ::-1]


SCHEDULES: dict[Schedule, Callable[[int, int, int], Ticks]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _one_forward_one_backward,
}
