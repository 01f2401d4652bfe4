"""Several processes, through the real command on one machine: they learn, save and stop as one."""

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import checkpoint, metrics, start_training
from test_death import finish, logged, wait_until

# Two rows of devices that split the batch, and two columns that split the matrices.
RUN = ("--mesh.fsdp", 2, "--mesh.tensor", 2, "--training.accumulation", 2, "--evaluation.every", 5)


def start_job(count: int, directory: Path, *overrides: object, **environment: str) -> list[subprocess.Popen[str]]:
    """Processes that find each other by torchrun's variables."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), **environment}
    timeout = ("--distributed.timeout-seconds", 30)
    return [start_training(directory, *timeout, *overrides, RANK=str(index), **job) for index in range(count)]


def train_job(count: int, directory: Path, *overrides: object) -> None:
    processes = start_job(count, directory, *RUN, *overrides)
    said = [finish(process) for process in processes]
    assert all(stderr == "" for _, stderr in said)
    assert all(stdout == "" for stdout, _ in said[1:])


def assert_learnt_as(directory: Path, other: Path) -> None:
    for name in ("loss", "grad_norm", "eval_loss"):
        values = [[record[name] for record in metrics(run) if name in record] for run in (directory, other)]
        np.testing.assert_allclose(*values, rtol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    directory = tmp_path_factory.mktemp("runs") / "alone"
    finish(start_training(directory, *RUN, "--training.steps", 20))
    return directory


def test_a_signal_to_one_stops_all_after_the_same_step(alone: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train_job(2, whole, "--training.steps", 20)
    assert_learnt_as(whole, alone)

    processes = start_job(2, stopped, *RUN, "--training.steps", 20)
    wait_until(lambda: logged(stopped) >= 3, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    (_, first), (_, second) = [finish(process, 75) for process in processes]
    step = logged(stopped)
    assert (first, second) == (f"preempted at step {step}; run again to continue\n", "")
    assert 3 <= step < 20
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == [str(step)]

    for count in (4, 1):
        shutil.copytree(stopped, tmp_path / str(count))
        train_job(count, tmp_path / str(count), "--training.steps", 20)
        assert_learnt_as(tmp_path / str(count), alone)
    train_job(2, stopped, "--training.steps", 20)
    assert metrics(stopped) == metrics(whole)
    jax.tree.map(np.testing.assert_array_equal, checkpoint(stopped, 20), checkpoint(whole, 20))
