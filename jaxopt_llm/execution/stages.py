"""Which layers each stage of a pipeline holds, what cannot be split so, and how a stack rests over the stages."""

from dataclasses import replace

import jax
import numpy as np

from jaxopt_llm.execution.schedules import PipelineConfig, make_table
from jaxopt_llm.model.decoder import Parts, Segment

EVEN = PipelineConfig()


def split(layout: tuple[Segment, ...], stages: int, pipeline: PipelineConfig = EVEN) -> tuple[np.ndarray, ...]:
    """For each segment, int [virtual, stages, slots]: the number of the period at each place, -1 where there is none.

    Chunks are runs of whole periods in the model's order, chunk c of stage s the (c × stages + s)-th of them: of as
    many layers as `pipeline.split` says, or as equal as they come, at least one period each. Every chunk has as many
    slots of a segment as the chunk that holds most of it.
    """
    chunks, given = pipeline.virtual_stages if stages > 1 else 1, pipeline.split if stages > 1 else ()
    periods = [(number, repeat) for number, segment in enumerate(layout) for repeat in range(segment.repeats)]
    runs = stages * chunks
    assert runs <= len(periods), "`problems` refuses more"
    ends = period_ends(layout)
    bounds = [0]
    wanted_ends = np.cumsum(given)[:-1] if given else ends[-1] * np.arange(1, runs) / runs
    for run, wanted in enumerate(wanted_ends, start=1):
        nearest = int(np.argmin(np.abs(ends - wanted))) + 1
        bounds.append(min(max(nearest, bounds[-1] + 1), len(periods) - (runs - run)))
    held = [periods[start:end] for start, end in zip(bounds, [*bounds[1:], len(periods)], strict=True)]

    def place(number: int) -> np.ndarray:
        rows = [[repeat for segment, repeat in run if segment == number] for run in held]
        slots = max(map(len, rows))
        padded = np.array([row + [-1] * (slots - len(row)) for row in rows], int)
        return padded.reshape(chunks, stages, slots)

    return tuple(map(place, range(len(layout))))


def period_ends(layout: tuple[Segment, ...]) -> np.ndarray:
    """The number of layers up to the end of each period, int [periods]: where a run may end."""
    return np.cumsum([len(segment.kinds) for segment in layout for _ in range(segment.repeats)])


def problems(layout: tuple[Segment, ...], stages: int, pipeline: PipelineConfig) -> list[str]:
    """Why `split` cannot split so. On one stage `pipeline` is without effect, and nothing is wrong with it."""
    if stages == 1:
        return []
    ends, virtual = period_ends(layout), pipeline.virtual_stages
    periods, layers, runs = len(ends), int(ends[-1]), stages * virtual
    unit = "layers" if periods == layers else "periods of model.pattern"
    asked = f"mesh.pipeline={stages}" + (f" × pipeline.virtual_stages={virtual}" if virtual > 1 else "")
    of_stage = -(-periods // stages)
    dividing = [str(each) for each in range(2, of_stage + 1) if of_stage % each == 0 and stages * each <= periods]
    choices = f"set --pipeline.virtual-stages {' or '.join(dividing)}, or " * bool(dividing)
    if runs > periods:
        mend = f"{choices}--pipeline.schedule 1f1b" if stages <= periods else f"set --mesh.pipeline {periods} at most"
        return [f"{asked} stages exceed the {periods} {unit} of model.layers={layers}: {mend}"]
    if pipeline.split:
        return _split_problems(ends, runs, asked, pipeline.split)[:1]
    if of_stage % virtual:
        return [
            f"pipeline.virtual_stages={virtual} does not divide the {of_stage} {unit} of a stage, of mesh.pipeline="
            f"{stages}: {choices}--pipeline.split to the layers of each of the {runs} runs"
        ]
    return []


def _split_problems(ends: np.ndarray, runs: int, asked: str, given: tuple[int, ...]) -> list[str]:
    bounds, what = np.cumsum(given), f"pipeline.split={given}"
    if len(given) != runs:
        return [f"{what} says the layers of {len(given)} runs: {asked} needs those of {runs}"]
    if bounds[-1] != ends[-1]:
        return [f"{what} adds up to {bounds[-1]} layers: make it model.layers={ends[-1]}"]
    return [
        f"{what}: run {number} would end after {bound} layers, within a period of model.pattern; the nearest ends are "
        f"after {' and '.join(map(str, (*ends[ends < bound][-1:], *ends[ends > bound][:1])))}"
        for number, bound in enumerate(bounds, 1)
        if bound not in ends
    ]


def waste(layout: tuple[Segment, ...], stages: int, microbatches: int, pipeline: PipelineConfig) -> str:
    """What of a step's time and of the stages' room does no work, as a user reads it."""
    idle = make_table(pipeline.schedule, stages, microbatches, pipeline.virtual_stages).idle
    held = zip(layout, split(layout, stages, pipeline), strict=True)
    room, layers = sum(len(segment.kinds) * places.size for segment, places in held), int(period_ends(layout)[-1])
    padding = f"; {room - layers} of {room} layer slots are padding" if room > layers else ""
    return (
        f"{pipeline.schedule}, {idle:.0%} of a step is idle with training.accumulation={microbatches} for "
        f"mesh.pipeline={stages}: less with more{padding}"
    )


def rest_on_stages(parts: Parts, stages: int, pipeline: PipelineConfig = EVEN) -> Parts:
    """The same parts with stacks that rest as [virtual, stages, slots, ...]."""
    specs = {"outer": parts.specs["outer"]}
    for number, places in enumerate(split(parts.layout, stages, pipeline)):
        name = f"segment_{number}"
        specs[name] = jax.tree.map(lambda spec, places=places: spec.layer().stack(places), parts.specs[name])
    return replace(parts, specs=specs)
