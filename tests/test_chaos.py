"""Faults injected into a job under supervisors: it ends by itself, equal to the bit to a run without faults."""

import json
import random
import subprocess
import sys
import types
from pathlib import Path

import chaos
import chaos_faults
import chaos_peers
import pytest
from chaos_job import Watcher
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
    kinds = ("--only", "process killed", "bit flip on disk")
    told = inject(tmp_path, "--processes", 2, "--faults", 2, "--bursts", 0, *kinds)
    killed, flipped = told["faults"]  # type: ignore[misc]
    assert killed["codes"] == [chaos_faults.LOST]
    assert flipped["repeated"] >= chaos.CHECKPOINT_EVERY  # it continued from the checkpoint before the damaged one
    assert told["equal"]


def test_bursts_are_drawn_from_the_seed() -> None:
    kinds, chance = [*chaos_faults.KINDS], random.Random(5)
    bursts = chaos.plan_bursts(kinds, 500, 4, chance, probability=0.5)
    assert bursts == chaos.plan_bursts(kinds, 500, 4, random.Random(5), probability=0.5)
    assert sum(map(len, bursts)) == 500
    first, following = [burst[0].kind for burst in bursts], {each.kind for burst in bursts for each in burst[1:]}
    assert first[: len(kinds)] == kinds
    assert {each.victim for burst in bursts for each in burst} == {0, 1, 2, 3}
    pauses = [each.pause for burst in bursts for each in burst[1:]]
    assert 0 <= min(pauses) < 2 and chaos.LONGEST_PAUSE - 2 < max(pauses) <= chaos.LONGEST_PAUSE
    assert following == {kind for kind in kinds if chaos_faults.KINDS[kind].may_follow}
    assert all(chaos_faults.KINDS[burst[0].kind].restarts for burst in bursts if len(burst) > 1)
    assert all(len(burst) == 1 for burst in chaos.plan_bursts(kinds, 50, 4, chance, probability=0.0))


def test_steps_that_are_lost_are_those_since_the_last_whole_checkpoint(tmp_path: Path) -> None:
    for name in ("10", "20", "30", "40.orbax-checkpoint-tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 35}\n')
    watcher = Watcher(types.SimpleNamespace(directory=tmp_path, supervisors=[]))  # type: ignore[arg-type]
    watcher.begin(restarts=True, in_burst=False)
    assert [watcher.count_unsaved(damaged) for damaged in range(4)] == [5, 15, 25, 35]
    kept, lost = {"repeated": 5, "allowed": 5}, {"repeated": 6, "allowed": 5}
    assert chaos.list_losses([kept, lost]) == [lost]
    told = {"equal": True, "hangs": 0, "uncoded": 0}
    assert chaos.is_good(told | {"faults": [kept]}) and not chaos.is_good(told | {"faults": [kept, lost]})


@pytest.mark.slow
def test_a_death_while_the_job_starts_again(tmp_path: Path) -> None:
    told = inject(tmp_path, "--processes", 2, "--faults", 2, "--bursts", 1, "--only", "process killed")
    first, second = told["faults"]  # type: ignore[misc]
    assert (first["when"], first["followed"]) == (chaos.TRAINING, True)
    assert (second["when"], second["followed"]) == (chaos.RESTART, False)
    assert first["codes"] == second["codes"] == [chaos_faults.LOST]  # both killed a program, and the other one noticed
    assert second["step"] - chaos.CHECKPOINT_EVERY < first["step"]  # the job was not back for long, if at all
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
    assert trial.seconds < chaos_peers.LONGEST, trial
    assert all(line.startswith(f"error: process {trial.victim} of 3 has died") for line in trial.lines), trial


@pytest.mark.slow
def test_ten_minutes_of_all_faults(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.option.slow_share:
        pytest.skip("too long for a share of the slow tests")
    told = inject(tmp_path, "--processes", 2, "--hours", 1 / 6, "--faults", 2 * len(chaos_faults.KINDS))
    assert chaos.is_good(told)
