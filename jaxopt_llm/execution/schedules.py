"""Schedules of a pipeline, as tables: what each stage does in each tick.

A model on S stages is V·S chunks, runs of layers in its order; chunk c of stage s is the (c·S + s)-th, so that a
microbatch goes around the stages V times. In a tick a stage runs a chunk forward on one microbatch, then a chunk
backward on another, or one of the two, or nothing; what it gives away, its neighbour has in the next tick.

A schedule says in which tick each chunk runs for each microbatch. All stages keep step, so that every chunk runs one
tick after the one before it, backward as forward, and schedules differ in two things:

    gpipe        backward after all forwards: M microbatches wait in between (Huang et al. 2019, arXiv:1811.06965)
    1f1b         backward as soon as a microbatch has passed the last chunk: 2S - 1 wait, whatever M (Narayanan et al.
                 2019, arXiv:1806.03377)
    interleaved  the same with several chunks a stage, S microbatches taking turns: (V + 1)·S - 1 inputs wait, of chunks
                 a V-th as long (Narayanan et al. 2021, arXiv:2104.04473)

Forwards take V·M + S - 1 ticks and so do backwards, each a V-th of a stage's time, where S divides M or V = 1: the idle
share is (S - 1) / (V·M + S - 1), and fewer chunks wait in 1f1b than in gpipe in the same time. Where S does not divide
M, the fewer microbatches of interleaved's last turn take as long as S would, but for their last chunk.

Letters: S stages, V chunks of a stage, M microbatches, T ticks.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import struct

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Ticks = tuple[np.ndarray, np.ndarray]  # when each chunk runs forward and backward, int [V, S, M]


@dataclass(frozen=True)
class PipelineConfig:
    schedule: Schedule = "1f1b"
    """order of a pipeline's work: gpipe: all forwards, then all backwards; 1f1b: a backward as soon as there can be
    one, so that what waits does not grow with the microbatches; interleaved: so with pipeline.virtual_stages"""
    virtual_stages: int = 1
    """runs of layers that each stage holds, interleaved with those of the others: so many times less is idle"""
    split: tuple[int, ...] = ()
    """layers of each run, in the model's order; none given: as equal as they come"""

    def problems(self) -> list[str]:
        found = []
        if self.schedule == "interleaved" and self.virtual_stages < 2:
            found.append(
                f"pipeline.schedule=interleaved with pipeline.virtual_stages={self.virtual_stages}: set at least 2"
            )
        if self.schedule != "interleaved" and self.virtual_stages != 1:
            found.append(
                f"pipeline.virtual_stages={self.virtual_stages} with pipeline.schedule={self.schedule}: set "
                "--pipeline.schedule interleaved, or 1"
            )
        if any(layers < 1 for layers in self.split):
            found.append(f"pipeline.split={self.split}: each run needs at least 1 layer")
        return found


@struct.dataclass
class Work:
    """One half of a table, int32 [T, S]. microbatch: -1 where the stage does nothing, and the other two are 0, which
    names a slot that another's input may wait in. slot: where the chunk's input waits for its backward."""

    microbatch: Any
    chunk: Any
    slot: Any

    def of(self, stage: int, chunk: int) -> np.ndarray:
        """The microbatch that this chunk runs in each tick, int [T], -1 for none."""
        return np.where(self.chunk[:, stage] == chunk, self.microbatch[:, stage], -1)

    @property
    def runs(self) -> np.ndarray:
        """Whether any stage does any of it, bool [T]."""
        return np.any(self.microbatch >= 0, axis=1)


class Ends(NamedTuple):
    """Which microbatch is at an end of the model in each tick, int [T], -1 for none: it enters the first chunk or
    leaves the last, forward; it turns round in the last or comes through the first, backward."""

    enters: Any
    leaves: Any
    turns: Any
    through: Any


@dataclass(frozen=True)
class Table:
    """slots: inputs that a stage keeps at most."""

    forward: Work
    backward: Work
    chunks: int
    slots: int

    @property
    def stages(self) -> int:
        return int(self.forward.microbatch.shape[1])

    @property
    def ends(self) -> Ends:
        first, last = (0, 0), (self.stages - 1, self.chunks - 1)
        return Ends(self.forward.of(*first), self.forward.of(*last), self.backward.of(*last), self.backward.of(*first))

    @property
    def idle(self) -> float:
        """The share of the ticks' halves in which a stage has nothing to do while others have."""
        halves = (self.forward, self.backward)
        busy = sum(int(np.sum(half.microbatch >= 0)) for half in halves)
        return 1 - busy / sum(int(np.sum(half.runs)) * self.stages for half in halves)

    @property
    def phases(self) -> list[range]:
        """Runs of ticks that are alike in whether anything runs forward and whether anything runs backward."""
        alike = np.stack([self.forward.runs, self.backward.runs])
        starts = [0, *(1 + np.flatnonzero(np.any(alike[:, 1:] != alike[:, :-1], axis=0)))]
        return [range(start, end) for start, end in zip(starts, [*starts[1:], alike.shape[1]], strict=True)]


def make_table(schedule: Schedule, stages: int, microbatches: int, chunks: int = 1) -> Table:
    return tabulate(*SCHEDULES[schedule](stages, microbatches, chunks))


def forward_table(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """Without backwards: nothing waits for one."""
    ticks = _wave(stages, microbatches, chunks)
    none = np.full((ticks.max() + 1, stages), -1, np.int32)
    idle = Work(none, np.zeros_like(none), np.zeros_like(none))
    return Table(_tabulated(ticks, np.zeros_like(ticks), len(none)), idle, chunks, 0)


def tabulate(forward: np.ndarray, backward: np.ndarray) -> Table:
    """The table of a schedule, which is checked: a chunk runs one tick after the one before it, a backward no sooner
    than its forward, and a stage one chunk a tick each way."""
    chunks, stages, microbatches = forward.shape
    assert np.all(forward >= 0), "a forward comes before the first tick"
    for ticks, order in ((forward, 1), (backward, -1)):
        in_order = ticks.reshape(chunks * stages, microbatches)[::order]
        assert np.all(np.diff(in_order, axis=0) == 1), "a chunk does not follow the one before it"
        by_stage = np.swapaxes(ticks, 0, 1).reshape(stages, -1)
        assert all(len(set(row)) == row.size for row in by_stage), "a stage has two chunks in a tick"
    assert np.all(backward >= forward), "a backward comes before its forward"
    slots = _slots(forward, backward)
    length = int(backward.max()) + 1
    return Table(_tabulated(forward, slots, length), _tabulated(backward, slots, length), chunks, int(slots.max()) + 1)


def _tabulated(ticks: np.ndarray, slots: np.ndarray, length: int) -> Work:
    """[V, S, M] -> [T, S]."""
    chunks, stages, microbatches = np.indices(ticks.shape)
    microbatch = np.full((length, ticks.shape[1]), -1, np.int32)
    chunk, slot = np.zeros_like(microbatch), np.zeros_like(microbatch)
    microbatch[ticks, stages], chunk[ticks, stages], slot[ticks, stages] = microbatches, chunks, slots
    return Work(microbatch, chunk, slot)


def _slots(forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """A place for each input from its forward to the end of its backward's tick, the one that was free first."""
    slots = np.zeros_like(forward)
    for stage in range(forward.shape[1]):
        free_from: list[tuple[int, int]] = []  # a heap: the first tick in which a slot is free again, and the slot
        begin, end = forward[:, stage].ravel(), backward[:, stage].ravel()
        found = np.zeros_like(begin)
        for each in np.argsort(begin):
            has_room = free_from and free_from[0][0] <= begin[each]
            found[each] = heapq.heappop(free_from)[1] if has_room else len(free_from)
            heapq.heappush(free_from, (int(end[each]) + 1, int(found[each])))
        slots[:, stage] = found.reshape(slots[:, stage].shape)
    return slots


def _wave(stages: int, microbatches: int, chunks: int) -> np.ndarray:
    """The tick of each forward: S microbatches pass their first chunks, then the same their second."""
    chunk, stage, microbatch = np.indices((chunks, stages, microbatches))
    turn, place = np.divmod(microbatch, stages)
    return stage + (turn * chunks + chunk) * stages + place


def _gpipe(stages: int, microbatches: int, chunks: int) -> Ticks:
    forward = _wave(stages, microbatches, chunks)
    return forward, forward.max() + 1 + forward[::-1, ::-1]


def _one_forward_one_backward(stages: int, microbatches: int, chunks: int) -> Ticks:
    forward = _wave(stages, microbatches, chunks)
    return forward, forward[-1, -1, 0] + forward[::-1, ::-1]


SCHEDULES: dict[Schedule, Callable[[int, int, int], Ticks]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _one_forward_one_backward,
}
