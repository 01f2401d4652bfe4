"""Which layers each stage of a pipeline holds, and how a stack rests over the stages."""

from dataclasses import replace

import jax
import numpy as np

from jaxopt_llm.model.decoder import Parts, Segment


def split(layout: tuple[Segment, ...], stages: int) -> tuple[np.ndarray, ...]:
    """For each segment, int [virtual, stages, slots]: the number of the period at each place, -1 where there is none.

    Stages are runs of whole periods in the model's order, as equal in blocks as they come, at least one period each. A
    stage has as many slots of a segment as the stage that holds most of it. One virtual stage so far.
    """
    periods = [(number, repeat) for number, segment in enumerate(layout) for repeat in range(segment.repeats)]
    assert stages <= len(periods), "validation.validate refuses more"
    ends = np.cumsum([len(layout[number].kinds) for number, _ in periods])  # blocks up to the end of each period
    bounds = [0]
    for stage in range(1, stages):
        nearest = int(np.argmin(np.abs(ends - ends[-1] * stage / stages))) + 1
        bounds.append(min(max(nearest, bounds[-1] + 1), len(periods) - (stages - stage)))
    held = [periods[start:end] for start, end in zip(bounds, [*bounds[1:], len(periods)], strict=True)]

    def place(number: int) -> np.ndarray:
        rows = [[repeat for segment, repeat in stage if segment == number] for stage in held]
        slots = max(map(len, rows))
        return np.array([[row + [-1] * (slots - len(row)) for row in rows]])

    return tuple(map(place, range(len(layout))))


def rest_on_stages(parts: Parts, stages: int) -> Parts:
    """The same parts with stacks that rest as [virtual, stages, slots, ...]."""
    specs = {"outer": parts.specs["outer"]}
    for number, places in enumerate(split(parts.layout, stages)):
        name = f"segment_{number}"
        specs[name] = jax.tree.map(lambda spec, places=places: spec.layer().stack(places), parts.specs[name])
    return replace(parts, specs=specs)
