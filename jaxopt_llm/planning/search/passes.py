"""Layers that a device runs in a step, and the number of times that it runs them."""

import functools
from dataclasses import dataclass

import numpy as np

from jaxopt_llm.config import Config, Kind, ModelConfig, PipelineConfig
from jaxopt_llm.execution import stage_layout
from jaxopt_llm.execution.schedules import make_table
from jaxopt_llm.model.decoder_specs import list_segments


@dataclass(frozen=True)
class Passes:
    """Forwards and backwards of a device in a step, counted in chunks.

    A chunk is a set of layers that run together: all layers of a device, or in an interleaved pipeline one of its
    model chunks.

    kinds: kinds of layers in the largest chunk, each with its number of layers.
    chunks: chunks of a device.
    first_forwards, backwards: chunks that run in a step, including those that run without a microbatch.
    repeated_forwards: forwards of chunks that had run before, without the recomputation by remat.policy.
    microbatches: microbatches of a step.
    waiting_inputs: inputs of chunks that are held between forward and backward.
    unrolled: whether XLA replaces a loop of a single tick by its body; it then copies the sums that the next loops add
        to.
    idle: share of the chunks' time in which there is no microbatch, or no layer.
    """

    kinds: tuple[tuple[Kind, int], ...]
    chunks: int
    first_forwards: int
    repeated_forwards: int
    backwards: int
    microbatches: int
    waiting_inputs: int
    unrolled: bool
    idle: float

    @classmethod
    def from_config(cls, config: Config) -> "Passes":
        if config.mesh.pipeline > 1:
            return _count_on_stages(config.model, config.mesh.pipeline, config.training.accumulation, config.pipeline)
        kinds = tuple((kind, segment.repeats) for segment in list_segments(config.model) for kind in segment.kinds)
        microbatches = config.training.accumulation
        repeated = microbatches if config.remat.every > 1 else 0
        return cls(kinds, 1, microbatches, repeated, microbatches, microbatches, 0, False, 0.0)

    @property
    def layers(self) -> int:
        """Layers of a chunk."""
        return sum(number for _, number in self.kinds)

    @property
    def forwards(self) -> int:
        return self.first_forwards + self.repeated_forwards


@functools.cache
def _count_on_stages(model: ModelConfig, stages: int, microbatches: int, pipeline: PipelineConfig) -> Passes:
    segments = list_segments(model)
    slots = [places.shape[-1] for places in stage_layout.split_periods(segments, stages, pipeline)]
    table = make_table(pipeline.schedule, stages, microbatches, pipeline.virtual_stages)
    ticks = [int(np.sum(half.active)) for half in (table.forward, table.backward)]
    kinds = tuple((kind, number) for segment, number in zip(segments, slots, strict=True) for kind in segment.kinds)
    layer_slots = sum(number for _, number in kinds) * stages * table.chunks
    return Passes(
        kinds=kinds,
        chunks=table.chunks,
        first_forwards=ticks[0],
        repeated_forwards=ticks[1],  # each backward first runs its chunk's forward again, from the saved input
        backwards=ticks[1],
        microbatches=microbatches,
        waiting_inputs=table.buffers,
        unrolled=any(len(phase) == 1 for phase in table.phases),
        idle=1 - model.layers / layer_slots * (1 - table.idle_share),
    )
