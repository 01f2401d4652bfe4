"""The layers of each pipeline stage: how chunks split the model, which splits are refused, and how segments rest.

segments.py defines segment, period, chunk and slot.
"""

import jax
import numpy as np

from jaxopt_llm.config import PipelineConfig
from jaxopt_llm.execution.schedules import make_table
from jaxopt_llm.execution.segments import name_segments
from jaxopt_llm.model.model import Model, Segment

EVEN = PipelineConfig()  # one chunk per stage, as equal as possible
SMALL_IDLE_SHARE = 0.1  # up to this share of a step, more microbatches gain little


def split_periods(layout: tuple[Segment, ...], stages: int, pipeline: PipelineConfig = EVEN) -> tuple[np.ndarray, ...]:
    """Return the period in each slot, for each segment int [virtual, stages, slots]; -1 for an empty slot.

    Chunks are consecutive whole periods in the order of the model; chunk c of stage s is the (c × stages + s)-th. They
    have the numbers of layers of `pipeline.split`, or are as equal as possible, with at least one period each. In every
    chunk, a segment has as many slots as in the chunk that holds most of it.
    """
    virtual, split = (pipeline.virtual_stages, pipeline.split) if stages > 1 else (1, ())
    periods = [(index, period) for index, segment in enumerate(layout) for period in range(segment.repeats)]
    chunks = stages * virtual
    assert chunks <= len(periods), "`split_problems` refuses more"
    ends = period_ends(layout)
    bounds = [0]
    wanted_ends = np.cumsum(split)[:-1] if split else ends[-1] * np.arange(1, chunks) / chunks
    for chunk, wanted in enumerate(wanted_ends, start=1):
        nearest = int(np.argmin(np.abs(ends - wanted))) + 1
        bounds.append(min(max(nearest, bounds[-1] + 1), len(periods) - (chunks - chunk)))
    by_chunk = [periods[start:end] for start, end in zip(bounds, [*bounds[1:], len(periods)], strict=True)]

    def fill_slots(index: int) -> np.ndarray:
        rows = [[period for segment, period in chunk if segment == index] for chunk in by_chunk]
        slots = max(map(len, rows))
        padded = np.array([row + [-1] * (slots - len(row)) for row in rows], int)
        return padded.reshape(virtual, stages, slots)

    return tuple(map(fill_slots, range(len(layout))))


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
    specs = {"non_layer": model.specs["non_layer"]}
    for name, periods in zip(name_segments(model), split_periods(model.layout, stages, pipeline), strict=True):
        specs[name] = jax.tree.map(lambda spec, periods=periods: spec.unstack().stack(periods), model.specs[name])
    return model.with_specs(specs)
