"""Compare held-out losses of the quickstart for values of a setting. The training command itself runs."""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

Losses = dict[str, dict[int, float]]  # losses by value of the setting and by seed


def compare(field: str, values: Sequence[str], seeds: Sequence[int], steps: int, overrides: list[str]) -> Losses:
    """Return held-out losses after the last step, in nats per token.

    Each run is a separate process. Its schedule ends with its last step.
    """
    losses: Losses = {value: {} for value in values}
    for seed in seeds:
        for value in values:
            losses[value][seed] = train(steps, seed, [f"--{field.replace('_', '-')}", value, *overrides])
            print(f"seed {seed}, {field}={value}: {losses[value][seed]:.4f}", flush=True)
    return losses


def table(field: str, losses: Losses, steps: int) -> list[str]:
    """Return the lines of a table, with the ratio of the mean of each value to that of the first."""
    means = {value: statistics.mean(found.values()) for value, found in losses.items()}
    first = next(iter(means))
    lines = [
        f"held-out loss after {steps} quickstart steps, jax {jax.__version__} on {platform.machine()}",
        f"{field:30} " + " ".join(f"{f'seed {seed}':>8}" for seed in losses[first]) + "     mean    ratio",
    ]
    for value, found in losses.items():
        of_seeds = " ".join(f"{loss:8.4f}" for loss in found.values())
        lines.append(f"{value:30} {of_seeds} {means[value]:8.4f} {means[value] / means[first]:8.4f}")
    return lines


def train(steps: int, seed: int, settings: Sequence[str]) -> float:
    """Return the held-out loss of the quickstart with these flags after its last step, in nats per token."""
    return train_curve(steps, seed, settings, points=1)[steps]


def train_curve(steps: int, seed: int, settings: Sequence[str], points: int) -> dict[int, float]:
    """Return the held-out losses of the quickstart with these flags by step, in nats per token.

    points: number of losses, at equal distances up to the last step. It divides `steps`.
    """
    with tempfile.TemporaryDirectory() as directory:
        recipe = ("--config", "quickstart.py", "--run.directory", directory, "--run.seed", seed)
        length = ("--training.steps", steps, "--schedule.decay-steps", steps, "--evaluation.every", steps // points)
        arguments = map(str, (*recipe, *length, *settings))
        subprocess.run([sys.executable, "-m", "jaxopt_llm.train", *arguments], check=True)
        records = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
        return {record["step"]: float(record["eval_loss"]) for record in records if "eval_loss" in record}
