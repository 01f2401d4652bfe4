"""Loss and gradients of a user's model over the microbatches of a step.

The loss sees a whole microbatch, as on one device, so that what couples its rows (BatchNorm, a contrastive loss, the
draw of a dropout mask) is the same on every mesh. XLA divides the computation by the rows of the batch. Gradients are
summed over the devices in each microbatch.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.core import tree
from jaxopt_llm.engine.frontends import LossParts
from jaxopt_llm.engine.user_model import UserModel
from jaxopt_llm.execution.gradients import add_gradients, constrain_gradients
from jaxopt_llm.execution.partitioning import correct_partitioning
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.gathering import make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step import Differentiate, Differentiated

Carry = tuple[Params, LossParts, Params]  # variables, sums of the loss, gradients


def weigh(parts: LossParts) -> LossParts:
    """Return the parts of a microbatch's loss as sums, which add up over microbatches: each metric times the count."""
    return replace(parts, metrics={name: value * parts.count for name, value in parts.metrics.items()})


def replace_zero(count: jax.Array) -> jax.Array:
    """Return a count, and 1 in place of 0: a batch without anything that counts has loss 0 and gradient 0, not NaN."""
    return jnp.where(count == 0, 1.0, count)


def differentiate_user_model(model: UserModel, placement: Placement) -> Differentiate:
    """Return the function that computes the gradients of the mean loss. Batch: fields [M, B, ...], M microbatches."""

    def differentiate(state: TrainState, batch: Any, scale: jax.Array | float) -> Differentiated:
        params = tree.merge(state.trainable, state.frozen)
        trained = tree.restrict(model.specs, state.trainable)

        @functools.partial(correct_partitioning, placement=placement)
        def one_microbatch(variables: Params, microbatch: Any) -> tuple[Params, LossParts, Params]:
            def objective(perturbations: Params) -> tuple[jax.Array, tuple[LossParts, Params]]:
                parts, after = model.evaluate(params, perturbations, variables, microbatch, placement)
                # The mean, because the gradients of a sum over thousands of tokens leave the range of float16.
                count = jax.lax.stop_gradient(replace_zero(parts.count))
                return scale * parts.total / count, (parts, after)

            gradients, (parts, after) = jax.grad(objective, has_aux=True)(make_perturbations(trained, placement))
            return after, weigh(parts), gradients

        def accumulate(carry: Carry, microbatch: Any) -> tuple[Carry, None]:
            variables, sums, gradients = carry
            variables, added, more = one_microbatch(variables, microbatch)
            sums = jax.tree.map(jnp.add, sums, added)
            count = replace_zero(added.count)
            more = jax.tree.map(lambda gradient: count * gradient.astype(jnp.float32), more)
            return (variables, sums, add_gradients(gradients, more, trained, placement)), None

        first = jax.tree.map(lambda x: x[0], batch)
        if jax.tree.leaves(batch)[0].shape[0] == 1:
            variables, sums, gradients = one_microbatch(state.variables, first)
            divisor = scale
        else:
            _, *shapes = jax.eval_shape(one_microbatch, state.variables, first)
            zeros, no_gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
            begin = state.variables, zeros, constrain_gradients(no_gradients, trained, placement)
            variables, sums, gradients = jax.lax.scan(accumulate, begin, batch)[0]
            divisor = scale * replace_zero(sums.count)
        count = replace_zero(sums.count)
        metrics = {name: value / count for name, value in sums.metrics.items()}
        return Differentiated(sums.total / count, gradients, divisor, metrics, variables)

    return differentiate


def compute_loss(model: UserModel, state: TrainState, batch: Any, placement: Placement) -> LossParts:
    """Return the sums of a batch [M, B, ...]; see `weigh`. Each microbatch begins with the variables of the state."""
    params = tree.merge(state.trainable, state.frozen)
    nothing = jax.tree.map(lambda spec: None, model.specs)

    @functools.partial(correct_partitioning, placement=placement)
    def one_microbatch(microbatch: Any) -> LossParts:
        return weigh(model.evaluate(params, nothing, state.variables, microbatch, placement)[0])

    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(one_microbatch, batch))
