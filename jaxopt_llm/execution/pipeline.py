"""The pipeline executor: runs a schedule's table (schedules.py) over stages that are devices along `pipeline`.

It is manual over that axis alone: within a stage the compiler places data, fsdp and tensor as ever. All stages run one
program in ticks, one scan for each of the table's phases. In a tick a stage runs a chunk of its layers forward, and a
chunk backward; between ticks neighbours exchange activations one way and their gradients the other. The backward is
written out: it runs the chunk again from its input, which waited for it in a slot, and differentiates that. What enters
is tokens, and the embedding's gradient is formed inside: nothing of size M × activations exists, unless the schedule
itself keeps it.

All stages wait for the slowest, so nothing may be one stage's alone. The rows of the embedding's and the head's tables
are divided over the stages (Yeung et al. 2024, arXiv:2411.05288): each holds its part of them, their gradients and
their moments, looks up its tokens of what enters the first stage, and forms its logits of what leaves the last. A
microbatch costs each stage 1 / S of the lookup, head and loss, a final norm, and four sums of an activation over
`pipeline`: of the embedded tokens and of what the last stage gives, there and back. On every stage in turn, or on the
last alone, the head would lengthen every tick by all of it.

What a tick gives is sent while a chunk runs: activations beside the backward's repeated forward, gradients beside the
forward of the next tick.

Letters: S stages, V chunks of a stage, M microbatches, T ticks, B batch, S sequence, D width.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm import tree
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.execution.gradients import Sums, add_gradients, place, sum_over_groups, zero_sums
from jaxopt_llm.execution.schedules import Ends, PipelineConfig, forward_table, make_table
from jaxopt_llm.execution.stacks import RematConfig, no_taps
from jaxopt_llm.execution.stage import Stage, Tick, at, microbatch_of, on_every_stage, part, stage_specs, when, where
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Params, Parts
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.sharding import Placement


def make_executor(remat: RematConfig, pipeline: PipelineConfig) -> Executor:
    return Executor(
        loss_and_gradients=functools.partial(loss_and_gradients, remat=remat, pipeline=pipeline),
        loss=functools.partial(loss, remat=remat, pipeline=pipeline),
    )


def loss_and_gradients(
    parts: Parts,
    trainable: Params,
    frozen: Params,
    batch: Batch,
    cotangent: jax.Array,
    placement: Placement,
    remat: RematConfig,
    pipeline: PipelineConfig,
) -> tuple[jax.Array, jax.Array, Auxiliary, Params]:
    """See executor.py. `parts` are those of `stages.rest_on_stages`."""
    table = make_table(pipeline.schedule, placement.size("pipeline"), batch.tokens.shape[0], pipeline.virtual_stages)
    trained = tree.restrict(stage_specs(parts.specs, placement), trainable)

    def on_stage(stage: Stage, batch: Batch, cotangent: jax.Array) -> Sums:
        grouped = replace(stage, placement=stage.placement.group())

        def one_group(batch: Batch) -> Sums:  # fields [M, B / G, S]
            return _forward_and_backward(grouped, trained, batch, cotangent)

        return sum_over_groups(one_group, batch, trained, stage.placement)

    params = tree.merge(trainable, frozen)
    by_stage = on_every_stage(on_stage, parts, params, table, placement, remat, batch, cotangent)
    loss, auxiliary = _sum_stages(by_stage[:2])

    def whole(spec: ParamSpec, rows: jax.Array) -> jax.Array:
        """[stages, ...] -> as the parameter is."""
        if spec.leading:
            return jnp.swapaxes(rows.reshape(table.stages, table.chunks, -1, *rows.shape[2:]), 0, 1)
        of_all = rows.reshape(-1, *rows.shape[2:])[: spec.shape[0]] if placement.staged(spec) else _sum_stages(rows)
        return jax.lax.with_sharding_constraint(of_all, placement.masters(spec))

    gradients = jax.tree.map(whole, tree.restrict(parts.specs, trainable), by_stage[2])
    return loss, jnp.sum(batch.loss_mask), auxiliary, gradients


def loss(
    parts: Parts, params: Params, batch: Batch, placement: Placement, remat: RematConfig, pipeline: PipelineConfig
) -> tuple[jax.Array, Auxiliary]:
    """See executor.py."""
    table = forward_table(placement.size("pipeline"), batch.tokens.shape[0], pipeline.virtual_stages)
    return _sum_stages(on_every_stage(_forward, parts, params, table, placement, remat, batch))


def _forward(stage: Stage, batch: Batch) -> tuple[jax.Array, Auxiliary]:
    """Loss and auxiliary sums of this stage, forward alone."""
    taps, ends = no_taps(stage.specs), stage.table.ends

    def tick(carry: Any, tick: Tick) -> Any:
        received, loss, auxiliary = carry
        unit = tick.forward
        x = stage.enter(tick, ends, received, batch)
        y, added = stage.run(unit.chunk, taps, x, microbatch_of(batch, unit.microbatch))

        def head(index: jax.Array) -> jax.Array:
            return stage.head_loss(taps, y, microbatch_of(batch, index), jnp.float32(1))[1]

        loss += when(ends.leaves, tick.ends.leaves, head, lambda: jnp.float32(0))
        return stage.send(y, to=1), loss, auxiliary + where(unit.microbatch >= 0, added)

    (phase,) = stage.table.phases
    start = (stage.nothing(batch), jnp.float32(0), stage.parts.zero_auxiliary())
    _, loss, auxiliary = stage.scan(phase, tick, start)
    return where(stage.is_last, loss), auxiliary  # all stages have the loss


def _forward_and_backward(stage: Stage, trained: Params, batch: Batch, cotangent: jax.Array) -> Sums:
    """Loss, auxiliary sums and gradients of this stage. trained: specs of what is differentiated by, as it holds it."""
    placement, table = stage.placement, stage.table
    of_chunk = {name: each.specs for name, each in stage.stacks.items()}
    taps_of = tree.restrict({"outer": stage.specs["outer"], **of_chunk}, trained)

    def forward(tick: Tick, possible: Ends, received: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        unit = tick.forward
        x = stage.enter(tick, possible, received, batch)
        held = jnp.where(unit.microbatch >= 0, x, at(inputs, unit.slot))
        inputs = jax.lax.dynamic_update_index_in_dim(inputs, held, unit.slot, 0)
        y, _ = stage.run(unit.chunk, no_taps(stage.specs), x, microbatch_of(batch, unit.microbatch))
        return y, inputs

    def backward(
        tick: Tick, possible: Ends, received: jax.Array, inputs: jax.Array, sums: Sums, underway: jax.Array
    ) -> tuple[jax.Array, Sums, jax.Array]:
        unit = tick.backward
        runs, is_end = unit.microbatch >= 0, stage.is_last & (unit.chunk == table.chunks - 1)
        taps = placement.taps(taps_of)
        of_layers, of_ends = {name: each for name, each in taps.items() if name != "outer"}, {"outer": taps["outer"]}

        def add(gradients: Params, added: Params) -> Params:
            """To the sums of some sections."""
            new = {
                name: add_gradients(gradients[name], each, trained[name], placement, unit.chunk)
                for name, each in added.items()
            }
            return {**gradients, **new}

        def layers(taps: Params, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Auxiliary]:
            y, auxiliary = stage.run(unit.chunk, taps, x, microbatch_of(batch, unit.microbatch))
            return (y, where(runs, cotangent) * auxiliary.loss), auxiliary

        def turn(index: jax.Array) -> tuple[jax.Array, jax.Array, Params]:
            """The loss and where its gradient begins."""

            def head(taps: Params, y: jax.Array) -> tuple[jax.Array, jax.Array]:
                return stage.head_loss(taps, y, microbatch_of(batch, index), cotangent)

            _, pull, found = jax.vjp(head, of_ends, y, has_aux=True)
            gradients, dy = pull(jnp.float32(1))
            return placement.between_stages(dy), placement.whole(loss + found), add(ends, gradients)

        def pass_through(index: jax.Array) -> Params:
            """Where the gradient ends."""
            _, pull = jax.vjp(lambda taps: stage.embed(taps, microbatch_of(batch, index)), of_ends)
            return add(ends, *pull(where(stage.is_first, dx)))

        loss, auxiliary, gradients = sums
        ends = {"outer": gradients["outer"]}
        (y, _), pull, added = jax.vjp(layers, of_layers, at(inputs, unit.slot), has_aux=True)
        y, underway = jax.lax.optimization_barrier((y, underway))

        def same() -> Params:
            return place(ends, {"outer": trained["outer"]}, placement)

        def no_turn() -> tuple[jax.Array, jax.Array, Params]:
            return placement.between_stages(received), placement.whole(loss), same()

        dy, loss, ends = when(possible.turns, tick.ends.turns, turn, no_turn)
        of_these, dx = pull((where(runs, jnp.where(is_end, dy, received)), jnp.float32(1)))
        if jax.tree.leaves(trained["outer"]):
            ends = when(possible.through, tick.ends.through, pass_through, same)
        return dx, (loss, auxiliary + where(runs, added), add(gradients | ends, of_these)), underway

    def run(phase: range, carry: Any) -> Any:
        runs_forward, runs_backward = (half.runs[phase.start] for half in (table.forward, table.backward))
        possible = part(table.ends, phase)

        # XLA begins a collective as late as it may and runs one at a time: left alone it would begin and end a send
        # with nothing beside. Each has to have arrived, a barrier says, once a chunk has run forward.
        def tick(carry: Any, tick: Tick) -> Any:
            x, dx, inputs, sums = carry
            received = stage.send(dx, to=-1) if runs_backward else dx
            if runs_forward:
                y, inputs = forward(tick, possible, x, inputs)
                y, inputs, received = jax.lax.optimization_barrier((y, inputs, received))
                x = stage.send(y, to=1)
            if runs_backward:
                dx, sums, x = backward(tick, possible, received, inputs, sums, underway=x)
            return x, dx, inputs, sums

        return stage.scan(phase, tick, carry)

    nothing = stage.nothing(batch)
    shapes = jax.eval_shape(lambda: (jnp.float32(0), stage.parts.zero_auxiliary(), placement.taps(trained)))
    inputs = jnp.broadcast_to(nothing, (table.slots, *nothing.shape))
    carry = (nothing, nothing, inputs, zero_sums(shapes, trained, placement))
    for phase in table.phases:
        carry = run(phase, carry)
    loss, auxiliary, gradients = carry[-1]
    return where(stage.is_last, loss), auxiliary, gradients  # all stages have the loss


def _sum_stages(rows: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), rows)
