"""When a checkpoint is written, and which of them stay."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500
    """steps between two checkpoints; one is written after the last step in any case, and one that could not be written
    is tried again a tenth of this later"""
    keep: int = 2
    """newest checkpoints that are kept"""
    keep_every: int = 0
    """steps: checkpoints at its multiples are kept for ever; a multiple of checkpoint.every, or 0 for none"""
    keep_best: int = 0
    """checkpoints that are kept for the lowest held-out loss, of those after a step that is evaluated; 0 for none"""

    def problems(self) -> list[str]:
        found = [
            f"checkpoint.{name}={value}: must be at least 0"
            for name, value in (("keep_every", self.keep_every), ("keep_best", self.keep_best))
            if value < 0
        ]
        if self.every > 0 and self.keep_every > 0 and self.keep_every % self.every:
            found.append(
                f"checkpoint.keep_every={self.keep_every} is no multiple of checkpoint.every={self.every}: "
                "nothing is saved at most of its steps"
            )
        return found

    def due(self, step: int, failed: int | None) -> bool:
        """Whether a checkpoint follows this step. failed: the step of the last save, where that one failed."""
        retry = failed is not None and step >= failed + max(1, self.every // 10)
        return retry or step % self.every == 0


def reasons(losses: Mapping[int, float | None], config: CheckpointConfig) -> dict[int, list[str]]:
    """Why the checkpoint of each step is kept; no reason: it is not. losses: step -> held-out loss where measured."""
    newest = sorted(losses)[-config.keep :]
    measured = sorted((loss, step) for step, loss in losses.items() if loss is not None)
    best = [step for _, step in measured[: config.keep_best]]
    return {
        step: [
            *(["newest"] if step in newest else []),
            *([f"every {config.keep_every}"] if config.keep_every and step % config.keep_every == 0 else []),
            *(["best"] if step in best else []),
        ]
        for step in losses
    }
