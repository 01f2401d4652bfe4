"""The pipeline executor: runs a schedule's table (schedules.py) over stages, which are the devices along `pipeline`.

It is manual over that axis only: within a stage, the compiler places data, fsdp and tensor as usual. All stages run one
program in ticks, with one scan for each phase of the table. In a tick, a stage runs a chunk of its layers forward and a
chunk backward. Between ticks, neighbours exchange activations one way and their gradients the other way. The backward
is written out: it runs the chunk again from its input, which waited in a buffer, and differentiates it. Tokens enter,
and the embedding's gradient is formed inside: nothing of size M × activations exists, unless the schedule itself keeps
it.

All stages wait for the slowest one, so no work may belong to a single stage. The rows of the embedding's and the head's
tables are divided over the stages (Yeung et al. 2024, arXiv:2411.05288). Each stage holds its rows of them, of their
gradients and of their moments. It looks up those rows for the tokens that enter the first stage, and forms those logits
of the last stage's output. A microbatch costs each stage 1/S of the lookup, head and loss, a final norm, and four sums
of an activation over `pipeline`: of the embedded tokens and of the last stage's output, forward and backward. If each
stage in turn computed the whole head, or the last stage alone, the head would lengthen every tick by its whole time.

The results of a tick are sent while a chunk runs: activations during the forward that the backward repeats, and
gradients during the forward of the next tick.

Letters: S stages, V chunks of a stage, M microbatches, T ticks, B batch, S sequence, D width.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.config import PipelineConfig, RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution.executor import Executor, Sums, add_gradients, constrain_gradients, sum_over_groups, zero_sums
from jaxopt_llm.execution.pipeline_stage import (
    PipelineStage,
    Tick,
    run_for_microbatch,
    run_on_stages,
    select,
    select_microbatch,
    slice_ticks,
    stage_specs,
    zero_unless,
)
from jaxopt_llm.execution.schedules import Ends, make_forward_table, make_table
from jaxopt_llm.execution.segments import no_perturbations
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import Auxiliary, Model, Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.activations import constrain_sent, is_split_over_stages
from jaxopt_llm.parallel.gathering import make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import inside_gradient_group, master_sharding


def make_executor(remat: RematConfig, pipeline: PipelineConfig) -> Executor:
    return Executor(
        loss_and_gradients=functools.partial(loss_and_gradients, remat=remat, pipeline=pipeline),
        loss=functools.partial(loss, remat=remat, pipeline=pipeline),
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
) -> tuple[jax.Array, jax.Array, Auxiliary, Params]:
    """Return loss, number of tokens, auxiliary sums and gradients; see executor.py.

    model: as `stage_layout.stack_by_stage` returns it.
    """
    table = make_table(pipeline.schedule, placement.size("pipeline"), batch.tokens.shape[0], pipeline.virtual_stages)
    trained = tree.restrict(stage_specs(model.specs, placement), trainable)

    def train_stage(stage: PipelineStage, batch: Batch, loss_weight: jax.Array) -> Sums:
        inside = replace(stage, placement=inside_gradient_group(stage.placement))

        def train_group(batch: Batch) -> Sums:  # fields [M, B / G, S]
            return _Training(inside, trained, batch, loss_weight).run()

        return sum_over_groups(train_group, batch, trained, stage.placement)

    params = tree.merge(trainable, frozen)
    by_stage = run_on_stages(train_stage, model, params, table, placement, remat, batch, loss_weight)
    loss, auxiliary = _sum_over_stages(by_stage[:2])

    def join_stages(spec: ParamSpec, rows: jax.Array) -> jax.Array:
        """Return a gradient [stages, ...] in the shape of its parameter."""
        if spec.leading:
            return jnp.swapaxes(rows.reshape(table.stages, table.chunks, -1, *rows.shape[2:]), 0, 1)
        if is_split_over_stages(spec):
            gradient = rows.reshape(-1, *rows.shape[2:])[: spec.shape[0]]
        else:
            gradient = _sum_over_stages(rows)
        return jax.lax.with_sharding_constraint(gradient, master_sharding(spec, placement))

    gradients = jax.tree.map(join_stages, tree.restrict(model.specs, trainable), by_stage[2])
    return loss, jnp.sum(batch.loss_mask), auxiliary, gradients


def loss(
    model: Model, params: Params, batch: Batch, placement: Placement, remat: RematConfig, pipeline: PipelineConfig
) -> tuple[jax.Array, Auxiliary]:
    """Return the loss and the auxiliary sums; see executor.py."""
    table = make_forward_table(placement.size("pipeline"), batch.tokens.shape[0], pipeline.virtual_stages)
    return _sum_over_stages(run_on_stages(_evaluate_stage, model, params, table, placement, remat, batch))


def _evaluate_stage(stage: PipelineStage, batch: Batch) -> tuple[jax.Array, Auxiliary]:
    """Run a stage only forward. Return its loss and auxiliary sums."""
    perturbations, ends = no_perturbations(stage.specs), stage.table.ends

    def run_tick(carry: Any, tick: Tick) -> Any:
        received, loss, auxiliary = carry
        work = tick.forward
        x = stage.select_input(tick, ends, received, batch)
        y, added = stage.run_chunk(work.chunk, perturbations, x, select_microbatch(batch, work.microbatch))

        def head(index: jax.Array) -> jax.Array:
            return stage.loss(perturbations, y, select_microbatch(batch, index), jnp.float32(1))[1]

        loss += run_for_microbatch(ends.loss, tick.ends.loss, head, lambda: jnp.float32(0))
        return stage.send(y, to=1), loss, auxiliary + zero_unless(work.microbatch >= 0, added)

    (phase,) = stage.table.phases
    start = (stage.zero_activation(batch), jnp.float32(0), stage.model.zero_auxiliary())
    _, loss, auxiliary = stage.scan_ticks(phase, run_tick, start)
    return zero_unless(stage.is_last, loss), auxiliary  # all stages have the loss


Carry = tuple[jax.Array, jax.Array, jax.Array, Sums]  # received x, dx to send, inputs [buffers, B, S, D], sums


@dataclass(frozen=True, eq=False)
class _Training:
    """The forward and backward work of one stage for the microbatches of one gradient group, fields [M, B, S].

    trained: specs of the parameters with a gradient, as the stage holds them.
    """

    stage: PipelineStage
    trained: Params
    batch: Batch
    loss_weight: jax.Array

    def run(self) -> Sums:
        """Return the loss, the auxiliary sums and the gradients of the stage."""
        stage, placement = self.stage, self.stage.placement
        zeros = stage.zero_activation(self.batch)
        shapes = jax.eval_shape(
            lambda: (jnp.float32(0), stage.model.zero_auxiliary(), make_perturbations(self.trained, placement))
        )
        inputs = jnp.broadcast_to(zeros, (stage.table.buffers, *zeros.shape))
        carry = (zeros, zeros, inputs, zero_sums(shapes, self.trained, placement))
        for phase in stage.table.phases:
            carry = self._run_phase(phase, carry)
        loss, auxiliary, gradients = carry[-1]
        return zero_unless(stage.is_last, loss), auxiliary, gradients  # all stages have the loss

    def _run_phase(self, phase: range, carry: Carry) -> Carry:
        stage = self.stage
        table = stage.table
        runs_forward, runs_backward = (half.active[phase.start] for half in (table.forward, table.backward))
        possible = slice_ticks(table.ends, phase)

        # XLA begins a collective as late as it may and runs one at a time. Without barriers it would begin and end a
        # send with no work in between. The barriers say that each send has to have arrived once a chunk has run
        # forward.
        def run_tick(carry: Carry, tick: Tick) -> Carry:
            x, dx, inputs, sums = carry
            received = stage.send(dx, to=-1) if runs_backward else dx
            if runs_forward:
                y, inputs = self._forward(tick, possible, x, inputs)
                y, inputs, received = jax.lax.optimization_barrier((y, inputs, received))
                x = stage.send(y, to=1)
            if runs_backward:
                dx, sums, x = self._backward(tick, possible, received, inputs, sums, underway=x)
            return x, dx, inputs, sums

        return stage.scan_ticks(phase, run_tick, carry)

    def _forward(
        self, tick: Tick, possible: Ends, received: jax.Array, inputs: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Run a chunk forward. Return its output, and the inputs with the chunk's own."""
        stage, work = self.stage, tick.forward
        x = stage.select_input(tick, possible, received, self.batch)
        kept = jnp.where(work.microbatch >= 0, x, select(inputs, work.buffer))
        inputs = jax.lax.dynamic_update_index_in_dim(inputs, kept, work.buffer, 0)
        microbatch = select_microbatch(self.batch, work.microbatch)
        y, _ = stage.run_chunk(work.chunk, no_perturbations(stage.specs), x, microbatch)
        return y, inputs

    def _backward(
        self, tick: Tick, possible: Ends, received: jax.Array, inputs: jax.Array, sums: Sums, underway: jax.Array
    ) -> tuple[jax.Array, Sums, jax.Array]:
        """Run a chunk again from its input, and differentiate it. Return dx, the sums and `underway`.

        received: the gradient of the chunk's output. underway: x that is being sent; it has to arrive before the
            backward, after the repeated forward.
        """
        stage, placement, work = self.stage, self.stage.placement, tick.backward
        runs = work.microbatch >= 0
        is_last_chunk = stage.is_last & (work.chunk == stage.table.chunks - 1)
        layer_perturbations, non_layer_perturbations = self._make_perturbations()

        def run_layers(perturbations: Params, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Auxiliary]:
            microbatch = select_microbatch(self.batch, work.microbatch)
            y, auxiliary = stage.run_chunk(work.chunk, perturbations, x, microbatch)
            return (y, zero_unless(runs, self.loss_weight) * auxiliary.loss), auxiliary

        loss, auxiliary, gradients = sums
        non_layer = {"non_layer": gradients["non_layer"]}
        (y, _), pull_back, added = jax.vjp(run_layers, layer_perturbations, select(inputs, work.buffer), has_aux=True)
        y, underway = jax.lax.optimization_barrier((y, underway))

        def skip_non_layer() -> Params:
            return constrain_gradients(non_layer, {"non_layer": self.trained["non_layer"]}, placement)

        def run_head(index: jax.Array) -> tuple[jax.Array, jax.Array, Params]:
            """Return dy, where the gradient begins, the loss, and the sums of the non-layer gradients."""

            def head(perturbations: Params, y: jax.Array) -> tuple[jax.Array, jax.Array]:
                return stage.loss(perturbations, y, select_microbatch(self.batch, index), self.loss_weight)

            _, pull_back, added_loss = jax.vjp(head, non_layer_perturbations, y, has_aux=True)
            added, dy = pull_back(jnp.float32(1))
            dy, total_loss = constrain_sent(dy, placement), placement.replicate(loss + added_loss)
            return dy, total_loss, self._add_gradients(non_layer, added, work.chunk)

        def skip_head() -> tuple[jax.Array, jax.Array, Params]:
            return constrain_sent(received, placement), placement.replicate(loss), skip_non_layer()

        def run_embedding(index: jax.Array) -> Params:
            """Return the sums of the non-layer gradients with the embedding's, where the gradient ends."""
            microbatch = select_microbatch(self.batch, index)
            _, pull_back = jax.vjp(lambda zeros: stage.embed(zeros, microbatch), non_layer_perturbations)
            (added,) = pull_back(zero_unless(stage.is_first, dx))
            return self._add_gradients(non_layer, added, work.chunk)

        dy, loss, non_layer = run_for_microbatch(possible.loss_backward, tick.ends.loss_backward, run_head, skip_head)
        layers, dx = pull_back((zero_unless(runs, jnp.where(is_last_chunk, dy, received)), jnp.float32(1)))
        if jax.tree.leaves(self.trained["non_layer"]):
            non_layer = run_for_microbatch(
                possible.embed_backward, tick.ends.embed_backward, run_embedding, skip_non_layer
            )
        auxiliary = auxiliary + zero_unless(runs, added)
        return dx, (loss, auxiliary, self._add_gradients(gradients | non_layer, layers, work.chunk)), underway

    def _make_perturbations(self) -> tuple[Params, Params]:
        """Return the perturbations of a chunk's layers, and those of the parameters outside the segments."""
        chunk_specs = {name: segment.specs for name, segment in self.stage.segments.items()}
        specs = tree.restrict({"non_layer": self.stage.specs["non_layer"], **chunk_specs}, self.trained)
        perturbations = make_perturbations(specs, self.stage.placement)
        non_layer = {"non_layer": perturbations.pop("non_layer")}
        return perturbations, non_layer

    def _add_gradients(self, total: Params, added: Params, chunk: jax.Array) -> Params:
        """Add the gradients of some segments, or of "non_layer", to their sums."""
        return total | {
            name: add_gradients(total[name], leaves, self.trained[name], self.stage.placement, chunk)
            for name, leaves in added.items()
        }


def _sum_over_stages(rows: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), rows)
