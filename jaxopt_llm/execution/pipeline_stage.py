"""One stage of a pipeline: what it holds, and what it can do, inside the region that is manual over `pipeline`.

Within the region, each array belongs to one stage. Over data, fsdp and tensor the compiler places it as usual.

Letters: S stages, V chunks of a stage, M microbatches, T ticks, B batch, S sequence, D width.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxopt_llm.compiler.instructions import taken_scope_name
from jaxopt_llm.config import RematConfig
from jaxopt_llm.execution import mtp
from jaxopt_llm.execution.executor import ReadTokens
from jaxopt_llm.execution.schedules import Ends, Table, Work
from jaxopt_llm.execution.segments import LocalSegment, attach_non_layer, mtp_segments, no_perturbations, run_segments
from jaxopt_llm.model import param
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.model import AUXILIARY_LOSS, Model, Params, Sums, name_segments
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.activations import (
    constrain_sent,
    count_stage_rows,
    gather_stage_input,
    scatter_stage_output,
    stage_partition_spec,
)
from jaxopt_llm.parallel.placement import Placement


class Tick(NamedTuple):
    """The work of a stage in one tick, or in all ticks, [T]. ends: see Table.ends."""

    forward: Work
    backward: Work
    ends: Ends


@dataclass(frozen=True)
class PipelineStage:
    """One stage, inside the region that is manual over `pipeline`.

    specs, params: of what the stage holds: its slots of each segment, [V × slots, ...], and its rows of the tables.
    segments: the segments of one chunk; their constants are [V, slots, ...].
    """

    model: Model
    table: Table
    specs: Params
    params: Params
    segments: dict[str, LocalSegment]
    ticks: Tick
    index: jax.Array
    placement: Placement
    remat: RematConfig

    @property
    def is_first(self) -> jax.Array:
        return self.index == 0

    @property
    def is_last(self) -> jax.Array:
        return self.index == self.table.stages - 1

    def scan_ticks(self, phase: range, run_tick: Callable[[Any, Tick], Any], carry: Any) -> Any:
        """Scan run_tick(carry, tick) -> carry over the ticks of a phase."""
        ticks = slice_ticks(self.ticks, phase)
        return jax.lax.scan(lambda carry, tick: (run_tick(carry, tick), None), carry, ticks)[0]

    def embed(self, perturbations: Params, microbatch: Batch) -> jax.Array:
        """Return what enters the first stage, [B, S, D], on all stages: each looks up its own rows of the table."""
        context = self.model.make_context(microbatch, self.placement)
        non_layer = attach_non_layer(self.specs, self.params, perturbations, self.placement)
        return scatter_stage_output(self.model.embed(non_layer, microbatch.tokens, context), self.placement)

    def select_input(self, tick: Tick, possible: Ends, received: jax.Array, batch: Batch) -> jax.Array:
        """Return the input of the chunk that runs forward in a tick: embedded tokens, or what was received.

        possible: the ends in all ticks of the phase, as for `run_for_microbatch`.
        """

        def embed(index: jax.Array) -> jax.Array:
            return self.embed(no_perturbations(self.specs), select_microbatch(batch, index))

        def skip() -> jax.Array:  # its result is not read
            return constrain_sent(received, self.placement)

        embedded = run_for_microbatch(possible.embed, tick.ends.embed, embed, skip)
        return jnp.where(self.is_first & (tick.forward.chunk == 0), embedded, received)

    def run_chunk(
        self, chunk: jax.Array, perturbations: Params, x: jax.Array, microbatch: Batch
    ) -> tuple[jax.Array, Sums]:
        """Return the output [B, S, D] of a chunk and its sums. perturbations: of the chunk's layers."""
        context = self.model.make_context(microbatch, self.placement)
        x = gather_stage_input(x, self.placement)
        segments = {name: self._select_chunk(segment, chunk) for name, segment in self.segments.items()}
        x, _, sums = run_segments(self.model, segments, self.params, perturbations, x, context, self.remat)
        return scatter_stage_output(x, self.placement), sums

    def _select_chunk(self, segment: LocalSegment, chunk: jax.Array) -> LocalSegment:
        only = self.table.chunks == 1  # then a constant index: the compiler knows that the chunk is all there is
        per_layer, occupied = jax.tree.map(lambda x: x[0 if only else chunk], (segment.per_layer, segment.occupied))
        rows = None if only else chunk * segment.periods + jnp.arange(segment.periods)
        return replace(segment, per_layer=per_layer, occupied=occupied, rows=rows)

    def loss(
        self, perturbations: Params, y: jax.Array, microbatch: Batch, loss_weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return `Model.loss` of the last stage's output y [B, S, D], on all stages.

        Each stage forms the logits of its own rows of the table.
        """
        return self.model.loss(*self._enter_head(perturbations, y, microbatch), loss_weight)

    def objective(
        self, perturbations: Params, y: jax.Array, microbatch: Batch, loss_weight: jax.Array
    ) -> tuple[jax.Array, Sums]:
        """Return what is differentiated of the head and of MTP modules, and their sums.

        As `loss`, on all stages. Every stage runs the modules, with the gradient that its own rows contribute. The
        sums, which are the same on all stages, are those of the last stage.
        """
        head = mtp.Head(self.model, mtp_segments(self.model), self.params, perturbations, self.remat)
        value, sums = head.loss(*self._enter_head(perturbations, y, microbatch), loss_weight)
        sums = zero_unless(self.is_last, sums)
        return value + loss_weight * sums[AUXILIARY_LOSS] if head.modules else value, sums

    def _enter_head(
        self, perturbations: Params, y: jax.Array, microbatch: Batch
    ) -> tuple[Params, jax.Array, Batch, Context]:
        """Return what the head reads, with the last stage's output y [B, S, D], on all stages."""
        context = self.model.make_context(microbatch, self.placement)
        x = gather_stage_input(jax.lax.psum(jnp.where(self.is_last, y, 0), "pipeline"), self.placement)
        non_layer = attach_non_layer(self.specs, self.params, perturbations, self.placement)
        return non_layer, x, microbatch, context

    def read_tokens(self, read: ReadTokens, y: jax.Array, microbatch: Batch) -> jax.Array:
        """Return what `read` returns of each token, given the last stage's output y [B, S, D], on all stages."""
        return read(*self._enter_head(no_perturbations(self.specs), y, microbatch))

    def send(self, x: jax.Array, to: int) -> jax.Array:
        """Send x to a neighbour, and return what the other neighbour sent.

        to: 1 is the next stage, -1 the previous one. With one chunk, a stage without a neighbour receives zeros. With
        several, the last stage and the first are neighbours.
        """
        stages, around = self.table.stages, self.table.chunks > 1
        pairs = [(i, (i + to) % stages) for i in range(stages) if around or 0 <= i + to < stages]
        return jax.lax.ppermute(x, "pipeline", pairs)

    def zero_activation(self, batch: Batch) -> jax.Array:
        """Return zeros [B, S, D], in place of what was received, before anything was sent."""
        x = jax.eval_shape(lambda: self.embed(no_perturbations(self.specs), select_microbatch(batch, jnp.int32(0))))
        return constrain_sent(jnp.zeros(x.shape, x.dtype), self.placement)


def run_on_stages(
    function: Any, model: Model, params: Params, table: Table, placement: Placement, remat: RematConfig, *arguments: Any
) -> Any:
    """Run function(stage, *arguments) on every stage. Return its results stacked on a leading axis of stages."""
    segments, specs = name_segments(model.layout), stage_specs(model.specs, placement)
    per_layer, occupied = {}, {}
    for name, segment in segments.items():
        layers = param.layer_indices(model.specs[name])
        assert layers is not None
        periods = np.swapaxes(layers, 0, 1)  # [S, V, slots]
        per_layer[name] = {key: values[np.maximum(periods, 0)] for key, values in segment.per_layer.items()}
        occupied[name] = None if np.all(periods >= 0) else periods >= 0
    work = jax.tree.map(np.transpose, (table.forward, table.backward))  # [S, T]

    def run_on_stage(index: jax.Array, constants: Any, params: Params, arguments: Any) -> Any:
        per_layer, occupied, (forward, backward) = jax.tree.map(lambda x: x[0], constants)

        def chunk_spec(spec: ParamSpec) -> ParamSpec:
            return spec.unstack().stack(spec.shape[0] // table.chunks)

        local_segments = {
            name: LocalSegment(
                segment.kinds, jax.tree.map(chunk_spec, specs[name]), per_layer[name], occupied[name], checkpoints=True
            )
            for name, segment in segments.items()
        }
        # Arrays in the region must be placed on the mesh as it is there, with `pipeline` manual.
        inside = replace(placement, mesh=jax.sharding.get_abstract_mesh())
        local_params = jax.tree.map(lambda spec, x: x.reshape(spec.shape), specs, params)
        ticks = Tick(forward, backward, jax.tree.map(jnp.asarray, table.ends))
        stage = PipelineStage(model, table, specs, local_params, local_segments, ticks, index[0], inside, remat)
        return jax.tree.map(lambda x: x[None], function(stage, *arguments))

    by_stage = PartitionSpec("pipeline")
    run = jax.shard_map(
        run_on_stage,
        mesh=placement.mesh,
        in_specs=(by_stage, by_stage, jax.tree.map(stage_partition_spec, model.specs), PartitionSpec()),
        out_specs=by_stage,
        axis_names={"pipeline"},
        check_vma=False,
    )
    params = jax.tree.map(functools.partial(_pad_rows, table.stages), model.specs, specs, params)
    return run(jnp.arange(table.stages), (per_layer, occupied, work), params, arguments)


def is_by_stage(spec: ParamSpec) -> bool:
    """Return whether each stage holds layers of its own of a parameter. All stages hold the MTP modules."""
    return spec.leading == 3


def stage_specs(specs: Params, placement: Placement) -> Params:
    """Return the specs of what one stage holds: its slots, chunk after chunk, and its rows of the tables."""

    def stage_spec(spec: ParamSpec) -> ParamSpec:
        if is_by_stage(spec):
            return spec.unstack().stack(spec.shape[0] * spec.shape[2])  # chunk after chunk, for any layers
        sizes = zip(spec.axes, spec.shape, strict=True)
        return replace(spec, shape=tuple(count_stage_rows(axis, size, placement) for axis, size in sizes))

    return jax.tree.map(stage_spec, specs)


def _pad_rows(stages: int, spec: ParamSpec, stage_spec: ParamSpec, array: jax.Array) -> jax.Array:
    """Append rows that belong to no token, where the stages would otherwise hold unequal numbers of rows."""
    if spec.leading or spec.shape[0] in (stage_spec.shape[0], stages * stage_spec.shape[0]):
        return array
    padding = stages * stage_spec.shape[0] - spec.shape[0]
    return jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1))


def run_for_microbatch(
    possible: np.ndarray, index: jax.Array, run: Callable[[jax.Array], Any], skip: Callable[[], Any]
) -> Any:
    """Return run(index) if `index` is a microbatch, and skip() if it is -1.

    All devices decide alike, so `run` may contain collectives. The arrays that both return must differ between gradient
    groups in the same places: XLA refuses others.

    possible: the indices in all ticks that this is compiled for.
    """
    if np.all(possible < 0):
        return skip()
    if np.all(possible >= 0):
        return run(index)
    with jax.named_scope(taken_scope_name(int(np.sum(possible >= 0)), len(possible))):
        return jax.lax.cond(index >= 0, run, lambda _: skip(), index)


def zero_unless(condition: jax.Array, values: Any) -> Any:
    """Return the leaves, or zeros if the condition is False."""
    return jax.tree.map(lambda x: jnp.where(condition, x, 0), values)


def select(values: jax.Array, index: jax.Array) -> jax.Array:
    """Return values[index] for an index that is known only at run time."""
    return jax.lax.dynamic_index_in_dim(values, index, keepdims=False)


def slice_ticks(by_tick: Any, phase: range) -> Any:
    """Return the entries of a phase of leaves [T, ...]."""
    return jax.tree.map(lambda x: x[phase.start : phase.stop], by_tick)


def select_microbatch(batch: Batch, index: jax.Array) -> Batch:
    """Return a microbatch [B, S] of fields [M, B, S].

    Index -1 gives a microbatch whose result is dropped. All of it is padding: otherwise its tokens, which are all
    alike, would send one expert more than any other.
    """
    microbatch = jax.tree.map(lambda x: select(x, jnp.maximum(index, 0)), batch)
    return replace(microbatch, segment_ids=jnp.where(index >= 0, microbatch.segment_ids, 0))
