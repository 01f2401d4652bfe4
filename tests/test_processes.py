"""Several processes, through the real command on one machine: they learn, save and stop as one."""

import json
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
MESH = ("--mesh.fsdp", 2, "--mesh.tensor", 2, "--training.accumulation", 2)
RUN = (
    *MESH,
    "--training.steps",
    20,
    "--evaluation.every",
    5,
    "--evaluation.batches",
    2,
    "--logging.tensorboard",
    False,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{number} " * 40}) for number in range(200)))
    return "--data.paths", path


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def start_job(
    count: int, directory: Path, *overrides: object, timeout: int = 60, **environment: str
) -> list[subprocess.Popen[str]]:
    """Processes that find each other by torchrun's variables."""
    address, port = free_address().split(":")
    job = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(count), **environment}
    settings = ("--distributed.timeout-seconds", timeout, *overrides)
    return [start_training(directory, *settings, RANK=str(index), **job) for index in range(count)]


def train_job(count: int, directory: Path, *overrides: object) -> None:
    said = [finish(process) for process in start_job(count, directory, *overrides)]
    assert all(stderr == "" for _, stderr in said)
    assert all(stdout == "" for stdout, _ in said[1:])  # only the first prints


def assert_learnt_as(directory: Path, other: Path) -> None:
    for name in ("loss", "grad_norm", "eval_loss"):
        values = [[record[name] for record in metrics(run) if name in record] for run in (directory, other)]
        np.testing.assert_allclose(*values, rtol=1e-6, err_msg=name)


def test_many_processes_learn_and_stop_as_one(corpus: tuple[str, Path], tmp_path: Path) -> None:
    """A signal to one of two stops both after the same step. What they saved is continued by four, by one and by two,
    and ends as the run of one process that nothing disturbed, and to the bit as that of two."""
    run = (*RUN, *corpus)
    alone, whole, stopped = (tmp_path / name for name in ("alone", "whole", "stopped"))
    train_job(1, alone, *run)
    train_job(2, whole, *run)
    assert_learnt_as(whole, alone)

    processes = start_job(2, stopped, *run)
    wait_until(lambda: logged(stopped) >= 3, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    (_, first), (_, second) = [finish(process, 75) for process in processes]
    step = logged(stopped)
    assert (first, second) == (f"preempted at step {step}; run again to continue\n", "")
    assert 3 <= step < 20
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == [str(step)]

    for count in (4, 1):
        shutil.copytree(stopped, tmp_path / str(count))
        train_job(count, tmp_path / str(count), *run)
        assert_learnt_as(tmp_path / str(count), alone)
    train_job(2, stopped, *run)
    assert metrics(stopped) == metrics(whole)
    jax.tree.map(np.testing.assert_array_equal, checkpoint(stopped, 20), checkpoint(whole, 20))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("to", [0, 1])
def test_the_loss_of_one_ends_the_others(
    sent: signal.Signals, to: int, corpus: tuple[str, Path], tmp_path: Path
) -> None:
    processes = start_job(2, tmp_path, *RUN, *corpus, "--training.steps", 100000, timeout=5)
    lost, left = processes[to], processes[1 - to]
    wait_until(lambda: logged(tmp_path) >= 2, lost)
    lost.send_signal(sent)
    try:
        _, stderr = left.communicate(timeout=60)
    finally:
        lost.kill(), left.kill()
    if (sent, to) == (signal.SIGKILL, 0):
        # XLA's own coordinator has died with it, and XLA may abort before the watch says so.
        assert left.returncode in (5, -signal.SIGABRT)
        return
    how = "has died" if sent == signal.SIGKILL else "has not answered for 5 s"
    assert stderr == f"error: process {to} of 2 {how}; run again to continue from the last checkpoint\n"
    assert left.returncode == 5


def test_processes_with_other_settings_are_refused(tmp_path: Path) -> None:
    job = ("--distributed.coordinator", free_address(), "--distributed.processes", 2, "--mesh.fsdp", 2)
    settings = [("--distributed.process-id", index, "--training.steps", 10 + index) for index in range(2)]
    for process in [start_training(tmp_path / "run", *job, *each) for each in settings]:
        _, stderr = finish(process, 2)
        assert stderr.endswith("must be equal: training.steps is 11 on process 1 and 10 on process 0\n")
    assert not list(tmp_path.iterdir())
