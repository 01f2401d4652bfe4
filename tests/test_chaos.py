"""Faults injected into a job under supervisors: it ends by itself, equal to the bit to a run without faults."""

import json
import random
import subprocess
import sys
from pathlib import Path

import chaos
import chaos_faults
import chaos_peers
import pytest
from commands import ROOT


def inject(folder: Path, *options: object) -> dict[str, object]:
    """Run the benchmark, and return its figures."""
    file = folder / "chaos.json"
    command = [sys.executable, ROOT / "benchmarks/chaos.py", "--seed", 1, "--json", file, *options]
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told: dict[str, object] = json.loads(file.read_text())
    return told


def test_a_killed_process_and_a_damaged_checkpoint(tmp_path: Path) -> None:
    told = inject(tmp_path, "--processes", 2, "--faults", 2, "--only", "process killed", "bit flip on disk")
    killed, flipped = told["faults"]  # type: ignore[misc]
    assert killed["codes"] == [chaos_faults.LOST]
    assert flipped["repeated"] >= chaos.CHECKPOINT_EVERY  # it continued from the checkpoint before the damaged one
    assert told["equal"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "sent"),
    [
        ("compile", "SIGKILL"),
        ("step", "SIGKILL"),
        ("step", "SIGSEGV"),
        ("evaluate", "SIGTERM twice"),
        ("save", "SIGKILL"),
    ],
)
def test_a_death_in_the_middle_of_work_ends_the_others_with_5(moment: str, sent: str) -> None:
    trial = chaos_peers.run_trial(moment, sent, 3, random.Random(f"{moment} {sent}"))
    assert trial.codes == [chaos_faults.LOST] * 2, trial
    assert all(line.startswith(f"error: process {trial.victim} of 3 has died") for line in trial.lines), trial


@pytest.mark.slow
def test_ten_minutes_of_all_faults(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.option.slow_share:
        pytest.skip("too long for a share of the slow tests")
    told = inject(tmp_path, "--processes", 2, "--minutes", 10, "--faults", 2 * len(chaos_faults.KINDS))
    assert told["equal"] and not told["hangs"] and not told["uncoded"]
