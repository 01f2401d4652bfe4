"""The pipeline executor: 1F1B in lock step (Narayanan et al. 2019, arXiv:1806.03377; 2021, arXiv:2104.04473).

Each device along `pipeline` is a stage, a run of layers. The executor is manual over that axis alone: within a stage
the compiler places data, fsdp and tensor as ever. All stages run one program in ticks, between which neighbours
exchange activations one way and their gradients the other:

    S - 1 ticks forward, M ticks forward and backward, S - 1 ticks backward

of M microbatches and S stages. Stage s runs the forward of microbatch m in tick m + s and its backward in tick
m + 2S - 2 - s, so that it holds the inputs of at most 2S - 1 microbatches, whatever M. The backward is written out: it
runs the stage again from its input, and differentiates that. What enters is tokens, and the embedding's gradient is
formed inside: nothing of size M × activations exists.

A step takes the time of M + S - 1 microbatches, so that its idle share is (S - 1) / (M + S - 1), as GPipe's.

Every stage embeds, and in the M ticks of both kinds computes the loss; the first's and the last's alone count. In lock
step that takes no longer, since all wait for the last stage; it costs the others energy, and the memory of the loss.

Letters: S stages, M microbatches, B batch, S sequence, D width.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxopt_llm import tree
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.execution.gradients import Sums, add_sums, sum_over_groups, zero_sums
from jaxopt_llm.execution.stacks import RematConfig, Stack, no_taps, run_stacks
from jaxopt_llm.model import param
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Auxiliary, Params, Parts
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.sharding import Placement


def make_executor(remat: RematConfig) -> Executor:
    return Executor(
        loss_and_gradients=functools.partial(loss_and_gradients, remat=remat),
        loss=functools.partial(loss, remat=remat),
    )


def loss_and_gradients(
    parts: Parts,
    trainable: Params,
    frozen: Params,
    batch: Batch,
    cotangent: jax.Array,
    placement: Placement,
    remat: RematConfig,
) -> tuple[jax.Array, jax.Array, Auxiliary, Params]:
    """See executor.py. `parts` are those of `stages.rest_on_stages`."""
    stage_specs = tree.restrict(jax.tree.map(ParamSpec.stage, parts.specs), trainable)

    def on_stage(stage: "_Stage", batch: Batch, cotangent: jax.Array) -> Sums:
        grouped = replace(stage, placement=stage.placement.group())

        def one_group(batch: Batch) -> Sums:  # fields [M, B / G, S]
            return _one_forward_one_backward(grouped, stage_specs, batch, cotangent)

        return sum_over_groups(one_group, batch, stage_specs, stage.placement)

    params = tree.merge(trainable, frozen)
    loss, auxiliary, gradients = _on_every_stage(on_stage, parts, params, placement, remat, batch, cotangent)
    loss, auxiliary = _sum_stages((loss, auxiliary))
    # Of the first stage's embedding and the last's head, which a tied table is both of.
    outer_specs = tree.restrict(parts.specs["outer"], trainable["outer"])
    outer = jax.lax.with_sharding_constraint(
        _sum_stages(gradients["outer"]), jax.tree.map(placement.masters, outer_specs)
    )
    stacks = {name: _unstaged(each) for name, each in gradients.items() if name != "outer"}
    return loss, jnp.sum(batch.loss_mask), auxiliary, {"outer": outer, **stacks}


def loss(
    parts: Parts, params: Params, batch: Batch, placement: Placement, remat: RematConfig
) -> tuple[jax.Array, Auxiliary]:
    """See executor.py."""
    sums = _on_every_stage(_forward_alone, parts, params, placement, remat, batch)
    return _sum_stages(sums)


@dataclass(frozen=True)
class _Stage:
    """One stage, inside the region that is manual over `pipeline`. params: its own, stacks [slots, ...]."""

    parts: Parts
    params: Params
    stacks: dict[str, Stack]
    number: jax.Array
    placement: Placement
    remat: RematConfig

    @property
    def count(self) -> int:
        return self.placement.size("pipeline")

    @property
    def is_last(self) -> jax.Array:
        return self.number == self.count - 1

    def run(
        self, taps: Params, received: jax.Array, microbatch: Batch, cotangent: jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array], Auxiliary]:
        """What the stage sends on, [B, S, D], its share of `head_loss` (0 without a cotangent), and its auxiliary
        sums."""
        parts = self.parts
        context = parts.make_context(microbatch, self.placement)
        outer = self.placement.place(parts.specs["outer"], self.params["outer"], taps["outer"], keep=True)
        x = jnp.where(self.number == 0, parts.embed(outer, microbatch.tokens, context), received)
        x, _, auxiliary = run_stacks(parts, self.stacks, self.params, taps, x, context, self.remat)
        if cotangent is None:
            return x, (jnp.float32(0), jnp.float32(0)), auxiliary
        value, loss = parts.head_loss(outer, x, microbatch, context, jnp.where(self.is_last, cotangent, 0.0))
        return x, (value, jnp.where(self.is_last, loss, 0.0)), auxiliary

    def nothing_received(self, microbatch: Batch) -> jax.Array:
        """Zeros [B, S, D]: what comes before anything was sent."""

        def embedded() -> jax.Array:
            context = self.parts.make_context(microbatch, self.placement)
            specs, params = self.parts.specs["outer"], self.params["outer"]
            return self.parts.embed(
                self.placement.place(specs, params, no_taps(specs), keep=False), microbatch.tokens, context
            )

        x = jax.eval_shape(embedded)
        return self.placement.constrain(jnp.zeros(x.shape, x.dtype), "batch", "residual_sequence", "embed")

    def send(self, x: jax.Array, to: int) -> jax.Array:
        """What the neighbour on the other side sends; zeros where there is none. to: 1 is the next stage, -1 the one
        before."""
        pairs = [(i, i + to) for i in range(self.count) if 0 <= i + to < self.count]
        return jax.lax.ppermute(x, "pipeline", pairs)


def _forward_alone(stage: _Stage, batch: Batch) -> tuple[jax.Array, Auxiliary]:
    """Loss and auxiliary sums of this stage: M + S - 1 ticks."""
    microbatches = batch.tokens.shape[0]

    def tick(carry: Any, number: jax.Array) -> tuple[Any, None]:
        received, sums = carry
        index = number - stage.number
        taps = no_taps(stage.parts.specs)
        x, (_, loss), auxiliary = stage.run(taps, received, _microbatch(batch, index), cotangent=jnp.float32(1))
        runs = (index >= 0) & (index < microbatches)
        sums = jax.tree.map(lambda total, added: total + jnp.where(runs, added, 0), sums, (loss, auxiliary))
        return (stage.send(x, to=1), sums), None

    start = (stage.nothing_received(_microbatch(batch, 0)), (jnp.float32(0), stage.parts.zero_auxiliary()))
    return jax.lax.scan(tick, start, jnp.arange(microbatches + stage.count - 1))[0][1]


def _one_forward_one_backward(stage: _Stage, specs: Params, batch: Batch, cotangent: jax.Array) -> Sums:
    """Loss, auxiliary sums and gradients of this stage: M + 2S - 2 ticks. specs: of the parameters to differentiate."""
    microbatches, count = batch.tokens.shape[0], stage.count
    room = 2 * count - 1  # microbatches between their forward and their backward
    nothing = stage.nothing_received(_microbatch(batch, 0))

    def forward(number: jax.Array, received: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = number - stage.number
        inputs = jax.lax.dynamic_update_index_in_dim(inputs, received, index % room, 0)
        x, _, _ = stage.run(no_taps(stage.parts.specs), received, _microbatch(batch, index), cotangent=None)
        return stage.send(x, to=1), inputs

    def backward(
        number: jax.Array, received: jax.Array, inputs: jax.Array, sums: Sums, head: bool
    ) -> tuple[jax.Array, Sums]:
        index = number - (2 * count - 2 - stage.number)
        runs = (index >= 0) & (index < microbatches)
        of_this = jnp.where(runs, cotangent, 0.0)
        saved = jax.lax.dynamic_index_in_dim(inputs, index % room, 0, keepdims=False)

        def objective(taps: Params, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, Auxiliary]]:
            y, (value, loss), auxiliary = stage.run(taps, x, _microbatch(batch, index), of_this if head else None)
            return (y, value + of_this * auxiliary.loss), (loss, auxiliary)

        _, pull, (loss, auxiliary) = jax.vjp(objective, stage.placement.taps(specs), saved, has_aux=True)
        gradients, dx = pull((jnp.where(runs & ~stage.is_last, received, 0), jnp.float32(1)))
        loss, auxiliary = jax.tree.map(lambda each: jnp.where(runs, each, 0), (loss, auxiliary))
        return stage.send(dx, to=-1), add_sums(sums, (loss, auxiliary, gradients), specs, stage.placement)

    def first(carry: Any, number: jax.Array) -> tuple[Any, None]:
        return forward(number, *carry), None

    def steady(carry: Any, number: jax.Array) -> tuple[Any, None]:
        x, dx, inputs, sums = carry
        x, inputs = forward(number, x, inputs)
        dx, sums = backward(number, dx, inputs, sums, head=True)
        return (x, dx, inputs, sums), None

    def last(carry: Any, number: jax.Array) -> tuple[Any, None]:
        dx, inputs, sums = carry
        dx, sums = backward(number, dx, inputs, sums, head=False)
        return (dx, inputs, sums), None

    shapes = jax.eval_shape(lambda: (jnp.float32(0), stage.parts.zero_auxiliary(), stage.placement.taps(specs)))
    sums = zero_sums(shapes, specs, stage.placement)
    inputs = jnp.broadcast_to(nothing, (room, *nothing.shape))
    ticks = jnp.arange(microbatches + 2 * count - 2)
    (x, inputs), _ = jax.lax.scan(first, (nothing, inputs), ticks[: count - 1])
    (x, dx, inputs, sums), _ = jax.lax.scan(steady, (x, nothing, inputs, sums), ticks[count - 1 : 1 - count])
    (_, _, sums), _ = jax.lax.scan(last, (dx, inputs, sums), ticks[1 - count :])
    return sums


def _microbatch(batch: Batch, index: Any) -> Batch:
    """Fields [M, B, S] -> [B, S]; before the first and after the last, where a tick's result is dropped, any."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, jnp.clip(index, 0, x.shape[0] - 1), keepdims=False), batch
    )


def _on_every_stage(
    function: Any, parts: Parts, params: Params, placement: Placement, remat: RematConfig, *arguments: Any
) -> Any:
    """function(stage, *arguments) on every stage; its results stacked on a leading axis, one row a stage."""
    stacks = {f"segment_{number}": segment for number, segment in enumerate(parts.layout)}
    stage_specs = jax.tree.map(ParamSpec.stage, parts.specs)
    per_layer, live = {}, {}
    for name, segment in stacks.items():
        places = param.layers(parts.specs[name])
        assert places is not None and places.shape[0] == 1, "one virtual stage"
        (numbers,) = places  # [stages, slots]
        per_layer[name] = {key: values[np.maximum(numbers, 0)] for key, values in segment.per_layer.items()}
        live[name] = None if np.all(numbers >= 0) else numbers >= 0

    def on_stage(number: jax.Array, constants: Any, params: Params, arguments: Any) -> Any:
        per_layer, live = jax.tree.map(lambda x: x[0], constants)
        of_stage = {
            name: Stack(segment.kinds, stage_specs[name], per_layer[name], live[name])
            for name, segment in stacks.items()
        }
        own = {
            name: each if name == "outer" else jax.tree.map(lambda x: x[0, 0], each) for name, each in params.items()
        }
        # Arrays in the region must be placed on the mesh as it is there, `pipeline` manual.
        inside = replace(placement, mesh=jax.sharding.get_abstract_mesh())
        stage = _Stage(parts, own, of_stage, number[0], inside, remat)
        return jax.tree.map(lambda x: x[None], function(stage, *arguments))

    by_stage = PartitionSpec("pipeline")
    where = {name: PartitionSpec() if name == "outer" else PartitionSpec(None, "pipeline") for name in params}
    run = jax.shard_map(
        on_stage,
        mesh=placement.mesh,
        in_specs=(by_stage, by_stage, where, PartitionSpec()),
        out_specs=by_stage,
        axis_names={"pipeline"},
        check_vma=False,
    )
    return run(jnp.arange(placement.size("pipeline")), (per_layer, live), params, arguments)


def _sum_stages(rows: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), rows)


def _unstaged(gradients: Params) -> Params:
    """[stages, slots, ...] -> [virtual, stages, slots, ...]."""
    return jax.tree.map(lambda x: x[None], gradients)
