"""The pipeline executor: runs a schedule's table (schedules.py) over stages, which are the devices along `pipeline`.

It is manual over that axis only: within a stage, the compiler places data, fsdp and tensor as usual. All stages run one
program in ticks, with one scan for each phase of the table. In a tick, a stage runs a chunk of its layers forward and a
chunk backward. Between ticks, neighbours exchange activations one way and their gradients the other way. The backward
reads what the chunk's forward kept in a buffer. Tokens enter, and the embedding's gradient is
formed inside: nothing of size M × activations exists, unless the schedule itself keeps it.

All stages wait for the slowest one, so no work may belong to a single stage. The rows of the embedding's and the head's
tables are divided over the stages (Yeung et al. 2024, arXiv:2411.05288). Each stage holds its rows of them, of their
gradients and of their moments. It looks up those rows for the tokens that enter the first stage, and forms those logits
of the last stage's output. A microbatch costs each stage 1/S of the lookup, head and loss, a final norm, and four sums
of an activation over `pipeline`: of the embedded tokens and of the last stage's output, forward and backward. If each
stage in turn computed the whole head, or the last stage alone, the head would lengthen every tick by its whole time.

The two chunks of a tick are independent: a backward reads what forwards of earlier ticks kept. XLA can therefore hide
the collectives of each, and what is sent to the neighbours, next to the matmuls of the other.

Letters: S stages, V chunks of a stage, M microbatches, T ticks, B batch, S sequence, D width.

What waits from the forward of a chunk to its backward (`pipeline.residuals`):

recompute: the input of the chunk. The backward runs the whole chunk forward again.
store: what JAX's backward of the chunk reads, under `remat.policy` as without a pipeline.

To store, the tick of the forward differentiates the chunk with `jax.vjp`, which returns the backward as a function that
holds arrays. Those that depend on the input of the chunk wait in buffers. The tick of the backward calls `jax.vjp` once
more, on an input of zeros, and puts the arrays that waited in the place of its own. The other arrays, such as weights
and positions, are the same in both ticks. XLA drops the second forward, because nothing else of it is read.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Var

from jaxopt_llm.config import PipelineConfig, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution.executor import (
    Executor,
    ReadTokens,
    Totals,
    add_gradients,
    constrain_gradients,
    sum_over_groups,
    zero_totals,
)
from jaxopt_llm.execution.pipeline_stage import (
    PipelineStage,
    Tick,
    is_by_stage,
    run_for_microbatch,
    run_on_stages,
    select_microbatch,
    slice_ticks,
    stage_specs,
    zero_unless,
)
from jaxopt_llm.execution.schedules import Ends, Work, make_forward_table, make_table
from jaxopt_llm.execution.segments import mtp_segments, no_perturbations
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import AUXILIARY_LOSS, OBJECTIVE, Model, Params, Sums, add_sums
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.activations import constrain_sent, is_split_over_stages
from jaxopt_llm.parallel.gathering import make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import inside_gradient_group, master_sharding

Kept = tuple[jax.Array, ...]
PullBack = Callable[[tuple[jax.Array, jax.Array]], tuple[Params, jax.Array]]


class Leaf(NamedTuple):
    """An array that the backward of a chunk holds. waits: whether it depends on the input of the chunk."""

    aval: Any
    waits: bool


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of one stage, forward and backward.

    trained: specs of the stage's parameters with a gradient. batch: fields [M, B, S].
    stores: whether `pipeline.residuals` is `store`.
    """

    stage: PipelineStage
    trained: Params
    batch: Batch
    loss_weight: jax.Array
    stores: bool

    def make_buffers(self) -> Kept:
        """Return zeros for all that waits between forwards and backwards, [buffers, ...]."""
        kept = [self._input]
        if self.stores:
            kept = [each.aval for each in self._leaves if each.waits]
            kept += [self._input] if self.stage.table.output_waits else []
        return tuple(map(self._make_buffer, kept))

    def _make_buffer(self, each: Any) -> jax.Array:
        zeros = jnp.zeros((self.stage.table.buffers, *each.shape), each.dtype)
        is_on_host = getattr(each, "memory_space", None) == jax.memory.Space.Host  # by `remat.offload`
        return jax.device_put(zeros, jax.memory.Space.Host) if is_on_host else zeros

    def run_forward(self, work: Work, x: jax.Array) -> tuple[jax.Array, Kept, Sums]:
        """Run a chunk forward from x [B, S, D]. Return its output, what waits for its backward, and the sums."""
        if not self.stores:
            microbatch = select_microbatch(self.batch, work.microbatch)
            y, sums = self.stage.run_chunk(work.chunk, no_perturbations(self.stage.specs), x, microbatch)
            return y, (x,), sums
        y, pull_back, sums = self._differentiate(work, x)
        kept = [array for array, leaf in zip(jax.tree.leaves(pull_back), self._leaves, strict=True) if leaf.waits]
        return y, (*kept, *([y] if self.stage.table.output_waits else [])), sums

    def begin_backward(self, work: Work, kept: Kept, y: jax.Array) -> tuple[jax.Array, PullBack]:
        """Return the output of a chunk, if it is the last chunk, and the function of its backward.

        The function takes the gradients of the output and of the auxiliary loss. It returns the gradients of the
        parameters and of the input.

        Args:
            kept: what the chunk's forward kept. y: the output of the chunk that ran forward in the tick before.
        """
        if not self.stores:
            (x,) = kept
            y, pull_back, _ = self._differentiate(work, x)
            return y, pull_back
        waiting = iter(kept)
        _, again, _ = self._differentiate(work, jnp.zeros_like(self._input))
        arrays, structure = jax.tree.flatten(again)
        arrays = [next(waiting) if leaf.waits else array for array, leaf in zip(arrays, self._leaves, strict=True)]
        return next(waiting, y), jax.tree.unflatten(structure, arrays)

    def _differentiate(self, work: Work, x: jax.Array) -> tuple[jax.Array, PullBack, Sums]:
        def run_layers(perturbations: Params, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Sums]:
            microbatch = select_microbatch(self.batch, work.microbatch)
            y, sums = self.stage.run_chunk(work.chunk, perturbations, x, microbatch)
            return (y, zero_unless(work.microbatch >= 0, self.loss_weight) * sums[AUXILIARY_LOSS]), sums

        (y, _), pull_back, sums = jax.vjp(run_layers, self._make_perturbations(), x, has_aux=True)
        return y, pull_back, sums

    def _make_perturbations(self) -> Params:
        specs = {name: segment.specs for name, segment in self.stage.segments.items()}
        trained = {name: self.trained[name] for name in specs}
        return make_perturbations(tree.restrict(specs, trained), self.stage.placement)

    @functools.cached_property
    def _input(self) -> Any:
        return jax.eval_shape(lambda: self.stage.zero_activation(self.batch))

    @functools.cached_property
    def _leaves(self) -> tuple[Leaf, ...]:
        """The arrays that the backward of a chunk holds."""

        def list_leaves(x: jax.Array, work: Work) -> list[jax.Array]:
            return jax.tree.leaves(self._differentiate(work, x)[1])

        index = jax.ShapeDtypeStruct((), jnp.int32)
        jaxpr = jax.make_jaxpr(list_leaves)(self._input, Work(index, index, index)).jaxpr
        dependent = {jaxpr.invars[0]}
        for equation in jaxpr.eqns:
            if any(isinstance(each, Var) and each in dependent for each in equation.invars):
                dependent.update(equation.outvars)
        return tuple(Leaf(each.aval, isinstance(each, Var) and each in dependent) for each in jaxpr.outvars)


@custom_vmap
def put_row(buffers: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
    """Return buffers [R, ...] with a row [...] at an index that is known only at run time."""
    return jax.lax.dynamic_update_index_in_dim(buffers, row, index, 0)


@custom_vmap
def select_row(buffers: jax.Array, index: jax.Array) -> jax.Array:
    """Return buffers[index] for an index that is known only at run time."""
    return jax.lax.dynamic_index_in_dim(buffers, index, keepdims=False)


# JAX would turn slices of a `vmap` over gradient groups into gathers and scatters, which host memory does not have.


@put_row.def_vmap
def _put_in_groups(size: int, batched: Any, buffers: jax.Array, row: jax.Array, index: jax.Array) -> Any:
    buffers, row = (_repeat_unless(*each, size) for each in zip(batched[:2], (buffers, row), strict=True))
    return jax.lax.dynamic_update_index_in_dim(buffers, row, index, 1), True


@select_row.def_vmap
def _select_in_groups(size: int, batched: Any, buffers: jax.Array, index: jax.Array) -> Any:
    return jax.lax.dynamic_index_in_dim(buffers, index, 1, keepdims=False), True


def _repeat_unless(is_batched: bool, x: jax.Array, size: int) -> jax.Array:
    return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))


def make_executor(remat: RematConfig, pipeline: PipelineConfig) -> Executor:
    return Executor(
        loss_and_gradients=functools.partial(loss_and_gradients, remat=remat, pipeline=pipeline),
        loss=functools.partial(loss, remat=remat, pipeline=pipeline),
        read_tokens=functools.partial(read_tokens, remat=remat, pipeline=pipeline),
    )


def loss_and_gradients(
    model: Model,
    trainable: Params,
    frozen: Params,
    batch: Batch,
    loss_weight: jax.Array,
    placement: Placement,
    remat: RematConfig,
    pipeline: PipelineConfig,
) -> Totals:
    """Return sums and gradients; see executor.py.

    model: as `stage_layout.stack_by_stage` returns it.
    """
    table = make_table(pipeline.schedule, placement.size("pipeline"), batch.tokens.shape[0], pipeline.virtual_stages)
    trained = tree.restrict(stage_specs(model.specs, placement), trainable)
    stores = pipeline.residuals == "store"

    def train_stage(stage: PipelineStage, batch: Batch, loss_weight: jax.Array) -> Totals:
        segments = {name: replace(segment, waits=stores) for name, segment in stage.segments.items()}
        inside = replace(stage, segments=segments, placement=inside_gradient_group(stage.placement))

        def train_group(batch: Batch) -> Totals:  # fields [M, B / G, S]
            return _Training(inside, trained, batch, loss_weight, stores).run()

        return sum_over_groups(train_group, batch, trained, stage.placement)

    params = tree.merge(trainable, frozen)
    sums, by_stage = run_on_stages(train_stage, model, params, table, placement, remat, batch, loss_weight)

    def join_stages(spec: ParamSpec, rows: jax.Array) -> jax.Array:
        """Return a gradient [stages, ...] in the shape of its parameter."""
        if is_by_stage(spec):
            return jnp.swapaxes(rows.reshape(table.stages, table.chunks, -1, *rows.shape[2:]), 0, 1)
        if is_split_over_stages(spec):
            gradient = rows.reshape(-1, *rows.shape[2:])[: spec.shape[0]]
        else:
            gradient = _sum_over_stages(rows)
        return jax.lax.with_sharding_constraint(gradient, master_sharding(spec, placement))

    return _sum_over_stages(sums), jax.tree.map(join_stages, tree.restrict(model.specs, trainable), by_stage)


def loss(
    model: Model, params: Params, batch: Batch, placement: Placement, remat: RematConfig, pipeline: PipelineConfig
) -> Sums:
    """Return the sums; see executor.py."""
    table = make_forward_table(placement.size("pipeline"), batch.tokens.shape[0], pipeline.virtual_stages)
    return _sum_over_stages(run_on_stages(_evaluate_stage, model, params, table, placement, remat, batch))


def _evaluate_stage(stage: PipelineStage, batch: Batch) -> Sums:
    """Run a stage only forward. Return its sums."""

    def compute(y: jax.Array, index: jax.Array) -> jax.Array:
        return stage.loss(no_perturbations(stage.specs), y, select_microbatch(batch, index), jnp.float32(1))[1]

    shape = jax.eval_shape(compute, stage.zero_activation(batch), jnp.int32(0)).shape
    loss, sums = _run_forward(stage, batch, lambda loss, *of: loss + compute(*of), jnp.zeros(shape, jnp.float32))
    return sums | {OBJECTIVE: zero_unless(stage.is_last, loss)}  # all stages have the loss


def read_tokens(
    read: ReadTokens,
    model: Model,
    params: Params,
    batch: Batch,
    placement: Placement,
    remat: RematConfig,
    pipeline: PipelineConfig,
) -> jax.Array:
    """Return what `read` returns of each token; see executor.py."""

    def run_stage(stage: PipelineStage, batch: Batch) -> jax.Array:
        def put(found: jax.Array, y: jax.Array, index: jax.Array) -> jax.Array:
            microbatch = select_microbatch(batch, index)
            added = stage.read_tokens(read, y, microbatch)
            return jax.lax.dynamic_update_index_in_dim(found, added, index, 0)

        y = jax.eval_shape(stage.zero_activation, batch)
        one = jax.eval_shape(lambda y: stage.read_tokens(read, y, select_microbatch(batch, jnp.int32(0))), y)
        found, _ = _run_forward(stage, batch, put, jnp.zeros((batch.tokens.shape[0], *one.shape), one.dtype))
        return zero_unless(stage.is_last, found)

    table = make_forward_table(placement.size("pipeline"), batch.tokens.shape[0], pipeline.virtual_stages)
    return _sum_over_stages(run_on_stages(run_stage, model, params, table, placement, remat, batch))


def _run_forward(
    stage: PipelineStage,
    batch: Batch,
    run_head: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    start: jax.Array,
) -> tuple[jax.Array, Sums]:
    """Run a stage only forward. Return the result of the head and the sums of the layers.

    run_head: (result so far, output y [B, S, D] of the last chunk, index of the microbatch) -> result. start: the first
        result.
    """
    perturbations, ends = no_perturbations(stage.specs), stage.table.ends

    def run_tick(carry: Any, tick: Tick) -> Any:
        received, result, sums = carry
        work = tick.forward
        x = stage.select_input(tick, ends, received, batch)
        y, added = stage.run_chunk(work.chunk, perturbations, x, select_microbatch(batch, work.microbatch))
        replicate = stage.placement.replicate
        result = run_for_microbatch(
            ends.loss, tick.ends.loss, lambda index: replicate(run_head(result, y, index)), lambda: replicate(result)
        )
        return stage.send(y, to=1), result, add_sums(sums, zero_unless(work.microbatch >= 0, added))

    (phase,) = stage.table.phases
    carry = stage.zero_activation(batch), start, stage.model.zero_auxiliary()
    _, result, sums = stage.scan_ticks(phase, run_tick, carry)
    return result, sums


# received x and dx, the last output of a forward, what waits [buffers, ...], sums and gradients
Carry = tuple[jax.Array, jax.Array, jax.Array, Kept, Totals]


@dataclass(frozen=True, eq=False)
class _Training:
    """The forward and backward work of one stage for the microbatches of one gradient group, fields [M, B, S].

    trained: specs of the parameters with a gradient, as the stage holds them.
    stores: whether a chunk keeps what its backward reads (pipeline.py).
    """

    stage: PipelineStage
    trained: Params
    batch: Batch
    loss_weight: jax.Array
    stores: bool

    @functools.cached_property
    def chunks(self) -> Chunks:
        return Chunks(self.stage, self.trained, self.batch, self.loss_weight, self.stores)

    def run(self) -> Totals:
        """Return the sums and the gradients of the stage."""
        stage, placement = self.stage, self.stage.placement
        zeros = stage.zero_activation(self.batch)
        first = select_microbatch(self.batch, jnp.int32(0))

        def make_totals() -> Totals:
            _, of_head = stage.objective(no_perturbations(stage.specs), zeros, first, self.loss_weight)
            return stage.model.zero_auxiliary() | of_head, make_perturbations(self.trained, placement)

        shapes = jax.eval_shape(make_totals)
        carry = (zeros, zeros, zeros, self.chunks.make_buffers(), zero_totals(shapes, self.trained, placement))
        for phase in stage.table.phases:
            carry = self._run_phase(phase, carry)
        return carry[-1]

    def _run_phase(self, phase: range, carry: Carry) -> Carry:
        stage = self.stage
        table = stage.table
        runs_forward, runs_backward = (half.active[phase.start] for half in (table.forward, table.backward))
        possible = slice_ticks(table.ends, phase)

        def run_tick(carry: Carry, tick: Tick) -> Carry:
            x, dx, y, waiting, totals = carry
            if runs_backward:
                # Read before the forward writes. Otherwise the backward would wait, or XLA would copy all buffers.
                kept = tuple(select_row(each, tick.backward.buffer) for each in waiting)
                kept, waiting = jax.lax.optimization_barrier((kept, waiting))
                y, pull_back = self.chunks.begin_backward(tick.backward, kept, y)
            if runs_forward:
                output, waiting, totals = self._forward(tick, possible, x, waiting, totals)
                x = stage.send(output, to=1)
            if runs_backward:
                dx, totals, x = self._backward(tick, possible, dx, y, pull_back, totals, underway=x)
                dx = stage.send(dx, to=-1)
            return x, dx, output if runs_forward else y, waiting, totals

        return stage.scan_ticks(phase, run_tick, carry)

    def _forward(
        self, tick: Tick, possible: Ends, received: jax.Array, waiting: Kept, totals: Totals
    ) -> tuple[jax.Array, Kept, Totals]:
        """Run a chunk forward. Return its output, what waits with that of the chunk, and the totals."""
        work, (sums, gradients) = tick.forward, totals
        x = self.stage.select_input(tick, possible, received, self.batch)
        y, kept, added = self.chunks.run_forward(work, x)
        waiting = tuple(put_row(*each, work.buffer) for each in zip(waiting, kept, strict=True))
        return y, waiting, (add_sums(sums, zero_unless(work.microbatch >= 0, added)), gradients)

    def _backward(
        self,
        tick: Tick,
        possible: Ends,
        received: jax.Array,
        y: jax.Array,
        pull_back: PullBack,
        totals: Totals,
        underway: jax.Array,
    ) -> tuple[jax.Array, Totals, jax.Array]:
        """Run a chunk backward. Return dx, the totals and `underway`.

        received: the gradient of the chunk's output. y: the output, of the last chunk. underway: x that is being sent.
            It has to arrive before gradients of weights are added to their sums: XLA begins a collective as late as it
            may. By `plan`, 70B takes 27.5 instead of 28.9 s with five chunks, and 28.3 instead of 27.8 s with one.
        """
        stage, placement, work = self.stage, self.stage.placement, tick.backward
        is_last_chunk = stage.is_last & (work.chunk == stage.table.chunks - 1)
        # Of the parameters outside the segments, and of MTP modules, which run with the head.
        specs = {name: self.trained[name] for name in ("non_layer", *mtp_segments(stage.model))}
        sums, gradients = totals
        outside = {name: gradients[name] for name in specs}

        def skip_outside() -> Params:
            return constrain_gradients(outside, specs, placement)

        def run_head(index: jax.Array) -> tuple[jax.Array, Sums, Params]:
            """Return dy, where the gradient begins, the sums, and those of the gradients."""

            def head(perturbations: Params, y: jax.Array) -> tuple[jax.Array, Sums]:
                return stage.objective(perturbations, y, select_microbatch(self.batch, index), self.loss_weight)

            _, pull_back, of_head = jax.vjp(head, make_perturbations(specs, placement), y, has_aux=True)
            added, dy = pull_back(jnp.float32(1))
            summed = self._add_gradients(outside, added, work.chunk)
            return constrain_sent(dy, placement), jax.tree.map(placement.replicate, add_sums(sums, of_head)), summed

        def skip_head() -> tuple[jax.Array, Sums, Params]:
            return constrain_sent(received, placement), jax.tree.map(placement.replicate, sums), skip_outside()

        def run_embedding(index: jax.Array) -> Params:
            """Return the sums of the gradients with the embedding's, where the gradient ends."""
            microbatch, zeros = select_microbatch(self.batch, index), make_perturbations(specs, placement)
            _, pull_back = jax.vjp(lambda zeros: stage.embed({"non_layer": zeros}, microbatch), zeros["non_layer"])
            (added,) = pull_back(zero_unless(stage.is_first, dx))
            return self._add_gradients(outside, {"non_layer": added}, work.chunk)

        dy, sums, outside = run_for_microbatch(possible.loss_backward, tick.ends.loss_backward, run_head, skip_head)
        dy = zero_unless(work.microbatch >= 0, jnp.where(is_last_chunk, dy, received))
        layers, dx = pull_back((dy, jnp.float32(1)))
        layers, underway = jax.lax.optimization_barrier((layers, underway))
        if jax.tree.leaves(self.trained["non_layer"]):
            outside = run_for_microbatch(possible.embed_backward, tick.ends.embed_backward, run_embedding, skip_outside)
        return dx, (sums, self._add_gradients(gradients | outside, layers, work.chunk)), underway

    def _add_gradients(self, total: Params, added: Params, chunk: jax.Array) -> Params:
        """Add the gradients of some segments, or of "non_layer", to their sums."""
        return total | {
            name: add_gradients(total[name], leaves, self.trained[name], self.stage.placement, chunk)
            for name, leaves in added.items()
        }


def _sum_over_stages(rows: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), rows)
