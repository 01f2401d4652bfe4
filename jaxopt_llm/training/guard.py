"""Guard of the training step: skips steps that would do harm.

A skipped step leaves the parameters, the moments and the position of the schedule bitwise unchanged. The data moves on.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.core import tree
from jaxopt_llm.model.param import ParamSpec

HISTORY = 128  # number of gradient norms whose median defines an outlier

Guard = dict[str, tree.Leaf]


def guard_specs() -> Guard:
    """Return the specs of the guard's state.

    - `updates`: number of steps that were not skipped, which is the position of the schedule.
    - `skipped_in_a_row`: number of skipped steps since the last update, without overflows.
    - `norms`: [HISTORY] gradient norms of the last updates, a ring buffer.
    """
    count = ParamSpec((), (), dtype=np.dtype(np.int32))
    return {"updates": count, "skipped_in_a_row": count, "norms": ParamSpec((HISTORY,), (None,))}


def initialize_guard() -> Guard:
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), guard_specs())


def judge_step(
    guard: Guard, loss: jax.Array, norm: jax.Array, overflow: jax.Array, outliers: float
) -> tuple[jax.Array, Guard]:
    """Return whether to apply the update (bool), and the guard's state after the step.

    The update is applied if loss and gradient norm are finite and, after the first HISTORY updates, the norm is at most
    `outliers` times the median of the last HISTORY norms. Norms of skipped steps do not enter that history.

    Args:
        overflow: bool; the norm is not finite because of the loss scale, which is not a sign of divergence.
        outliers: limit as a multiple of the median; 0 for no limit.
    """
    updates, norms = guard["updates"], guard["norms"]
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    if outliers:
        good &= (updates < HISTORY) | (norm <= outliers * jnp.median(norms))
    new_guard = {
        "updates": updates + good,
        "skipped_in_a_row": jnp.where(good, 0, guard["skipped_in_a_row"] + ~overflow),
        "norms": jnp.where(good, norms.at[updates % HISTORY].set(norm), norms),
    }
    return good, new_guard
