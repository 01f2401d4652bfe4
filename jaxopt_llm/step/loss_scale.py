"""Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740), with the rules of torch.amp.GradScaler.

The loss is multiplied by a scale before it is differentiated. The scale moves small gradients, which float16 would
round to 0 below 6e-8, into its range. The gradients are divided by the scale, in float32, before anything reads them.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.config import PrecisionConfig
from jaxopt_llm.core import tree
from jaxopt_llm.model.param import ParamSpec

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
