"""Residuals of a pipeline: what waits from the forward of a chunk to its backward (`pipeline.residuals`).

recompute: the input of the chunk. The backward runs the whole chunk forward again.
store: what JAX's backward of the chunk reads, under `remat.policy` as without a pipeline.

To store, the tick of the forward differentiates the chunk with `jax.vjp`, which returns the backward as a function that
holds arrays. Those that depend on the input of the chunk wait in buffers. The tick of the backward calls `jax.vjp` once
more, on an input of zeros, and puts the arrays that waited in the place of its own. The other arrays, such as weights
and positions, are the same in both ticks. XLA drops the second forward, because nothing else of it is read.

Letters: B batch, S sequence, D width.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Var

from jaxopt_llm.core import tree
from jaxopt_llm.execution.pipeline_stage import PipelineStage, select_microbatch, zero_unless
from jaxopt_llm.execution.schedules import Work
from jaxopt_llm.execution.segments import no_perturbations
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import Auxiliary, Params
from jaxopt_llm.parallel.gathering import make_perturbations

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

    def run_forward(self, work: Work, x: jax.Array) -> tuple[jax.Array, Kept, Auxiliary]:
        """Run a chunk forward from x [B, S, D]. Return its output, what waits for its backward, and the sums."""
        if not self.stores:
            microbatch = select_microbatch(self.batch, work.microbatch)
            y, auxiliary = self.stage.run_chunk(work.chunk, no_perturbations(self.stage.specs), x, microbatch)
            return y, (x,), auxiliary
        y, pull_back, auxiliary = self._differentiate(work, x)
        kept = [array for array, leaf in zip(jax.tree.leaves(pull_back), self._leaves, strict=True) if leaf.waits]
        return y, (*kept, *([y] if self.stage.table.output_waits else [])), auxiliary

    def begin_backward(self, work: Work, kept: Kept, y: jax.Array) -> tuple[jax.Array, PullBack]:
        """Return the output of a chunk, if it is the last chunk, and the function of its backward.

        The function takes the gradients of the output and of the auxiliary loss, and returns those of the parameters
        and of the input.

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

    def _differentiate(self, work: Work, x: jax.Array) -> tuple[jax.Array, PullBack, Auxiliary]:
        def run_layers(perturbations: Params, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Auxiliary]:
            microbatch = select_microbatch(self.batch, work.microbatch)
            y, auxiliary = self.stage.run_chunk(work.chunk, perturbations, x, microbatch)
            return (y, zero_unless(work.microbatch >= 0, self.loss_weight) * auxiliary.loss), auxiliary

        (y, _), pull_back, auxiliary = jax.vjp(run_layers, self._make_perturbations(), x, has_aux=True)
        return y, pull_back, auxiliary

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
