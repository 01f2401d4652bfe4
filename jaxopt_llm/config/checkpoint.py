"""Settings of checkpoints: when they are saved and which of them are kept."""

from dataclasses import dataclass

from jaxopt_llm.config.metadata import find_below_one


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 500
    """Steps between two checkpoints. The last step always has one. A save that failed is retried after a tenth of
    these steps."""
    keep: int = 2
    """Number of newest checkpoints to keep (Hugging Face: save_total_limit)."""
    keep_every: int = 0
    """Keep forever the checkpoints at multiples of this number of steps, which must be a multiple of
    checkpoint.every. 0 = off."""
    keep_best: int = 0
    """Number of checkpoints with the lowest held-out loss to keep, among those of steps that are evaluated. 0 = off."""

    def problems(self) -> list[str]:
        found = find_below_one("checkpoint", self, "every", "keep")
        found += [
            f"checkpoint.{name}={value}: must be at least 0"
            for name, value in (("keep_every", self.keep_every), ("keep_best", self.keep_best))
            if value < 0
        ]
        if self.every > 0 and self.keep_every > 0 and self.keep_every % self.every:
            found.append(
                f"checkpoint.keep_every={self.keep_every}: must be a multiple of checkpoint.every={self.every}, the "
                "steps that have a checkpoint"
            )
        return found

    def is_due(self, step: int, failed: int | None) -> bool:
        """Return whether to save a checkpoint after this step. failed: step of the last save if that save failed."""
        retry = failed is not None and step >= failed + max(1, self.every // 10)
        return retry or step % self.every == 0
