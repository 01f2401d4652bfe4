"""Learning rate as a function of the step."""

import jax
import jax.numpy as jnp
import optax

from jaxopt_llm.config import ScheduleConfig


def make_schedule(peak: float, config: ScheduleConfig, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the number of finished steps.

    steps: number of steps of the run, at which the schedule ends if `decay_steps` is 0.

    After a linear warm-up, `schedule.kind` is one of:

    - `cosine`: half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983), then constant.
    - `linear`: a straight line, then constant.
    - `constant`.
    - `wsd`: warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395).
    - `inverse_sqrt`: the inverse square root of the step (Vaswani et al. 2017, arXiv:1706.03762).

    The first step already has a rate above 0. The step with number `decay_steps`, counted from 1, has the final rate.
    """
    warmup, end = max(config.warmup_steps, 1), config.choose_end(steps)

    def rate(count: jax.Array) -> jax.Array:
        step = jnp.asarray(count + 1, jnp.float32)
        if config.kind == "constant":
            share = jnp.ones(())
        elif config.kind == "inverse_sqrt":
            share = jnp.maximum(jnp.sqrt(warmup / step), config.final_share)
        else:
            # 1 until `length` steps before the end, then a line down to 0.
            length = config.cooldown_steps if config.kind == "wsd" else end - config.warmup_steps
            fall = jnp.clip((end - step) / length, 0.0, 1.0)
            if config.kind == "cosine":
                fall = (1 - jnp.cos(jnp.pi * fall)) / 2
            share = config.final_share + (1 - config.final_share) * fall
        return peak * jnp.where(step < config.warmup_steps, step / warmup, share)

    return rate
