"""Settings of checkpoints: when they are saved and which of them are kept."""

from dataclasses import dataclass

from jaxopt_llm.config.metadata import AT_LEAST_ONE, NON_NEGATIVE, find_out_of_range, setting


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = setting(500, bounds=AT_LEAST_ONE)
    """Steps between two checkpoints. The last step always has one. A save that failed, or that was left out because the
    saves before were still being written, is retried after a tenth of these steps."""
    keep: int = setting(2, bounds=AT_LEAST_ONE)
    """Number of newest checkpoints to keep (Hugging Face: save_total_limit)."""
    keep_every: int = setting(0, bounds=NON_NEGATIVE)
    """Keep forever the checkpoints at multiples of this number of steps, which must be a multiple of
    checkpoint.every. 0 = off."""
    keep_best: int = setting(0, bounds=NON_NEGATIVE)
    """Number of checkpoints with the lowest held-out loss to keep, among those of steps that are evaluated. 0 = off."""

    replicate_every: int = setting(0, bounds=NON_NEGATIVE)
    """Steps between two copies of the state in the memory of the hosts, for a restart after the loss of one host: each
    host keeps its own part and, where no other host has the same one, also that of the next host. 0 = off."""
    replicate_directory: str = "/dev/shm"
    """Directory in memory for checkpoint.replicate_every, of each host its own. The copies are in a folder there that
    only this user can read."""

    def problems(self) -> list[str]:
        found = find_out_of_range("checkpoint", self)
        every, kept = self.every, self.keep_every
        if every > 0 and kept > 0 and kept % every:
            found.append(f"checkpoint.keep_every={kept}: must be a multiple of checkpoint.every={every}")
        return found

    def is_due(self, step: int, failed: int | None) -> bool:
        """Return whether to save a checkpoint after this step.

        Args:
            failed: step of the last save if that save failed.
        """
        retry = failed is not None and step >= failed + max(1, self.every // 10)
        return retry or step % self.every == 0

    def keeps_forever(self, step: int) -> bool:
        """Return whether `keep_every` keeps the checkpoint of a step."""
        return self.keep_every > 0 and step % self.keep_every == 0
