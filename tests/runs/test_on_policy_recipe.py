"""The recipe of docs/distillation.md as typed there: a student learns to add from a teacher in its own answers."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, command, metrics


@pytest.mark.slow
def test_a_teacher_that_adds_teaches_to_add(tmp_path: Path) -> None:
    def run(module: str, *flags: object) -> None:
        done = command(module, *flags)
        assert done.returncode == 0, done.stderr

    subprocess.run([sys.executable, ROOT / "scripts" / "sums.py", tmp_path], check=True)
    for name, data in (("student", "format"), ("teacher", "right")):
        flags = ("--run.directory", tmp_path / name, "--data.paths", tmp_path / f"{data}.jsonl")
        run("train", "--config", "grpo_format.py", *flags)
    run("convert", "export", "--checkpoint", tmp_path / "teacher", "--to", tmp_path / "exported")
    directory = tmp_path / "own"
    named = ("--model.pretrained", tmp_path / "student", "--distillation.teacher", tmp_path / "exported")
    flags = ("--run.directory", directory, "--data.paths", tmp_path / "prompts.jsonl", "--logging.every", 1)
    run("train", "--config", "on_policy.py", *flags, *named)
    means = [each["rewards/mean"] for each in metrics(directory)]
    assert np.mean(means[:5]) < 0.25 and np.mean(means[-20:]) > 0.9
