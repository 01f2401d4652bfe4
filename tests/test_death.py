"""Runs that are stopped or killed, through the real command, end as one that was not."""

import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import checkpoint, metrics, start_training

STEPS = 24
# Steps are milliseconds long, evaluations fifty times as much: that is where most signals arrive.
RUN = ("--training.steps", STEPS, "--evaluation.every", 2, "--evaluation.batches", 100, "--checkpoint.every", 100)
SAVES_EVERY_STEP = ("--checkpoint.every", 1, "--checkpoint.keep", 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbs."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    finish(start_training(directory, *RUN))
    return directory


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """What the process wrote to standard output and to standard error."""
    try:
        stdout, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    return stdout, stderr


def wait_until(happens: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not happens():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def logged(directory: Path) -> int:
    log = directory / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def writing(directory: Path) -> list[Path]:
    """Checkpoints that a process is writing, or was when it died."""
    return list((directory / "checkpoints").glob("*.writing*"))


def assert_ended_as(whole: Path, directory: Path) -> None:
    assert metrics(directory) == metrics(whole)
    jax.tree.map(np.testing.assert_array_equal, checkpoint(directory, STEPS), checkpoint(whole, STEPS))


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_run_after_its_step_and_a_save(sent: signal.Signals, whole: Path, tmp_path: Path) -> None:
    process = start_training(tmp_path, *RUN)
    wait_until(lambda: logged(tmp_path) >= 3, process)
    process.send_signal(sent)
    _, stderr = finish(process, 75)
    step = int(stderr.removeprefix("preempted at step ").split(";")[0])
    assert stderr == f"preempted at step {step}; run again to continue\n"
    assert 3 <= step == logged(tmp_path) < STEPS
    stdout, _ = finish(start_training(tmp_path, *RUN))
    assert f"continues from step {step}" in stdout
    assert_ended_as(whole, tmp_path)


def test_a_signal_before_the_first_step_leaves_nothing_to_save(tmp_path: Path) -> None:
    process = start_training(tmp_path, *RUN)
    assert "parameters" in process.stdout.readline()  # it compiles next
    process.send_signal(signal.SIGTERM)
    assert finish(process, 75)[1] == "preempted at step 0; run again to continue\n"
    assert not logged(tmp_path) and not list((tmp_path / "checkpoints").iterdir())


def test_a_signal_at_the_last_step_lets_the_run_finish(tmp_path: Path) -> None:
    wide = ("--model.width", 128, "--model.mlp-width", 512)
    process = start_training(tmp_path, *RUN, *wide, "--training.steps", 1, "--evaluation.batches", 1000)
    wait_until((tmp_path / "config.json").exists, process)  # what is written before the first step
    time.sleep(0.6)  # past the look at the flag that comes next; the step and its evaluation take longer
    process.send_signal(signal.SIGTERM)
    finish(process, 0)
    assert checkpoint(tmp_path, 1)


def test_a_second_signal_ends_the_process_at_once(whole: Path, tmp_path: Path) -> None:
    process = start_training(tmp_path, *RUN)
    wait_until(lambda: logged(tmp_path) >= 2, process)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: not catches(signal.SIGTERM, process), process)
    process.send_signal(signal.SIGTERM)
    assert finish(process, -signal.SIGTERM)[1] == ""
    finish(start_training(tmp_path, *RUN))
    assert_ended_as(whole, tmp_path)


def catches(signum: signal.Signals, process: subprocess.Popen[str]) -> bool:
    """Whether the process has a handler of its own: the first signal takes it away."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (signum - 1) & 1)


def test_killed_ten_times_it_ends_equal_to_the_bit(whole: Path, tmp_path: Path) -> None:
    """Most kills fall into steps and saves, by the clock of a seed, some into the start."""
    chance = random.Random(0)
    found_writing = 0
    for kill in range(10):
        process = start_training(tmp_path, *RUN, *SAVES_EVERY_STEP)
        if kill % 5 == 4:
            time.sleep(chance.uniform(0.5, 2.5))  # imports, corpus, compilation, restoration
        elif kill % 5 == 3:
            left = set(writing(tmp_path))
            wait_until(lambda left=left: set(writing(tmp_path)) - left, process)
        else:
            next(line for line in process.stdout if line.startswith("step"))
            time.sleep(chance.uniform(0, 0.3))  # most of which it saves
        process.kill()
        finish(process, -signal.SIGKILL)
        found_writing += bool(writing(tmp_path))
    assert found_writing  # at least one died while it saved
    finish(start_training(tmp_path, *RUN))
    assert not writing(tmp_path)
    assert_ended_as(whole, tmp_path)
