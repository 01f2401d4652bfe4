"""A profile of some steps, for TensorBoard, XProf or Perfetto."""

from dataclasses import dataclass
from pathlib import Path

import jax


@dataclass(frozen=True)
class ProfileConfig:
    start_step: int = 0
    """first step that is profiled, into the run directory's profile/; 0 is off. Not the first few: they compile"""
    steps: int = 3
    """how many steps are profiled"""

    def problems(self) -> list[str]:
        found = [f"profile.steps={self.steps}: must be at least 1"] if self.steps < 1 else []
        return found + ([f"profile.start_step={self.start_step}: must be at least 0"] if self.start_step < 0 else [])


class Profiler:
    """Profiles steps start_step to start_step + steps - 1. A context manager: what was begun is written on leaving."""

    def __init__(self, config: ProfileConfig, directory: Path) -> None:
        self._steps = range(config.start_step, config.start_step + config.steps) if config.start_step else range(0)
        self._directory = directory / "profile"
        self._running = False

    def before(self, step: int) -> None:
        """Call before every step."""
        if step in self._steps and not self._running:
            jax.profiler.start_trace(str(self._directory))
            self._running = True

    def after(self, step: int, results: object) -> None:
        """Call after every step; of the last one that is profiled it waits for the results."""
        if self._running and step + 1 not in self._steps:
            jax.block_until_ready(results)
            self.__exit__()

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *error: object) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
