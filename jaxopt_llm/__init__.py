"""Trainer for large language models on JAX/XLA."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jaxopt_llm.inference.load import Pretrained


def load_pretrained(
    path: str | Path,
    adapter: str | Path | None = None,
    step: int | Literal["best"] | None = None,
    base: str | Path | None = None,
) -> "Pretrained":
    """Load the model of a Hugging Face folder or hub id, or of a run, onto this machine's devices.

    Args:
        path: the folder, hub id or run directory.
        adapter: PEFT folder or hub id of LoRA adapters of the model.
        step: checkpoint of the run: its step, or `best` for the lowest held-out loss; None for the newest.
        base: new location of the model whose adapters the run trains, if its folder was moved.
    """
    from jaxopt_llm.inference import load  # imported here, because a command configures JAX before it imports JAX

    return load.load(Path(path), None if adapter is None else Path(adapter), step, None if base is None else Path(base))
