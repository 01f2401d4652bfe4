"""Layers that a device runs in a step, and the number of times that it runs them."""

import functools
from dataclasses import dataclass, replace

import numpy as np

from jaxopt_llm.config import Config, Kind, ModelConfig, PipelineConfig, RematConfig
from jaxopt_llm.execution import stage_layout
from jaxopt_llm.execution.schedules import make_table
from jaxopt_llm.execution.segments import needs_loop
from jaxopt_llm.model.decoder_specs import list_mtp_modules, list_segments, name_modules


@dataclass(frozen=True)
class Passes:
    """Forwards and backwards of a device in a step, counted in chunks.

    A chunk is a set of layers that run together: all layers of a device, or in an interleaved pipeline one of its
    model chunks.

    kinds: kinds of layers in the largest chunk, each with its number of layers. The block of an MTP module is a layer,
        of every stage in a pipeline.
    chunks: chunks of a device.
    first_forwards, backwards: chunks that run in a step, including those that run without a microbatch.
    repeated_forwards: forwards of chunks that run again, without the recomputation by remat.policy, and forwards of the
        reference of an objective over pairs.
    microbatches: microbatches of a step.
    waiting_chunks: chunks whose activations are held between forward and backward, in a pipeline that stores them.
    waiting_streams: inputs, or outputs, of chunks that are held so.
    paired: whether a forward runs next to a backward, of another microbatch.
    unrolled: whether XLA replaces a loop of a single tick by its body; it then copies the sums that the next loops add
        to.
    in_loops: whether loops over layers copy what a backward reads into stacks.
    idle: share of the chunks' time in which there is no microbatch, or no layer.
    """

    kinds: tuple[tuple[Kind, float], ...]
    chunks: int
    first_forwards: int
    repeated_forwards: int
    backwards: int
    microbatches: int
    waiting_chunks: int
    waiting_streams: int
    paired: bool
    unrolled: bool
    in_loops: bool
    idle: float

    @classmethod
    def from_config(cls, config: Config) -> "Passes":
        if config.mesh.pipeline > 1:
            passes = _count_on_stages(
                config.model, config.mesh.pipeline, config.training.accumulation, config.pipeline, config.remat
            )
            of_reference = passes.first_forwards * config.runs_reference
            return replace(passes, repeated_forwards=passes.repeated_forwards + of_reference)
        segments = name_modules(config.model).values()
        kinds = tuple((kind, segment.repeats) for segment in segments for kind in segment.kinds)
        microbatches = config.training.accumulation
        repeated = microbatches * ((config.remat.every > 1) + config.runs_reference)
        in_loops = config.training.unroll != "all"
        return cls(kinds, 1, microbatches, repeated, microbatches, microbatches, 0, 0, False, False, in_loops, 0.0)

    @property
    def only_forward(self) -> "Passes":
        """The passes of a model that runs forward once and saves nothing."""
        nothing = {"repeated_forwards": 0, "backwards": 0, "waiting_chunks": 0, "waiting_streams": 0}
        return replace(self, **nothing, paired=False)  # type: ignore[arg-type]

    @property
    def layers(self) -> float:
        """Layers of a chunk."""
        return sum(number for _, number in self.kinds)

    @property
    def forwards(self) -> int:
        return self.first_forwards + self.repeated_forwards


@functools.cache
def _count_on_stages(
    model: ModelConfig, stages: int, microbatches: int, pipeline: PipelineConfig, remat: RematConfig
) -> Passes:
    segments = list_segments(model)
    slots = [places.shape[-1] for places in stage_layout.split_periods(segments, stages, pipeline)]
    table = make_table(pipeline.schedule, stages, microbatches, pipeline.virtual_stages)
    ticks = [int(np.sum(half.active)) for half in (table.forward, table.backward)]
    kinds = tuple((kind, number) for segment, number in zip(segments, slots, strict=True) for kind in segment.kinds)
    modules = tuple((kind, 1 / table.chunks) for module in list_mtp_modules(model) for kind in module.kinds)
    stores = pipeline.residuals == "store"
    layer_slots = sum(number for _, number in kinds) * stages * table.chunks
    return Passes(
        kinds=kinds + modules,
        chunks=table.chunks,
        first_forwards=ticks[0],
        repeated_forwards=0 if stores else ticks[1],  # a backward first runs its chunk forward again, from the input
        backwards=ticks[1],
        microbatches=microbatches,
        waiting_chunks=table.buffers if stores else 0,
        waiting_streams=0 if stores and not table.output_waits else table.buffers,
        paired=bool(np.any(table.forward.active & table.backward.active)),
        unrolled=any(len(phase) == 1 for phase in table.phases),
        in_loops=any(needs_loop(number * len(each.kinds), remat) for number, each in zip(slots, segments, strict=True)),
        idle=1 - model.layers / layer_slots * (1 - table.idle_share),
    )
