"""Loss and gradients of a user's model over the microbatches of a step.

The loss sees a whole microbatch, as on one device, so that what couples its rows (BatchNorm, a contrastive loss, the
draw of a dropout mask) is the same on every mesh. XLA divides the computation by the rows of the batch. Gradients are
summed over the devices in each microbatch.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.core import tree
from jaxopt_llm.core.metric import replace_zero
from jaxopt_llm.engine.frontends import LossParts
from jaxopt_llm.engine.microbatches import Microbatches
from jaxopt_llm.engine.user_model import UserModel
from jaxopt_llm.execution.executor import add_gradients, constrain_gradients
from jaxopt_llm.execution.partitioning import correct_partitioning
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.gathering import make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step.state import TrainState
from jaxopt_llm.step.step import Differentiate, Differentiated

Carry = tuple[Params, Params]  # variables, gradients


def differentiate_user_model(model: UserModel, placement: Placement) -> Differentiate:
    """Return the function that computes the gradients of the mean loss over the microbatches of a batch."""

    def differentiate(state: TrainState, batch: Microbatches, scale: jax.Array | float) -> Differentiated:
        params, batch = tree.merge(state.trainable, state.frozen), batch.divide(placement)
        trained = tree.restrict(model.specs, state.trainable)

        @functools.partial(correct_partitioning, placement=placement)
        def one_microbatch(variables: Params, microbatch: Any) -> tuple[Params, LossParts, Params]:
            def objective(perturbations: Params) -> tuple[jax.Array, tuple[LossParts, Params]]:
                parts, after = model.evaluate(params, perturbations, variables, microbatch, placement)
                # The mean, because the gradients of a sum over thousands of tokens leave the range of float16.
                count = jax.lax.stop_gradient(replace_zero(parts.count))
                return scale * parts.total / count, (parts, after)

            gradients, (parts, after) = jax.grad(objective, has_aux=True)(make_perturbations(trained, placement))
            return after, parts, gradients

        def accumulate(carry: Carry, rows: Any) -> tuple[Carry, LossParts]:
            variables, gradients = carry
            variables, parts, more = one_microbatch(variables, batch.join(rows))
            count = replace_zero(parts.count)
            more = jax.tree.map(lambda gradient: count * gradient.astype(jnp.float32), more)
            return (variables, add_gradients(gradients, more, trained, placement)), parts

        first = batch.take_first()
        if batch.count == 1:
            variables, parts, gradients = one_microbatch(state.variables, first)
            divisor = scale
        else:
            shapes = jax.eval_shape(one_microbatch, state.variables, first)[2]
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
            begin = state.variables, constrain_gradients(zeros, trained, placement)
            (variables, gradients), each = jax.lax.scan(accumulate, begin, batch.rows)
            parts = each.join()
            divisor = scale * replace_zero(parts.count)
        written = None
        if model.written:
            assign = correct_partitioning(model.compute_written, placement)
            written = assign(tree.merge(state.masters, state.frozen), state.variables, first)
        return Differentiated(parts.mean(), gradients, divisor, parts.metrics, variables, written)

    return differentiate


def compute_loss(model: UserModel, state: TrainState, batch: Microbatches, placement: Placement) -> LossParts:
    """Return the parts of the loss of a batch. Each microbatch begins with the variables of the state."""
    params, batch = tree.merge(state.trainable, state.frozen), batch.divide(placement)
    nothing = jax.tree.map(lambda spec: None, model.specs)

    @functools.partial(correct_partitioning, placement=placement)
    def one_microbatch(microbatch: Any) -> LossParts:
        return model.evaluate(params, nothing, state.variables, microbatch, placement)[0]

    if batch.count == 1:
        return one_microbatch(batch.take_first())
    each: LossParts = jax.lax.map(lambda rows: one_microbatch(batch.join(rows)), batch.rows)
    return each.join()
