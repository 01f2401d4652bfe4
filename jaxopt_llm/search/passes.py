"""What a device runs in a step: which layers, and how often."""

import functools
from dataclasses import dataclass

import numpy as np

from jaxopt_llm.config import TrainConfig
from jaxopt_llm.execution import stages
from jaxopt_llm.execution.schedules import PipelineConfig, make_table
from jaxopt_llm.model.config import Kind, ModelConfig
from jaxopt_llm.model.decoder import layout


@dataclass(frozen=True)
class Passes:
    """Layers are run in chunks: all that a device holds at once, but in an interleaved pipeline.

    kinds: of layer in a chunk, the fullest of all, with the number of each. chunks: of a device.
    forward, backward: chunks that are run in a step, those for no microbatch among them. again: forwards of what had
        been run before, recomputation by remat.policy apart. loss: microbatches.
    waiting: inputs of chunks between their forward and their backward. unrolled: whether a loop of a single tick is
    left out by XLA, which then copies what the next loops add to.
    idle: the share of chunks' time that no microbatch, or no layer, makes use of.
    """

    kinds: tuple[tuple[Kind, int], ...]
    chunks: int
    forward: int
    again: int
    backward: int
    loss: int
    waiting: int
    unrolled: bool
    idle: float

    @classmethod
    def of(cls, config: TrainConfig) -> "Passes":
        if config.mesh.pipeline > 1:
            return _on_stages(config.model, config.mesh.pipeline, config.training.accumulation, config.pipeline)
        kinds = tuple((kind, segment.repeats) for segment in layout(config.model) for kind in segment.kinds)
        microbatches = config.training.accumulation
        again = microbatches if config.remat.every > 1 else 0
        return cls(kinds, 1, microbatches, again, microbatches, microbatches, 0, False, 0.0)

    @property
    def layers(self) -> int:
        """Of a chunk."""
        return sum(number for _, number in self.kinds)

    @property
    def forwards(self) -> int:
        return self.forward + self.again


@functools.cache
def _on_stages(model: ModelConfig, count: int, microbatches: int, pipeline: PipelineConfig) -> Passes:
    segments = layout(model)
    slots = [places.shape[-1] for places in stages.split(segments, count, pipeline)]
    table = make_table(pipeline.schedule, count, microbatches, pipeline.virtual_stages)
    ticks = [int(np.sum(half.runs)) for half in (table.forward, table.backward)]
    kinds = tuple((kind, number) for segment, number in zip(segments, slots, strict=True) for kind in segment.kinds)
    places = sum(number for _, number in kinds) * count * table.chunks
    return Passes(
        kinds=kinds,
        chunks=table.chunks,
        forward=ticks[0],
        again=ticks[1],  # a backward runs its chunk from the input that waited for it
        backward=ticks[1],
        loss=microbatches,
        waiting=table.slots,
        unrolled=any(len(phase) == 1 for phase in table.phases),
        idle=1 - model.layers / places * (1 - table.idle),
    )
