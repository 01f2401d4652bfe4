"""Log-probabilities of the reference model: the model without its adapters, which no step changes."""

from dataclasses import replace

import jax

from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.placement import Placement

SCOPE = "reference"  # named scope of this forward in compiled programs and profiles


def add_reference(model: Model, executor: Executor, params: Params, batch: Batch, placement: Placement) -> Batch:
    """Return the batch, fields [M, B, S], with the reference's log-probabilities, if the model's objective needs them.

    A batch whose data have them (`prepare --reference`) is returned as it is. Otherwise they cost a second forward, but
    no memory for other weights.
    """
    if not model.objective.needs_reference or batch.reference is not None:
        return batch
    without = model.with_specs(leaves.remove_adapters(model.specs))
    with jax.named_scope(SCOPE):
        found = executor.read_tokens(
            without.log_probabilities, without, leaves.remove_adapters(params), batch, placement
        )
    sharding = placement.activation(None, "batch", "sequence")
    return replace(batch, reference=jax.lax.with_sharding_constraint(jax.lax.stop_gradient(found), sharding))
