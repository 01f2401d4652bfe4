"""Learning rate as a function of the step."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class ScheduleConfig:
    warmup_steps: int = 100
    """steps over which the learning rate rises linearly from 0"""
    decay_steps: int = 1000
    """the step at which cosine, linear and wsd reach their end; a length of its own, so that a run may be extended"""
    final_share: float = 0.1
    """learning rate at the end, as a share of the peak; below it inverse_sqrt does not fall, constant never falls"""
    kind: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = "cosine"
    """what follows the warm-up; wsd stays at the peak and falls linearly in the last cooldown_steps"""
    cooldown_steps: int = 100
    """steps of wsd's fall, the last before decay_steps"""

    @property
    def ends_at(self) -> int | None:
        """The step from which on the rate is the final one; None where it has no end."""
        return self.decay_steps if self.kind in ("cosine", "linear", "wsd") else None

    def problems(self) -> list[str]:
        found = []
        if self.warmup_steps < 0 or (self.ends_at is not None and self.warmup_steps >= self.decay_steps):
            found.append(
                f"schedule.warmup_steps={self.warmup_steps} must be at least 0 and below "
                f"schedule.decay_steps={self.decay_steps}"
            )
        elif self.kind == "wsd" and not 1 <= self.cooldown_steps <= self.decay_steps - self.warmup_steps:
            found.append(
                f"schedule.cooldown_steps={self.cooldown_steps} must lie between 1 and the "
                f"{self.decay_steps - self.warmup_steps} steps from schedule.warmup_steps to schedule.decay_steps"
            )
        if not 0 <= self.final_share <= 1:
            found.append(f"schedule.final_share={self.final_share} must lie between 0 and 1")
        return found


def make_schedule(peak: float, config: ScheduleConfig) -> optax.Schedule:
    """Linear warm-up, then one of: half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983) or a line, both constant
    after their end; a constant; warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395); the inverse square root of
    the step (Vaswani et al. 2017, arXiv:1706.03762).

    A step, counted from 0, has the rate at its end: the first already learns, and step number `decay_steps`, counted
    from 1, has the final rate.
    """
    warmup = max(config.warmup_steps, 1)

    def rate(count: jax.Array) -> jax.Array:
        step = jnp.asarray(count + 1, jnp.float32)

        def left(steps: int) -> jax.Array:
            """1 until so many steps before the end, then in a line to 0."""
            return jnp.clip((config.decay_steps - step) / steps, 0.0, 1.0)

        if config.kind == "constant":
            share = jnp.ones(())
        elif config.kind == "inverse_sqrt":
            share = jnp.maximum(jnp.sqrt(warmup / step), config.final_share)
        else:
            fall = left(config.cooldown_steps if config.kind == "wsd" else config.decay_steps - config.warmup_steps)
            if config.kind == "cosine":
                fall = (1 - jnp.cos(jnp.pi * fall)) / 2
            share = config.final_share + (1 - config.final_share) * fall
        return peak * jnp.where(step < config.warmup_steps, step / warmup, share)

    return rate
