"""Marks of a block's intermediates: a layer says here, once, the name, the role and the logical axes of each."""

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxopt_llm.core.intermediate import Intermediate, Role
from jaxopt_llm.parallel.placement import Placement


def mark(x: jax.Array, name: str, role: Role, *axes: str | None) -> jax.Array:
    """Return x, with a name for `jax.checkpoint` policies and for the trace (execution/trace.py).

    It changes no sharding: for arrays whose sharding is pinned already.
    """
    return checkpoint_name(x, Intermediate(name, role, *axes))


def constrain(placement: Placement, x: jax.Array, name: str, role: Role, *axes: str | None) -> jax.Array:
    """Pin the sharding of x, given the logical axis of each dimension, and mark it."""
    return mark(placement.constrain(x, *axes), name, role, *axes)
