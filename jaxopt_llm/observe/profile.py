"""Profile of some steps, for TensorBoard, XProf or Perfetto."""

from pathlib import Path

import jax

from jaxopt_llm.config import ProfileConfig


class Profiler:
    """Profiler of the steps start_step to start_step + steps - 1.

    A context manager: on exit it writes a profile that is still running.
    """

    def __init__(self, config: ProfileConfig, directory: Path) -> None:
        self._steps = range(config.start_step, config.start_step + config.steps) if config.start_step else range(0)
        self._directory = directory / "profile"
        self._running = False

    def before_step(self, step: int) -> None:
        """Start the profile if this is its first step. Call before every step."""
        if step in self._steps and not self._running:
            jax.profiler.start_trace(str(self._directory))
            self._running = True

    def after_step(self, step: int, results: object) -> None:
        """Wait for the results and write the profile if this is its last step. Call after every step."""
        if self._running and step + 1 not in self._steps:
            jax.block_until_ready(results)
            self.__exit__()

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *error: object) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
