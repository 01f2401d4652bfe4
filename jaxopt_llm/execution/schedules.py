"""Schedules of a pipeline, as tables: the work of each stage in each tick.

A model on S stages is V·S chunks of consecutive layers, in the order of the model. Chunk c of stage s is the
(c·S + s)-th, so a microbatch goes around the stages V times. In a tick, a stage runs a chunk forward on one microbatch,
then a chunk backward on another one, or only one of the two, or nothing. Its neighbour has the result in the next tick.

A schedule gives the tick in which each chunk runs for each microbatch. All stages keep step, so every chunk runs one
tick after the chunk before it, backward as well as forward. Schedules differ in two things:

    gpipe        All backwards come after all forwards; M microbatches wait in between (Huang et al. 2019,
                 arXiv:1811.06965).
    1f1b         A backward starts as soon as a microbatch has passed the last chunk; 2S - 1 wait, for any M (Narayanan
                 et al. 2019, arXiv:1806.03377).
    interleaved  The same with several chunks per stage, in rounds of S microbatches; (V + 1)·S - 1 inputs wait, of
                 chunks 1/V as long (Narayanan et al. 2021, arXiv:2104.04473).

If S divides M or V = 1, the forwards take V·M + S - 1 ticks, and so do the backwards, each 1/V of a stage's time. The
idle share is then (S - 1) / (V·M + S - 1), and in the same time fewer inputs wait in 1f1b than in gpipe. If S does not
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

    microbatch: -1 where the stage does nothing; chunk and buffer are then 0, a buffer in which another input may wait.
    buffer: where the input of the chunk waits for its backward.
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
    nothing = np.full((ticks.max() + 1, stages), -1, np.int32)
    idle = Work(nothing, np.zeros_like(nothing), np.zeros_like(nothing))
    return Table(_make_work(ticks, np.zeros_like(ticks), len(nothing)), idle, chunks, 0)


def tabulate(forward: np.ndarray, backward: np.ndarray) -> Table:
    """Return the table of a schedule, given the tick of each chunk's forward and backward, int [V, S, M].

    Checks that a chunk runs exactly one tick after the chunk before it (backward: after the chunk behind it) and takes
    the microbatches in order, so that sums round alike in all schedules; that a stage runs one chunk per tick each way;
    and that no backward runs before its forward.
    """
    chunks, stages, microbatches = forward.shape
    assert np.all(forward >= 0), "a forward comes before the first tick"
    for ticks, order in ((forward, 1), (backward, -1)):
        in_order = ticks.reshape(chunks * stages, microbatches)[::order]
        assert np.all(np.diff(in_order, axis=0) == 1), "a chunk does not run one tick after the one before"
        assert np.all(np.diff(ticks) > 0), "a chunk does not take the microbatches in order"
        by_stage = np.swapaxes(ticks, 0, 1).reshape(stages, -1)
        assert all(len(set(row)) == row.size for row in by_stage), "a stage has two chunks in a tick"
    assert np.all(backward >= forward), "a backward comes before its forward"
    buffers = _assign_buffers(forward, backward)
    length = int(backward.max()) + 1
    forward_work, backward_work = (_make_work(ticks, buffers, length) for ticks in (forward, backward))
    return Table(forward_work, backward_work, chunks, int(buffers.max()) + 1)


def _make_work(tick_of: np.ndarray, buffer_of: np.ndarray, ticks: int) -> Work:
    """Turn the ticks and buffers [V, S, M] of chunks into the work [T, S] of stages."""
    chunks, stages, microbatches = np.indices(tick_of.shape)
    microbatch = np.full((ticks, tick_of.shape[1]), -1, np.int32)
    chunk, buffer = np.zeros_like(microbatch), np.zeros_like(microbatch)
    microbatch[tick_of, stages], chunk[tick_of, stages], buffer[tick_of, stages] = microbatches, chunks, buffer_of
    return Work(microbatch, chunk, buffer)


def _assign_buffers(forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return a buffer for each input, int [V, S, M]: the one that was free first.

    The input has it from its forward to the end of the tick of its backward.
    """
    buffers = np.zeros_like(forward)
    for stage in range(forward.shape[1]):
        free_from: list[tuple[int, int]] = []  # a heap of (the first tick in which a buffer is free again, the buffer)
        begin, end = forward[:, stage].ravel(), backward[:, stage].ravel()
        assigned = np.zeros_like(begin)
        for unit in np.argsort(begin):
            has_room = free_from and free_from[0][0] <= begin[unit]
            assigned[unit] = heapq.heappop(free_from)[1] if has_room else len(free_from)
            heapq.heappush(free_from, (int(end[unit]) + 1, int(assigned[unit])))
        buffers[:, stage] = assigned.reshape(buffers[:, stage].shape)
    return buffers


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
    return forward, forward[-1, -1, 0] + forward[::-1, ::-1]


SCHEDULES: dict[Schedule, Callable[[int, int, int], Ticks]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _one_forward_one_backward,
}
