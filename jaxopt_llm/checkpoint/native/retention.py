"""Retention policy: which checkpoints stay on disk."""

from collections.abc import Mapping

from jaxopt_llm.config import CheckpointConfig


def list_reasons_to_keep(losses: Mapping[int, float | None], config: CheckpointConfig) -> dict[int, list[str]]:
    """Return the reasons to keep the checkpoint of each step; a checkpoint without a reason is deleted.

    Args:
        losses: step -> held-out loss; None where it was not measured.
        config: the settings `keep`, `keep_every` and `keep_best`.
    """
    newest = sorted(losses)[-config.keep :]
    best = rank_by_loss(losses)[: config.keep_best]
    return {
        step: [
            *(["newest"] if step in newest else []),
            *([f"every {config.keep_every}"] if config.keep_every and step % config.keep_every == 0 else []),
            *(["best"] if step in best else []),
        ]
        for step in losses
    }


def rank_by_loss(losses: Mapping[int, float | None]) -> list[int]:
    """Return the steps whose held-out loss was measured, lowest loss first."""
    return [step for _, step in sorted((loss, step) for step, loss in losses.items() if loss is not None)]
