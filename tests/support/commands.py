"""Run the real commands as a user types them, and read the files that they write."""

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

ROOT = Path(__file__).parent.parent.parent
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
    "schedule.warmup-steps": 0,  # the runs are shorter than the default warmup
    "evaluation.batches": 1,
    "logging.every": 1,
}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    # Only read the programs that earlier runs have kept: JAX writes directly into the file, and tests kill commands.
    # Forks of warm.py write whole files.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",
}
STEPS = 24  # of a run that tests interrupt
# Steps take milliseconds, evaluations ten times as long: most signals arrive in evaluations.
RUN = ("--training.steps", STEPS, "--evaluation.every", 2, "--evaluation.batches", 20, "--checkpoint.every", 100)
SAVES_EVERY_STEP = ("--checkpoint.every", 1, "--checkpoint.keep", 1)
TIMINGS = {"tokens_per_second", "step_seconds", "data_seconds"}


def command(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `python -m jaxopt_llm.<module> <arguments>` on the CPU, from a folder outside the repository."""
    process = start(module, *arguments)
    try:
        output = process.communicate(timeout=300)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, *output)


def start(module: str, *arguments: object, folder: Path = ROOT.parent, **environment: str) -> subprocess.Popen[str]:
    """Start `python -m jaxopt_llm.<module> <arguments>` from any folder."""
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
    """Train a tiny model with the quickstart recipe."""
    return command("train", *tiny(directory), *overrides)


def start_training(
    directory: Path, *overrides: object, folder: Path = ROOT.parent, **environment: str
) -> subprocess.Popen[str]:
    return start("train", *tiny(directory), *overrides, folder=folder, **environment)


def tiny(directory: Path) -> list[object]:
    overrides = [f"--{name}={value}" for name, value in TINY.items()]
    return ["--config", "quickstart.py", "--run.directory", directory, *overrides]


def some_text(path: Path) -> tuple[object, ...]:
    """Write a few documents and return the flags that name them."""
    documents = (json.dumps({"text": f"document {number} " * 40}) for number in range(20))
    path.write_text("\n".join(documents))
    return ("--data.paths", path)


def metrics(directory: Path) -> list[dict[str, Any]]:
    """Read the metrics without those that depend on the clock."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in TIMINGS and not key.startswith("process_seconds/")}
        for record in records
    ]


def checkpoint(directory: Path, step: int, names: tuple[str, ...] = ("masters", "moments")) -> Any:
    with ocp.CheckpointManager(directory / "checkpoints") as manager:
        device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])  # for checkpoints written by any devices
        items = {name: ocp.args.StandardRestore(fallback_sharding=device) for name in names}
        return jax.tree.map(np.asarray, dict(manager.restore(step, args=ocp.args.Composite(**items))))


def assert_one_line(stderr: str, *parts: str) -> None:
    """Check that a command has refused its input in one line that has these parts."""
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1 and stderr.endswith("\n"), stderr
    for part in parts:
        assert part in stderr


def logged(directory: Path) -> int:
    """Count the records of a run."""
    log = directory / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def assert_ended_as(whole: Path, directory: Path) -> None:
    """Check that an interrupted run ended like one that was not, to the bit."""
    assert metrics(directory) == metrics(whole)
    jax.tree.map(np.testing.assert_array_equal, checkpoint(directory, STEPS), checkpoint(whole, STEPS))
