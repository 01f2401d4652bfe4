"""A trainer for large language models on JAX/XLA."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxopt_llm.pretrained import Pretrained


def load_pretrained(path: str | Path, adapter: str | Path | None = None) -> "Pretrained":
    """The model of a Hugging Face folder, on this machine's devices. adapter: a folder of PEFT's, of LoRA adapters of
    it."""
    from jaxopt_llm import pretrained  # here: a command settles what JAX is told before it is imported

    return pretrained.load(Path(path), None if adapter is None else Path(adapter))
