"""Steps that would do harm are skipped: which they are, and what is remembered of the others.

A skipped step leaves parameters, moments and the schedule's position as they are, to the bit; the data goes on.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm import tree
from jaxopt_llm.model.param import ParamSpec

HISTORY = 128  # gradient norms that an outlier is measured by

Guard = dict[str, tree.Leaf]


def specs() -> Guard:
    """updates: the steps that were not skipped, and so the schedule's position.
    skipped_in_a_row: those since the last of them, without the overflows.
    norms: [HISTORY] gradient norms of the last of them, in a ring."""
    count = ParamSpec((), (), dtype=np.dtype(np.int32))
    return {"updates": count, "skipped_in_a_row": count, "norms": ParamSpec((HISTORY,), (None,))}


def initialize() -> Guard:
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs())


def judge(
    guard: Guard, loss: jax.Array, norm: jax.Array, overflow: jax.Array, outliers: float
) -> tuple[jax.Array, Guard]:
    """Whether to take the step, and what is remembered then.

    A step is taken if its loss and gradient norm are finite and, once HISTORY steps have been, its norm is at most
    `outliers` (0: any) times the median of theirs. What is skipped never enters that history.
    overflow: whether the norm is not finite for its loss scale's sake, which is no sign of divergence.
    """
    updates, norms = guard["updates"], guard["norms"]
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    if outliers:
        good &= (updates < HISTORY) | (norm <= outliers * jnp.median(norms))
    remembered = {
        "updates": updates + good,
        "skipped_in_a_row": jnp.where(good, 0, guard["skipped_in_a_row"] + ~overflow),
        "norms": jnp.where(good, norms.at[updates % HISTORY].set(norm), norms),
    }
    return good, remembered
