"""Loss and gradients of a user's model over the microbatches of a step.

The loss sees a whole microbatch, as on one device, so that what couples its rows (BatchNorm, a contrastive loss, the
draw of a dropout mask) is the same on every mesh. XLA divides the computation by the rows of the batch. Gradients are
summed over the devices in each microbatch.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxopt_llm.core import tree
from jaxopt_llm.engine.frontends import LossParts
from jaxopt_llm.engine.user_model import UserModel
from jaxopt_llm.execution.gradients import add_gradients, constrain_gradients
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.gathering import make_perturbations
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step import Differentiate, Differentiated


@struct.dataclass
class _Sums:
    """Sums over microbatches. metrics: each times the count of its microbatch."""

    total: jax.Array
    count: jax.Array
    metrics: dict[str, jax.Array]
    gradients: Params


def differentiate_user_model(model: UserModel, placement: Placement) -> Differentiate:
    """Return the function that computes the gradients of the mean loss. Batch: fields [M, B, ...], M microbatches."""

    def differentiate(state: TrainState, batch: Any, scale: jax.Array | float) -> Differentiated:
        params = tree.merge(state.trainable, state.frozen)
        trained = tree.restrict(model.specs, state.trainable)

        def one_microbatch(variables: Params, microbatch: Any) -> tuple[Params, _Sums]:
            def objective(perturbations: Params) -> tuple[jax.Array, tuple[LossParts, Params]]:
                parts, after = model.evaluate(params, perturbations, variables, microbatch, placement)
                return scale * parts.total, (parts, after)

            gradients, (parts, after) = jax.grad(objective, has_aux=True)(make_perturbations(trained, placement))
            metrics = {name: value * parts.count for name, value in parts.metrics.items()}
            return after, _Sums(parts.total, parts.count, metrics, gradients)

        def accumulate(carry: tuple[Params, _Sums], microbatch: Any) -> tuple[tuple[Params, _Sums], None]:
            variables, sums = carry
            variables, added = one_microbatch(variables, microbatch)
            gradients = add_gradients(sums.gradients, added.gradients, trained, placement)
            rest = jax.tree.map(jnp.add, sums.replace(gradients=None), added.replace(gradients=None))
            return (variables, rest.replace(gradients=gradients)), None

        first = jax.tree.map(lambda x: x[0], batch)
        if jax.tree.leaves(batch)[0].shape[0] == 1:
            variables, sums = one_microbatch(state.variables, first)
        else:
            shapes = jax.eval_shape(one_microbatch, state.variables, first)[1]
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
            zeros = zeros.replace(gradients=constrain_gradients(zeros.gradients, trained, placement))
            variables, sums = jax.lax.scan(accumulate, (state.variables, zeros), batch)[0]
        # A batch without anything that counts has loss 0 and gradient 0, not NaN.
        count = jnp.where(sums.count == 0, 1.0, sums.count)
        metrics = {name: value / count for name, value in sums.metrics.items()}
        return Differentiated(sums.total / count, sums.gradients, scale * count, metrics, variables)

    return differentiate


def compute_loss(model: UserModel, state: TrainState, batch: Any, placement: Placement) -> tuple[Any, ...]:
    """Return the sums of the loss, of the count and of the metrics (each times the count) of a batch [M, B, ...].

    Each microbatch begins with the variables of the state.
    """
    params = tree.merge(state.trainable, state.frozen)
    nothing = jax.tree.map(lambda spec: None, model.specs)

    def one_microbatch(microbatch: Any) -> tuple[Any, ...]:
        parts, _ = model.evaluate(params, nothing, state.variables, microbatch, placement)
        return parts.total, parts.count, {name: value * parts.count for name, value in parts.metrics.items()}

    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(one_microbatch, batch))
