"""Runs the real commands, as a user types them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Small enough to compile and run in seconds.
TINY = {
    "model.width": 16,
    "model.layers": 2,
    "model.heads": 2,
    "model.kv-heads": 1,
    "model.head-dim": 8,
    "model.mlp-width": 16,
    "training.batch-size": 4,
    "training.sequence-length": 32,
    "evaluation.batches": 1,
    "logging.every": 1,
}


def command(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`python -m jaxopt_llm.<module> <arguments>`, from a folder that is not the repository, on the CPU."""
    return subprocess.run(
        [sys.executable, "-m", f"jaxopt_llm.{module}", *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


def train(directory: Path, *overrides: object) -> subprocess.CompletedProcess[str]:
    """Trains a tiny model by the quickstart recipe."""
    tiny = [f"--{name}={value}" for name, value in TINY.items()]
    return command("train", "--config", "quickstart.py", "--run.directory", directory, *tiny, *overrides)
