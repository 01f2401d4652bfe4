"""Learning rate as a function of the step."""

from dataclasses import dataclass

import optax


@dataclass(frozen=True)
class ScheduleConfig:
    warmup_steps: int = 100
    """steps over which the learning rate rises linearly from 0"""
    decay_steps: int = 1000
    """the step at which the cosine reaches its end; it has its own length, so that a run may be extended"""
    final_share: float = 0.1
    """learning rate at the end, as a share of the peak"""

    def problems(self) -> list[str]:
        found = []
        if not 0 <= self.warmup_steps < self.decay_steps:
            found.append(
                f"schedule.warmup_steps={self.warmup_steps} must be at least 0 and below "
                f"schedule.decay_steps={self.decay_steps}"
            )
        if not 0 <= self.final_share <= 1:
            found.append(f"schedule.final_share={self.final_share} must lie between 0 and 1")
        return found


def warmup_cosine(peak: float, config: ScheduleConfig) -> optax.Schedule:
    """Linear warm-up, then a half cosine (Loshchilov & Hutter 2017, arXiv:1608.03983), then constant.

    A step, counted from 0, has the rate at its end: the first already learns, and step number `decay_steps`, counted
    from 1, has the final rate.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, config.warmup_steps, config.decay_steps, peak * config.final_share
    )
    return lambda count: schedule(count + 1)
