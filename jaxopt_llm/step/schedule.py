"""Learning rate as a function of the step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxopt_llm.config import ScheduleConfig


@struct.dataclass
class Shape:
    """Numbers of a schedule, float32 scalars, which may be traced.

    Attributes:
        peak: the learning rate after the warm-up.
        warmup: steps of the warm-up, at least 1.
        end: the step with the final rate.
        fall: steps of the fall that ends there.
        final_share: the final rate as a share of the peak.
        fallen_share: 1 - final_share, rounded once.
    initial_share, risen_share: the rate at which the warm-up begins as a share of the peak, and 1 - initial_share.
    """

    peak: jax.Array | np.float32
    warmup: jax.Array | np.float32
    end: jax.Array | np.float32
    fall: jax.Array | np.float32
    final_share: jax.Array | np.float32
    fallen_share: jax.Array | np.float32
    initial_share: jax.Array | np.float32
    risen_share: jax.Array | np.float32


def find_shape(peak: float, config: ScheduleConfig, steps: int) -> Shape:
    """Return the numbers of the schedule of a run of so many steps, at which it ends if `decay_steps` is 0."""
    warmup, end = config.count_warmup(steps), config.choose_end(steps)
    fall = config.cooldown_steps if config.kind == "wsd" else end - warmup
    final, initial = config.final_share, config.initial_share
    return Shape(*map(np.float32, (peak, max(warmup, 1), end, fall, final, 1 - final, initial, 1 - initial)))


def make_schedule(kind: str, shape: Shape, warmup_kind: str) -> optax.Schedule:
    """Return the learning rate as a function of the number of finished steps.

    In step s of a warm-up of W steps, the rate has risen by s / W, or, if `warmup_kind` is `log`, by
    log(s + 1) / log(W), at most 1 (DeepSpeed's WarmupLR). After it, `kind`, the setting `schedule.kind`, is one of:

    - `cosine`: half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983), then constant.
    - `linear`: a straight line, then constant.
    - `constant`.
    - `wsd`: warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395).
    - `inverse_sqrt`: the inverse square root of the step (Vaswani et al. 2017, arXiv:1706.03762).

    The first step already has a rate above 0. The step with number `shape.end`, counted from 1, has the final rate.
    """

    def rate(count: jax.Array) -> jax.Array:
        step = jnp.asarray(count + 1, jnp.float32)
        if kind == "constant":
            share = jnp.ones(())
        elif kind == "inverse_sqrt":
            share = jnp.maximum(jnp.sqrt(shape.warmup / step), shape.final_share)
        else:
            # 1 until `fall` steps before the end, then a line down to 0.
            fall = jnp.clip((shape.end - step) / shape.fall, 0.0, 1.0)
            if kind == "cosine":
                fall = (1 - jnp.cos(jnp.pi * fall)) / 2
            share = shape.final_share + shape.fallen_share * fall
        risen = step / shape.warmup
        if warmup_kind == "log":
            risen = jnp.minimum(jnp.log(step + 1) / jnp.log(jnp.maximum(shape.warmup, 2.0)), 1.0)
        return shape.peak * jnp.where(step < shape.warmup, shape.initial_share + shape.risen_share * risen, share)

    return rate
