"""The recipes of docs/grpo.md as typed there: rewards alone teach a model to add."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, command, metrics


@pytest.mark.slow
def test_rewards_teach_to_add(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "sums.py", tmp_path], check=True)
    start, directory = tmp_path / "format", tmp_path / "grpo"
    flags = ("--run.directory", start, "--data.paths", tmp_path / "format.jsonl")
    done = command("train", "--config", "grpo_format.py", *flags)
    assert done.returncode == 0, done.stderr
    flags = ("--run.directory", directory, "--data.paths", tmp_path / "prompts.jsonl", "--logging.every", 1)
    done = command("train", "--config", "grpo.py", *flags, "--model.pretrained", start)
    assert done.returncode == 0, done.stderr
    means = [each["rewards/mean"] for each in metrics(directory)]
    assert means[0] < 0.2 and np.mean(means[-20:]) > 0.8
