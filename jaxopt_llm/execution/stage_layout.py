"""The layers of each pipeline stage: how chunks split the model, which splits are refused, and how segments rest.

segments.py defines segment, period, chunk and slot.
"""

import itertools
from collections.abc import Iterator

import jax
import numpy as np

from jaxopt_llm.config import PipelineConfig
from jaxopt_llm.execution.schedules import make_table
from jaxopt_llm.model.model import Model, Segment, name_mtp_modules, name_segments

EVEN = PipelineConfig()  # one chunk per stage, as equal as possible
MOST_SPLITS = 1000  # compared with the even one, for models of many segments
SMALL_IDLE_SHARE = 0.1  # up to this share of a step, more microbatches gain little


def split_periods(layout: tuple[Segment, ...], stages: int, pipeline: PipelineConfig = EVEN) -> tuple[np.ndarray, ...]:
    """Return the period in each slot, for each segment int [virtual, stages, slots]; -1 for an empty slot.

    Chunks are consecutive whole periods in the order of the model; chunk c of stage s is the (c × stages + s)-th. They
    have the numbers of layers of `pipeline.split`. By default they are as equal as possible, with at least one period
    each, unless other chunks have fewer layer slots. In every chunk, a segment has as many slots as in the chunk that
    holds most of it, and a stage computes empty slots, too.
    """
    virtual, split = (pipeline.virtual_stages, pipeline.split) if stages > 1 else (1, ())
    repeats, chunks = [segment.repeats for segment in layout], stages * virtual
    assert chunks <= sum(repeats), "`split_problems` refuses more"
    ends = period_ends(layout)
    if split:
        counts = _count_by_chunk(repeats, np.searchsorted(ends, np.cumsum(split)) + 1)
    else:
        widths = np.array([len(segment.kinds) for segment in layout])
        even = _count_by_chunk(repeats, _divide_evenly(ends, chunks))
        counts = min(even, *_list_fuller_splits(repeats, chunks), key=lambda each: np.max(each, axis=0) @ widths)
    starts = np.cumsum(counts, axis=0) - counts

    def fill_slots(index: int) -> np.ndarray:
        slot = np.arange(np.max(counts[:, index]))
        padded = np.where(slot < counts[:, index, None], starts[:, index, None] + slot, -1)
        return padded.reshape(virtual, stages, slot.size)

    return tuple(map(fill_slots, range(len(layout))))


def _divide_evenly(ends: np.ndarray, chunks: int) -> np.ndarray:
    """Return the periods up to the end of each chunk, int [chunks], for chunks with layers as equal as possible."""
    bounds = [0]
    for chunk, wanted in enumerate(ends[-1] * np.arange(1, chunks) / chunks, start=1):
        nearest = int(np.argmin(np.abs(ends - wanted))) + 1
        bounds.append(min(max(nearest, bounds[-1] + 1), len(ends) - (chunks - chunk)))
    return np.array([*bounds[1:], len(ends)])


def _count_by_chunk(repeats: list[int], bounds: np.ndarray) -> np.ndarray:
    """Return the periods of each segment in each chunk, int [chunks, segments]. bounds: as of `_divide_evenly`."""
    segment_of_period = np.repeat(np.arange(len(repeats)), repeats)
    parts = np.split(segment_of_period, bounds[:-1])
    return np.array([np.bincount(part, minlength=len(repeats)) for part in parts])


def _list_fuller_splits(repeats: list[int], chunks: int) -> Iterator[np.ndarray]:
    """Yield splits, int [chunks, segments], in which chunks hold as much as possible of what the largest one may hold.

    One is yielded for each choice of most periods of all segments but the longest.
    """
    longest, fair = int(np.argmax(repeats)), -(-sum(repeats) // chunks)
    choices = [[0] if index == longest else range(1, min(count, fair) + 1) for index, count in enumerate(repeats)]
    for chosen in itertools.islice(itertools.product(*choices), MOST_SPLITS):
        for most in range(1, repeats[longest] + 1):
            limits = [most if index == longest else each for index, each in enumerate(chosen)]
            if (counts := _fill_chunks(repeats, limits, chunks)) is not None:
                yield counts
                break


def _fill_chunks(repeats: list[int], limits: list[int], chunks: int) -> np.ndarray | None:
    """Return a split with at most `limits` periods of each segment in a chunk; None: they do not hold all periods."""
    left, counts = list(repeats), np.zeros((chunks, len(repeats)), int)
    for chunk in range(chunks):
        for index, limit in enumerate(limits):
            spare = sum(left) - (chunks - chunk - 1)  # each later chunk needs a period
            counts[chunk, index] = taken = min(limit, left[index], spare)
            left[index] -= taken
            if left[index]:  # the next segment follows in a later chunk
                break
    return None if any(left) else counts


def period_ends(layout: tuple[Segment, ...]) -> np.ndarray:
    """Return the number of layers up to the end of each period, int [periods]: a chunk can only end there."""
    return np.cumsum([len(segment.kinds) for segment in layout for _ in range(segment.repeats)])


def split_problems(layout: tuple[Segment, ...], stages: int, pipeline: PipelineConfig) -> list[str]:
    """Return why `split_periods` cannot split the layers so, as error messages.

    There are none for one stage, where `pipeline` has no effect.
    """
    if stages == 1:
        return []
    ends, virtual = period_ends(layout), pipeline.virtual_stages
    periods, layers, chunks = len(ends), int(ends[-1]), stages * virtual
    unit = "layers" if periods == layers else "periods of model.pattern"
    settings = f"mesh.pipeline={stages}" + (f" × pipeline.virtual_stages={virtual}" if virtual > 1 else "")
    per_stage = -(-periods // stages)
    divisors = [str(n) for n in range(2, per_stage + 1) if per_stage % n == 0 and stages * n <= periods]
    choices = f"set --pipeline.virtual-stages {' or '.join(divisors)}, or " if divisors else "set "
    if chunks > periods:
        remedy = (
            f"{choices}--pipeline.schedule 1f1b with --pipeline.virtual-stages 1"
            if stages <= periods
            else f"set --mesh.pipeline to at most {periods}"
        )
        return [f"{settings} exceeds the {periods} {unit} of model.layers={layers}: {remedy}"]
    if pipeline.split:
        return _explicit_split_problems(ends, chunks, settings, pipeline.split)[:1]
    if per_stage % virtual:
        return [
            f"pipeline.virtual_stages={virtual} does not divide the {per_stage} {unit} of a stage with mesh.pipeline="
            f"{stages}: {choices}--pipeline.split to the numbers of layers of the {chunks} chunks"
        ]
    return []


def _explicit_split_problems(ends: np.ndarray, chunks: int, settings: str, split: tuple[int, ...]) -> list[str]:
    bounds, setting = np.cumsum(split), f"pipeline.split={split}"
    if len(split) != chunks:
        return [f"{setting} has {len(split)} numbers: give {chunks}, one for each chunk of {settings}"]
    if bounds[-1] != ends[-1]:
        return [f"{setting} adds up to {bounds[-1]} layers: make it add up to model.layers={ends[-1]}"]
    return [
        f"{setting}: chunk {index} ends after {bound} layers, within a period of model.pattern: end it after "
        f"{' or '.join(map(str, (*ends[ends < bound][-1:], *ends[ends > bound][:1])))} layers"
        for index, bound in enumerate(bounds, 1)
        if bound not in ends
    ]


def describe_waste(layout: tuple[Segment, ...], stages: int, microbatches: int, pipeline: PipelineConfig) -> str:
    """Return a message with the share of a step's time that is idle, and the layer slots that are empty."""
    idle_share, idle_with_twice = (
        make_table(pipeline.schedule, stages, count, pipeline.virtual_stages).idle_share
        for count in (microbatches, 2 * microbatches)
    )
    can_gain = idle_share > SMALL_IDLE_SHARE and idle_with_twice < idle_share
    remedy = "; raise --training.accumulation to reduce it" if can_gain else ""
    periods = zip(layout, split_periods(layout, stages, pipeline), strict=True)
    slots, layers = sum(len(segment.kinds) * each.size for segment, each in periods), int(period_ends(layout)[-1])
    padding = f"; {slots - layers} of {slots} layer slots are padding" if slots > layers else ""
    return (
        f"{pipeline.schedule}, {idle_share:.0%} of a step is idle with training.accumulation={microbatches} and "
        f"mesh.pipeline={stages}{remedy}{padding}"
    )


def stack_by_stage(model: Model, stages: int, pipeline: PipelineConfig = EVEN) -> Model:
    """Return the model with segments that rest as [virtual, stages, slots, ...]."""
    outside = ("non_layer", *name_mtp_modules(model.mtp_layout))
    specs = {name: model.specs[name] for name in outside}
    for name, periods in zip(name_segments(model.layout), split_periods(model.layout, stages, pipeline), strict=True):
        specs[name] = jax.tree.map(lambda spec, periods=periods: spec.unstack().stack(periods), model.specs[name])
    return model.with_specs(specs)
