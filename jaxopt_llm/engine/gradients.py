"""Loss and gradients of a user's model over the microbatches of a step.

The loss sees a whole microbatch, as on one device, so that what couples its rows (BatchNorm, a contrastive loss, the
draw of a dropout mask) is the same on every mesh. XLA divides the computation by the rows of the batch. Gradients are
summed over the devices in each microbatch.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxopt_llm.core import tree
from jaxopt_llm.core.metric import replace_zero
from jaxopt_llm.engine.frontends import LossParts
from jaxopt_llm.engine.user_model import UserModel
from jaxopt_llm.execution.gradients import add_gradients, constrain_gradients
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.gathering import make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step import Differentiate, Differentiated

Carry = tuple[Params, Params]  # variables, gradients


def differentiate_user_model(model: UserModel, placement: Placement) -> Differentiate:
    """Return the function that computes the gradients of the mean loss. Batch: fields [M, B, ...], M microbatches."""

    def differentiate(state: TrainState, batch: Any, scale: jax.Array | float) -> Differentiated:
        params = tree.merge(state.trainable, state.frozen)
        trained = tree.restrict(model.specs, state.trainable)

        def one_microbatch(variables: Params, microbatch: Any) -> tuple[Params, LossParts, Params]:
            def objective(perturbations: Params) -> tuple[jax.Array, tuple[LossParts, Params]]:
                parts, after = model.evaluate(params, perturbations, variables, microbatch, placement)
                # The mean, because the gradients of a sum over thousands of tokens leave the range of float16.
                count = jax.lax.stop_gradient(replace_zero(parts.count))
                return scale * parts.total / count, (parts, after)

            gradients, (parts, after) = jax.grad(objective, has_aux=True)(make_perturbations(trained, placement))
            return after, parts, gradients

        def accumulate(carry: Carry, microbatch: Any) -> tuple[Carry, LossParts]:
            variables, gradients = carry
            variables, parts, more = one_microbatch(variables, microbatch)
            count = replace_zero(parts.count)
            more = jax.tree.map(lambda gradient: count * gradient.astype(jnp.float32), more)
            return (variables, add_gradients(gradients, more, trained, placement)), parts

        first = jax.tree.map(lambda x: x[0], batch)
        if jax.tree.leaves(batch)[0].shape[0] == 1:
            variables, parts, gradients = one_microbatch(state.variables, first)
            divisor = scale
        else:
            shapes = jax.eval_shape(one_microbatch, state.variables, first)[2]
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
            begin = state.variables, constrain_gradients(zeros, trained, placement)
            (variables, gradients), each = jax.lax.scan(accumulate, begin, batch)
            parts = each.join()
            divisor = scale * replace_zero(parts.count)
        return Differentiated(parts.mean(), gradients, divisor, parts.metrics, variables)

    return differentiate


def compute_loss(model: UserModel, state: TrainState, batch: Any, placement: Placement) -> LossParts:
    """Return the parts of the loss of a batch [M, B, ...]. Each microbatch begins with the variables of the state."""
    params = tree.merge(state.trainable, state.frozen)
    nothing = jax.tree.map(lambda spec: None, model.specs)

    def one_microbatch(microbatch: Any) -> LossParts:
        return model.evaluate(params, nothing, state.variables, microbatch, placement)[0]

    each: LossParts = jax.lax.map(one_microbatch, batch)
    return each.join()
