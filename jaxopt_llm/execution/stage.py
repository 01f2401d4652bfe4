"""One stage of a pipeline: what it holds, and what it does where every device along `pipeline` is a stage.

Within, arrays are one stage's; over data, fsdp and tensor the compiler places them as ever.
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

from jaxopt_llm.execution.schedules import Ends, Table, Work
from jaxopt_llm.execution.stacks import RematConfig, Stack, no_taps, run_stacks
from jaxopt_llm.model import param
from jaxopt_llm.model.auxiliary import Auxiliary
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Params, Parts
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.instructions import sometimes
from jaxopt_llm.parallel.sharding import Placement


class Tick(NamedTuple):
    """What a stage does in a tick, or in all of them, [T]. ends: see Table.ends."""

    forward: Work
    backward: Work
    ends: Ends


@dataclass(frozen=True)
class Stage:
    """One stage, inside the region that is manual over `pipeline`.

    specs, params: of what it holds: stacks [V × slots, ...], and its rows of the tables.
    stacks: those of one chunk, their constants [V, slots, ...].
    """

    parts: Parts
    table: Table
    specs: Params
    params: Params
    stacks: dict[str, Stack]
    ticks: Tick
    number: jax.Array
    placement: Placement
    remat: RematConfig

    @property
    def is_first(self) -> jax.Array:
        return self.number == 0

    @property
    def is_last(self) -> jax.Array:
        return self.number == self.table.stages - 1

    def scan(self, phase: range, tick: Callable[[Any, Tick], Any], carry: Any) -> Any:
        """tick(carry, what this stage does) -> carry, over the ticks of a phase."""
        return jax.lax.scan(lambda carry, each: (tick(carry, each), None), carry, part(self.ticks, phase))[0]

    def embed(self, taps: Params, microbatch: Batch) -> jax.Array:
        """What enters the first stage, [B, S, D], on all: each looks up its rows."""
        context = self.parts.make_context(microbatch, self.placement)
        outer = self.placement.place(self.specs["outer"], self.params["outer"], taps["outer"], keep=True)
        return self.placement.leave_stage(self.parts.embed(outer, microbatch.tokens, context))

    def enter(self, tick: Tick, possible: Ends, received: jax.Array, batch: Batch) -> jax.Array:
        """The input of the chunk that runs forward in a tick: embedded tokens, or what was received."""

        def embed(index: jax.Array) -> jax.Array:
            return self.embed(no_taps(self.specs), microbatch_of(batch, index))

        def nobody_reads_it() -> jax.Array:
            return self.placement.between_stages(received)

        embedded = when(possible.enters, tick.ends.enters, embed, nobody_reads_it)
        return jnp.where(self.is_first & (tick.forward.chunk == 0), embedded, received)

    def run(self, chunk: jax.Array, taps: Params, x: jax.Array, microbatch: Batch) -> tuple[jax.Array, Auxiliary]:
        """What a chunk gives, [B, S, D], and its auxiliary sums. taps: of its layers."""
        context = self.parts.make_context(microbatch, self.placement)
        x = self.placement.enter_stage(x)
        stacks = {name: self._of_chunk(each, chunk) for name, each in self.stacks.items()}
        x, _, auxiliary = run_stacks(self.parts, stacks, self.params, taps, x, context, self.remat)
        return self.placement.leave_stage(x), auxiliary

    def _of_chunk(self, stack: Stack, chunk: jax.Array) -> Stack:
        if self.table.chunks == 1:  # all that there is, known as such
            per_layer, live = jax.tree.map(lambda each: each[0], (stack.per_layer, stack.live))
            return replace(stack, per_layer=per_layer, live=live)
        slots = _rows(stack.specs)
        per_layer, live = jax.tree.map(lambda each: each[chunk], (stack.per_layer, stack.live))
        return replace(stack, per_layer=per_layer, live=live, numbers=chunk * slots + jnp.arange(slots))

    def head_loss(
        self, taps: Params, y: jax.Array, microbatch: Batch, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`Parts.head_loss` of the last stage's y [B, S, D], on all: each forms the logits of its rows."""
        context = self.parts.make_context(microbatch, self.placement)
        x = self.placement.enter_stage(jax.lax.psum(jnp.where(self.is_last, y, 0), "pipeline"))
        outer = self.placement.place(self.specs["outer"], self.params["outer"], taps["outer"], keep=True)
        return self.parts.head_loss(outer, x, microbatch, context, cotangent)

    def send(self, x: jax.Array, to: int) -> jax.Array:
        """What the neighbour on the other side sends; with one chunk zeros where there is none. to: 1 is the next
        stage, -1 the one before."""
        count, around = self.table.stages, self.table.chunks > 1
        pairs = [(i, (i + to) % count) for i in range(count) if around or 0 <= i + to < count]
        return jax.lax.ppermute(x, "pipeline", pairs)

    def nothing(self, batch: Batch) -> jax.Array:
        """Zeros [B, S, D]: what comes before anything was sent."""
        x = jax.eval_shape(lambda: self.embed(no_taps(self.specs), microbatch_of(batch, jnp.int32(0))))
        return self.placement.between_stages(jnp.zeros(x.shape, x.dtype))


def on_every_stage(
    function: Any,
    parts: Parts,
    params: Params,
    table: Table,
    placement: Placement,
    remat: RematConfig,
    *arguments: Any,
) -> Any:
    """function(stage, *arguments) on every stage; its results stacked on a leading axis, one row a stage."""
    stacks = {f"segment_{number}": segment for number, segment in enumerate(parts.layout)}
    specs = stage_specs(parts.specs, placement)
    per_layer, live = {}, {}
    for name, segment in stacks.items():
        places = param.layers(parts.specs[name])
        assert places is not None
        numbers = np.swapaxes(places, 0, 1)  # [S, V, slots]
        per_layer[name] = {key: values[np.maximum(numbers, 0)] for key, values in segment.per_layer.items()}
        live[name] = None if np.all(numbers >= 0) else numbers >= 0
    work = jax.tree.map(np.transpose, (table.forward, table.backward))  # [S, T]

    def on_stage(number: jax.Array, constants: Any, params: Params, arguments: Any) -> Any:
        per_layer, live, (forward, backward) = jax.tree.map(lambda x: x[0], constants)

        def of_chunk(spec: ParamSpec) -> ParamSpec:
            return spec.layer().stack(spec.shape[0] // table.chunks)

        of_stage = {
            name: Stack(segment.kinds, jax.tree.map(of_chunk, specs[name]), per_layer[name], live[name])
            for name, segment in stacks.items()
        }
        # Arrays in the region must be placed on the mesh as it is there, `pipeline` manual.
        inside = replace(placement, mesh=jax.sharding.get_abstract_mesh())
        own = jax.tree.map(lambda spec, x: x.reshape(spec.shape), specs, params)
        ticks = Tick(forward, backward, jax.tree.map(jnp.asarray, table.ends))
        stage = Stage(parts, table, specs, own, of_stage, ticks, number[0], inside, remat)
        return jax.tree.map(lambda x: x[None], function(stage, *arguments))

    by_stage = PartitionSpec("pipeline")
    run = jax.shard_map(
        on_stage,
        mesh=placement.mesh,
        in_specs=(by_stage, by_stage, jax.tree.map(placement.over_stages, parts.specs), PartitionSpec()),
        out_specs=by_stage,
        axis_names={"pipeline"},
        check_vma=False,
    )
    params = jax.tree.map(functools.partial(_padded, table.stages), parts.specs, specs, params)
    return run(jnp.arange(table.stages), (per_layer, live, work), params, arguments)


def stage_specs(specs: Params, placement: Placement) -> Params:
    """Of what one stage holds: its slots, chunk after chunk, and its rows of what the stages divide."""

    def one(spec: ParamSpec) -> ParamSpec:
        shape = tuple(map(placement.of_stage, spec.axes, spec.shape))
        return spec.stage() if spec.leading else replace(spec, shape=shape)

    return jax.tree.map(one, specs)


def _padded(stages: int, whole: ParamSpec, of_stage: ParamSpec, array: jax.Array) -> jax.Array:
    """With rows that no token has, where the stages would else hold unlike numbers of them."""
    if whole.leading or whole.shape[0] in (of_stage.shape[0], stages * of_stage.shape[0]):
        return array
    more = stages * of_stage.shape[0] - whole.shape[0]
    return jnp.pad(array, [(0, more)] + [(0, 0)] * (array.ndim - 1))


def when(possible: np.ndarray, index: jax.Array, run: Callable[[jax.Array], Any], otherwise: Callable[[], Any]) -> Any:
    """run(index) in ticks whose index is that of a microbatch, not -1. All devices decide alike, so that there may be
    collectives in it. Both give arrays that differ between gradient groups, in the same places: XLA refuses others.

    possible: the indices of all ticks that this is compiled for.
    """
    if np.all(possible < 0):
        return otherwise()
    if np.all(possible >= 0):
        return run(index)
    with jax.named_scope(sometimes(int(np.sum(possible >= 0)), len(possible))):
        return jax.lax.cond(index >= 0, run, lambda _: otherwise(), index)


def where(condition: jax.Array, values: Any) -> Any:
    return jax.tree.map(lambda each: jnp.where(condition, each, 0), values)


def at(values: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(values, index, keepdims=False)


def part(by_tick: Any, phase: range) -> Any:
    return jax.tree.map(lambda each: each[phase.start : phase.stop], by_tick)


def _rows(specs: Params) -> int:
    """Of a stack."""
    return int(jax.tree.leaves(specs)[0].shape[0])


def microbatch_of(batch: Batch, index: jax.Array) -> Batch:
    """Fields [M, B, S] -> [B, S]; of none, whose result is dropped, any, but that all of it is padding: an expert would
    be sent more than of any other, by tokens that are all alike."""
    found = jax.tree.map(lambda x: at(x, jnp.maximum(index, 0)), batch)
    return replace(found, segment_ids=jnp.where(index >= 0, found.segment_ids, 0))
