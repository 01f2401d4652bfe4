"""Runs the real commands, as a user types them, and reads what they leave."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import warm

ROOT = Path(__file__).parent.parent
# Small enough to compile and run in seconds.
TINY = {
    "model.width": 16,
    "model.layers": 2,
    "model.pattern": "global",
    "model.heads": 2,
    "model.kv-heads": 1,
    "model.head-dim": 8,
    "model.mlp-width": 16,
    "training.batch-size": 4,
    "training.sequence-length": 32,
    "evaluation.batches": 1,
    "logging.every": 1,
}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    # Only read what is kept of earlier runs: JAX writes into the file itself, and tests kill commands. Forks of warm.py
    # write whole files.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",
}
TIMINGS = {"tokens_per_second", "step_seconds", "data_seconds"}


def command(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`python -m jaxopt_llm.<module> <arguments>`, from a folder that is not the repository, on the CPU."""
    process = start(module, *arguments)
    try:
        output = process.communicate(timeout=300)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


def start(module: str, *arguments: object, folder: Path = ROOT.parent, **environment: str) -> subprocess.Popen[str]:
    """The same, still running, from any folder."""
    return start_python("-m", f"jaxopt_llm.{module}", *arguments, folder=folder, **environment)


def start_python(*arguments: object, folder: Path = ROOT.parent, **environment: str) -> subprocess.Popen[str]:
    whole = {**os.environ, **ENVIRONMENT, **environment}
    forked = arguments[0] in ("-m", "-c") and warm.fits(whole)
    return (warm.Forked if forked else subprocess.Popen)(
        [sys.executable, *map(str, arguments)],
        env=whole,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(directory: Path, *overrides: object) -> subprocess.CompletedProcess[str]:
    """Trains a tiny model by the quickstart recipe."""
    return command("train", *tiny(directory), *overrides)


def start_training(
    directory: Path, *overrides: object, folder: Path = ROOT.parent, **environment: str
) -> subprocess.Popen[str]:
    return start("train", *tiny(directory), *overrides, folder=folder, **environment)


def tiny(directory: Path) -> list[object]:
    overrides = [f"--{name}={value}" for name, value in TINY.items()]
    return ["--config", "quickstart.py", "--run.directory", directory, *overrides]


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The log without what depends on the clock."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in records]


def checkpoint(directory: Path, step: int, names: tuple[str, ...] = ("masters", "moments")) -> Any:
    with ocp.CheckpointManager(directory / "checkpoints") as manager:
        device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])  # whichever devices wrote it
        items = {name: ocp.args.StandardRestore(fallback_sharding=device) for name in names}
        return jax.tree.map(np.asarray, dict(manager.restore(step, args=ocp.args.Composite(**items))))
