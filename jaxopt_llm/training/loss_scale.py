"""Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740), by the rules of torch.amp.GradScaler.

The loss is multiplied by a scale before it is differentiated, which brings into float16's range the gradients that it
would round to zero, below 6e-8; they are divided by the scale, in float32, before anything reads them.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm import tree
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.precision import PrecisionConfig

GROWTH, BACKOFF = 2.0, 0.5

LossScale = dict[str, tree.Leaf]


def specs(precision: PrecisionConfig) -> LossScale:
    """scale: float32, that the next step uses. finite_steps: those in a row since the scale last changed or could not
    grow. Empty where nothing is scaled."""
    if not precision.scales_loss:
        return {}
    return {"scale": ParamSpec((), ()), "finite_steps": ParamSpec((), (), dtype=np.dtype(np.int32))}


def initialize(precision: PrecisionConfig) -> LossScale:
    if not precision.scales_loss:
        return {}
    return {"scale": jnp.float32(precision.initial_loss_scale), "finite_steps": jnp.int32(0)}


def adjust(state: LossScale, overflow: jax.Array, growth_interval: int) -> LossScale:
    """What the step after this one uses: half the scale after an overflow, twice the scale after `growth_interval`
    steps in a row without. Steps that were skipped for another reason, their gradients being finite, count among them,
    as GradScaler would count them."""
    if not state:
        return {}
    scale, finite_steps = state["scale"], state["finite_steps"] + 1
    grows = finite_steps >= growth_interval
    grown = jnp.where(grows & jnp.isfinite(scale * GROWTH), scale * GROWTH, scale)
    return {
        "scale": jnp.where(overflow, scale * BACKOFF, grown),
        "finite_steps": jnp.where(overflow | grows, 0, finite_steps),
    }
