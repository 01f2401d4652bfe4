"""Guard of the training step, and the loss scale of float16.

The guard skips steps that would do harm. A skipped step leaves the parameters, the moments and the position of the
schedule bitwise unchanged. The data moves on.

Loss scaling (Micikevicius et al. 2018, arXiv:1710.03740) follows the rules of torch.amp.GradScaler. The loss is
multiplied by a scale before it is differentiated. The scale moves small gradients, which float16 would round to 0 below
6e-8, into its range. The gradients are divided by the scale, in float32, before anything reads them.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.config import PrecisionConfig
from jaxopt_llm.core import tree
from jaxopt_llm.model.param import ParamSpec

HISTORY = 128  # number of updates whose median gradient norm and loss define an outlier

Guard = dict[str, tree.Leaf]


def guard_specs() -> Guard:
    """Return the specs of the guard's state.

    - `updates`: number of steps that were not skipped, which is the position of the schedule.
    - `skipped_in_a_row`: number of skipped steps since the last update, without overflows.
    - `norms`, `losses`: [HISTORY] gradient norms and losses of the last updates, ring buffers.
    """
    count = ParamSpec((), (), dtype=np.dtype(np.int32))
    history = ParamSpec((HISTORY,), (None,))
    return {"updates": count, "skipped_in_a_row": count, "norms": history, "losses": history}


def initialize_guard() -> Guard:
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), guard_specs())


def judge_step(
    guard: Guard, loss: jax.Array, norm: jax.Array, overflow: jax.Array, outliers: float = 0.0, spikes: float = 0.0
) -> tuple[jax.Array, Guard]:
    """Return whether to apply the update (bool), and the guard's state after the step.

    The update is applied if loss and gradient norm are finite and, after the first HISTORY updates, the norm is at most
    `outliers` times the median of the last HISTORY norms, and the loss is at most `spikes` times the median of the last
    HISTORY losses. Skipped steps do not enter that history.

    Args:
        overflow: bool; the norm is not finite because of the loss scale, which is not a sign of divergence.
        outliers, spikes: limits as multiples of the median; 0 for no limit.
    """
    updates, norms, losses = guard["updates"], guard["norms"], guard["losses"]
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    if outliers:
        good &= (updates < HISTORY) | (norm <= outliers * jnp.median(norms))
    if spikes:
        median = jnp.median(losses)
        # A loss of a user's model may be negative, and is then above a multiple of itself.
        good &= (updates < HISTORY) | (loss <= median + (spikes - 1) * jnp.abs(median))
    new_guard = {
        "updates": updates + good,
        "skipped_in_a_row": jnp.where(good, 0, guard["skipped_in_a_row"] + ~overflow),
        "norms": jnp.where(good, norms.at[updates % HISTORY].set(norm), norms),
        "losses": jnp.where(good, losses.at[updates % HISTORY].set(loss), losses),
    }
    return good, new_guard


GROWTH, BACKOFF = 2.0, 0.5

LossScale = dict[str, tree.Leaf]


def loss_scale_specs(precision: PrecisionConfig) -> LossScale:
    """Return the specs of the loss scale's state; empty without loss scaling.

    - `scale`: float32, the scale of the next step.
    - `finite_steps`: number of consecutive finite steps since the scale last changed, or last could not grow.
    """
    if not precision.scales_loss:
        return {}
    return {"scale": ParamSpec((), ()), "finite_steps": ParamSpec((), (), dtype=np.dtype(np.int32))}


def initialize_loss_scale(precision: PrecisionConfig) -> LossScale:
    if not precision.scales_loss:
        return {}
    return {"scale": jnp.float32(precision.initial_loss_scale), "finite_steps": jnp.int32(0)}


def adjust_loss_scale(state: LossScale, overflow: jax.Array, growth_interval: int) -> LossScale:
    """Return the state for the next step.

    The scale is halved after an overflow, and doubled after `growth_interval` consecutive steps without overflow. As in
    GradScaler, a step that was skipped for another reason, with finite gradients, counts as a step without overflow.
    """
    if not state:
        return {}
    scale, finite_steps = state["scale"], state["finite_steps"] + 1
    grows = finite_steps >= growth_interval
    grown = jnp.where(grows & jnp.isfinite(scale * GROWTH), scale * GROWTH, scale)
    return {
        "scale": jnp.where(overflow, scale * BACKOFF, grown),
        "finite_steps": jnp.where(overflow | grows, 0, finite_steps),
    }
