"""Runs that are stopped or killed, through the real command, and then resumed: they end like an undisturbed run.

No run passes a gate by itself. So when a signal arrives, the run is at the gate or before it.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import (
    ENVIRONMENT,
    RUN,
    SAVES_EVERY_STEP,
    assert_ended_as,
    checkpoint,
    logged,
    start_training,
)
from gates import Gate, after_step, finish, line_with, start_gated, wait_until
from marks import slow

from jaxopt_llm.checkpoint.native.step_directories import find_checkpoints


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run without any disturbance."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    finish(start_training(directory, *RUN))
    return directory


def writing(directory: Path) -> list[Path]:
    """Return the checkpoints that a process is writing, or was writing when it died."""
    return list((directory / "checkpoints").glob("*.writing*"))


@pytest.mark.parametrize("sent", [signal.SIGTERM, *slow(signal.SIGINT, signal.SIGHUP)])
def test_a_signal_stops_the_run_after_its_step_and_a_save(sent: signal.Signals, whole: Path, tmp_path: Path) -> None:
    run, gate = tmp_path / "run", after_step(tmp_path / "gate", 20)
    process = start_gated(run, [gate], *RUN)
    wait_until(lambda: logged(run) >= 3, process)
    process.send_signal(sent)
    gate.open()
    stdout, stderr = finish(process, 75)
    assert f"to continue: python -m jaxopt_llm.train --config quickstart.py --run.directory {run} --" in stdout
    assert "next:" not in stdout
    step = int(stderr.removeprefix("preempted at step ").split(";")[0])
    assert stderr == f"preempted at step {step}; run again to continue\n"
    assert 3 <= step == logged(run) <= 20
    stdout, _ = finish(start_training(run, *RUN))
    assert f"continues from step {step}" in stdout
    assert_ended_as(whole, run)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_the_imports_ends_as_a_stop(sent: signal.Signals, tmp_path: Path) -> None:
    arguments = ["-m", "jaxopt_llm.train", "--config", "quickstart.py", "--run.directory", str(tmp_path / "run")]
    environment = {**os.environ, **ENVIRONMENT}
    process = subprocess.Popen([sys.executable, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
    # Python itself catches SIGINT, a little earlier; all three are set together.
    wait_until(lambda: catches(signal.SIGHUP, process), process)
    process.send_signal(sent)
    assert finish(process, 75)[1] == "preempted without a save; run again to continue\n"
    assert not (tmp_path / "run").exists()


def test_a_signal_before_the_first_step_leaves_nothing_to_save(tmp_path: Path) -> None:
    run, gate = tmp_path / "run", Gate(tmp_path / "gate", "jaxopt_llm.train:Processes.vote")
    process = start_gated(run, [gate], *RUN)
    line_with("parameters", process)  # it compiles next
    process.send_signal(signal.SIGTERM)
    gate.open()
    assert finish(process, 75)[1] == "preempted at step 0; run again to continue\n"
    assert not logged(run) and not list((run / "checkpoints").iterdir())


def test_a_signal_at_the_last_step_lets_the_run_finish(tmp_path: Path) -> None:
    run, gate = tmp_path / "run", Gate(tmp_path / "gate", "jaxopt_llm.run.workload:measure_loss")
    process = start_gated(run, [gate], *RUN, "--training.steps", 1)
    wait_until(gate.reached, process)  # after the last check of the flag
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: not catches(signal.SIGTERM, process), process)
    gate.open()
    finish(process, 0)
    assert checkpoint(run, 1)


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(whole: Path, tmp_path: Path) -> None:
    run, gate = (
        tmp_path / "run",
        Gate(tmp_path / "gate", "jaxopt_llm.checkpoint.native.checkpoints:Checkpoints.save_last"),
    )
    process = start_gated(run, [gate], *RUN)
    wait_until(lambda: logged(run) >= 2, process)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: not catches(signal.SIGTERM, process), process)
    process.send_signal(signal.SIGTERM)
    assert finish(process, -signal.SIGTERM)[1] == ""
    gate.open()
    finish(start_training(run, *RUN))
    assert_ended_as(whole, run)


def catches(signum: signal.Signals, process: subprocess.Popen[str]) -> bool:
    """Return whether the process has its own handler, which the first signal removes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (signum - 1) & 1)


def test_a_run_that_is_killed_many_times_ends_equal_to_the_bit(whole: Path, tmp_path: Path) -> None:
    """Kill the run at random times: mostly in steps and saves, sometimes during the start."""
    run, chance = tmp_path / "run", random.Random(0)
    for kill in range(5):
        path = tmp_path / f"gate-{kill}"
        commits = Gate(path, "jaxopt_llm.checkpoint.native.step_directories:commit", 2) if kill % 5 == 3 else None
        gate = commits or after_step(path, 3)  # at most two steps are saved for each kill
        before = max(find_checkpoints(run / "checkpoints"), default=0)
        process = start_gated(run, [gate], *RUN, *SAVES_EVERY_STEP)
        if kill % 5 == 4:
            time.sleep(chance.uniform(0.5, 2.5))  # imports, corpus, compilation, restoration
        elif kill % 5 == 3:
            # Wait until a step is saved: the next start then resumes, with a log that is ahead of the checkpoint.
            wait_until(lambda before=before: max(find_checkpoints(run / "checkpoints"), default=0) > before, process)
            wait_until(lambda: writing(run), process)
        else:
            line_with("step ", process)
            time.sleep(chance.uniform(0, 0.3))  # the run saves during most of this time
        process.kill()
        finish(process, -signal.SIGKILL)
        assert kill % 5 != 3 or writing(run), f"kill {kill}"  # it died while it saved
    finish(start_training(run, *RUN))
    assert not writing(run)
    assert_ended_as(whole, run)
