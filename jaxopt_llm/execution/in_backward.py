"""The scan executor with the optimizer in its backward: all gradients never exist at once.

The method is that of LOMO (Lv et al. 2023, arXiv:2306.09782). The backward is written out. It goes through the periods
of each segment from the last to the first. For each period it runs the forward again from the period's input,
differentiates it, sums the period's gradient over devices, gives the gradient to the optimizer, and frees it. The state
is the carry of the loop, which XLA updates in place: a period is read before it is written. The parameters outside the
segments are updated last. The head's gradient waits for the embedding's, because a tied table has both. Modules of
multi-token prediction run with the head, and are updated after it.

Nothing can wait for all gradients: neither a clip by their norm, nor a decision to skip the step.

Letters: G gradient groups, R periods of a segment, B batch, S sequence, D width.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.config import RematConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution import mtp
from jaxopt_llm.execution.by_layer import select_period
from jaxopt_llm.execution.executor import split_into_groups, sum_of_squares, vmap_over_groups
from jaxopt_llm.execution.segments import (
    LocalSegment,
    PeriodRunner,
    attach_non_layer,
    model_segments,
    mtp_segments,
    no_perturbations,
)
from jaxopt_llm.model import param
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.model import AUXILIARY_LOSS, Model, Params, Sums, add_sums
from jaxopt_llm.parallel.gathering import make_perturbations, reduce_groups
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import gradient_group_axes, inside_gradient_group

FORWARD_SCOPE = "forward"  # the named scope of the forward in compiled programs and profiles

# Parameters and optimizer state of a segment, stacked [R, ...], or of all non-layer parameters ("non_layer"). Only the
# caller, who reads and updates it, knows its structure.
State = tree.Tree
ReadParams = Callable[[State], Params]  # state -> the parameters that the model reads
Update = Callable[[str, State, Params], State]  # (name, state, gradients) -> state, of one period or of "non_layer"


def loss_and_update(
    model: Model,
    state: dict[str, State],
    frozen: Params,
    batch: Batch,
    loss_weight: jax.Array,
    placement: Placement,
    read_params: ReadParams,
    update: Update,
) -> tuple[Sums, jax.Array, dict[str, State]]:
    """Run a step, and update each period during the backward.

    state: of the trainable parameters, by the name of a segment, or "non_layer". batch: fields [1, B, S]. The other
    arguments are as in executor.py.

    Returns the sums as `Executor` does, the sum of squares of all gradients, and the state after the update.
    """
    microbatch = split_into_groups(jax.tree.map(lambda x: x[0], batch), placement)  # fields [G, B / G, S]
    trainable = {name: read_params(part) for name, part in state.items()}
    passes = _Passes(model, trainable, frozen, microbatch, loss_weight, placement, read_params, update)
    groups = (0, 1) if gradient_group_axes(placement) else (0,)
    segments, inputs, sums = model_segments(model), {}, model.zero_auxiliary()
    x = passes.embed()
    for name, segment in segments.items():
        x, (inputs[name], added) = passes.run_forward(name, segment, x)
        sums = add_sums(sums, jax.tree.map(lambda each: jnp.sum(each, axis=groups), added))
    of_head, gradients, dx = passes.run_head(x)
    sums = add_sums(sums, jax.tree.map(lambda each: jnp.sum(each, axis=groups[:-1]), of_head))
    squares, new_state = jnp.float32(0), dict(state)
    for name in passes.modules:
        squares, new_state[name] = passes.update_module(name, state[name], gradients[name], squares)
    non_layer = gradients["non_layer"]
    for name, segment in reversed(segments.items()):
        dx, squares, trained = passes.run_backward(name, segment, state[name], inputs[name], dx, squares)
        new_state[name] = update(name, state[name], passes.specs[name]) if trained is None else trained
    non_layer = reduce_groups(passes.specs["non_layer"], passes.add_embedding_gradients(dx, non_layer), placement)
    new_state["non_layer"] = update("non_layer", state["non_layer"], non_layer)
    return sums, squares + sum_of_squares(non_layer, passes.specs["non_layer"]), new_state


@dataclass(frozen=True, eq=False)
class _Passes:
    """The passes of one step. Those over the whole batch have a leading dimension G if there are gradient groups."""

    model: Model
    trainable: Params
    frozen: Params
    microbatch: Batch
    loss_weight: jax.Array
    placement: Placement
    read_params: ReadParams
    update: Update

    @functools.cached_property
    def params(self) -> Params:
        return tree.merge(self.trainable, self.frozen)

    @functools.cached_property
    def specs(self) -> Params:
        """Specs of the trainable parameters."""
        return tree.restrict(self.model.specs, self.trainable)

    @functools.cached_property
    def modules(self) -> dict[str, LocalSegment]:
        """The modules of multi-token prediction."""
        return mtp_segments(self.model)

    @functools.cached_property
    def inside(self) -> Placement:
        """The placement within a gradient group."""
        return inside_gradient_group(self.placement)

    def embed(self) -> jax.Array:
        """Return what enters the first segment, [G, B / G, S, D]."""
        embed_group = functools.partial(self._embed, no_perturbations(self.model.specs["non_layer"]))
        return vmap_over_groups(embed_group, self.placement)(self.microbatch)

    @jax.named_scope(FORWARD_SCOPE)
    def run_forward(self, name: str, segment: LocalSegment, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Sums]]:
        """Run a segment. Return x, and each period's input [R, G, B / G, S, D] and sums [R, G, ...]."""
        perturbations, no_remat = no_perturbations(param.period_specs(segment.specs)), RematConfig("none")

        def run_period(x: jax.Array, period: Any) -> tuple[jax.Array, tuple[jax.Array, Sums]]:
            weights, per_layer = period

            def run_group(x: jax.Array, batch: Batch) -> tuple[jax.Array, Sums]:
                y, _, sums = self._make_runner(segment, no_remat, batch).run(weights, perturbations, per_layer, x)
                return y, sums

            y, sums = vmap_over_groups(run_group, self.placement)(x, self.microbatch)
            return y, (x, sums)

        return jax.lax.scan(run_period, x, (self.params[name], segment.per_layer))

    def run_head(self, x: jax.Array) -> tuple[Sums, Params, jax.Array]:
        """Return the sums of the head and of MTP modules, their gradients, and dx.

        The gradients are those of the parameters outside the segments, and of the parameters of each module.
        """

        def run_group(x: jax.Array, batch: Batch) -> tuple[Sums, Params, jax.Array]:
            def objective(perturbations: Params, x: jax.Array) -> tuple[jax.Array, Sums]:
                context = self.model.make_context(batch, self.inside)
                non_layer = self._attach_non_layer(perturbations["non_layer"])
                head = mtp.Head(self.model, self.modules, self.params, perturbations, RematConfig("full"))
                value, sums = head.loss(non_layer, x, batch, context, self.loss_weight)
                return value + self.loss_weight * sums[AUXILIARY_LOSS] if self.modules else value, sums

            specs = {name: self.specs[name] for name in ("non_layer", *self.modules)}
            perturbations = make_perturbations(specs, self.inside)
            _, pull_back, sums = jax.vjp(objective, perturbations, x, has_aux=True)
            return sums, *pull_back(jnp.float32(1))

        return vmap_over_groups(run_group, self.placement)(x, self.microbatch)

    def update_module(self, name: str, state: State, gradients: Params, squares: jax.Array) -> tuple[jax.Array, State]:
        """Update an MTP module, given the gradients of its only period. Return the sum of squares and the new state."""
        specs = param.period_specs(self.specs[name])
        if not jax.tree.leaves(specs):
            return squares, self.update(name, state, specs)
        row = 1 if gradient_group_axes(self.placement) else 0  # after the dimension of the groups
        gradients = jax.tree.map(lambda x: jnp.squeeze(x, row), gradients)
        gradients = reduce_groups(specs, gradients, self.placement)
        new = self.update(name, jax.tree.map(lambda x: x[0], state), gradients)
        return squares + sum_of_squares(gradients, specs), jax.tree.map(lambda x: x[None], new)

    def run_backward(
        self, name: str, segment: LocalSegment, state: State, inputs: jax.Array, dx: jax.Array, squares: jax.Array
    ) -> tuple[jax.Array, jax.Array, State]:
        """Differentiate a segment and update its state, from the last period to the first.

        inputs: each period's, from `run_forward`. squares: the sum of squares of the gradients so far.

        Returns dx of the segment's input, the sum of squares, and the new state. The state is None if nothing of the
        segment is trained, because its state is then not stacked.
        """
        specs = param.period_specs(self.specs[name])
        trains = bool(jax.tree.leaves(specs))

        def run_period(steps: jax.Array, carry: Any) -> Any:
            dx, squares, state = carry
            row = inputs.shape[0] - 1 - steps
            x, per_layer, frozen = select_period((inputs, segment.per_layer, self.frozen[name]), row)
            period_state = select_period(state, row)
            weights = tree.merge(self.read_params(period_state) if trains else self.trainable[name], frozen)
            gradients, dx = self._differentiate_period(segment, specs, weights, per_layer, x, dx)
            if trains:
                gradients = reduce_groups(specs, gradients, self.placement)
                squares = squares + sum_of_squares(gradients, specs)
                new = self.update(name, period_state, gradients)
                state = jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, row, 0), state, new)
            return dx, squares, state

        return jax.lax.fori_loop(0, inputs.shape[0], run_period, (dx, squares, state if trains else None))

    def add_embedding_gradients(self, dx: jax.Array, non_layer: Params) -> Params:
        """Add the embedding's gradients to the head's, `non_layer`."""

        def run_group(dx: jax.Array, non_layer: Params, batch: Batch) -> Params:
            perturbations = make_perturbations(self.specs["non_layer"], self.inside)
            _, pull_back = jax.vjp(lambda perturbations: self._embed(perturbations, batch), perturbations)
            return jax.tree.map(jnp.add, non_layer, *pull_back(dx))

        return vmap_over_groups(run_group, self.placement)(dx, non_layer, self.microbatch)

    def _differentiate_period(
        self, segment: LocalSegment, specs: Params, weights: Params, per_layer: Any, x: jax.Array, dy: jax.Array
    ) -> tuple[Params, jax.Array]:
        """Run a period again from its input x. Return its gradients, not yet summed over groups, and dx."""

        def run_group(x: jax.Array, dy: jax.Array, batch: Batch) -> tuple[Params, jax.Array]:
            def run(perturbations: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                runner = self._make_runner(segment, RematConfig("full"), batch)
                y, _, sums = runner.run(weights, perturbations, per_layer, x)
                return y, self.loss_weight * sums[AUXILIARY_LOSS]

            return jax.vjp(run, make_perturbations(specs, self.inside), x)[1]((dy, jnp.float32(1)))

        return vmap_over_groups(run_group, self.placement)(x, dy, self.microbatch)

    # --- within one gradient group

    def _attach_non_layer(self, perturbations: Params) -> Params:
        return attach_non_layer(self.model.specs, self.params, {"non_layer": perturbations}, self.inside)

    def _embed(self, perturbations: Params, batch: Batch) -> jax.Array:
        non_layer = self._attach_non_layer(perturbations)
        return self.model.embed(non_layer, batch.tokens, self.model.make_context(batch, self.inside))

    def _make_runner(self, segment: LocalSegment, remat: RematConfig, batch: Batch) -> PeriodRunner:
        context = self.model.make_context(batch, self.inside)
        return PeriodRunner(self.model, segment, context, remat, remat.enabled, is_apart=segment.periods > 1)
