"""Several processes, through the real command on one machine: they learn, save and stop as one."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import folders
import jax
import numpy as np
import pytest
from commands import ENVIRONMENT, ROOT, TINY, checkpoint, command, metrics, start_python, start_training, tiny
from test_death import finish, logged, wait_until

from jaxopt_llm.model.config import ModelConfig

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
    and ends as the run of one process that nothing disturbed."""
    run = (*RUN, *corpus)
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    train_job(1, alone, *run)

    processes = start_job(2, stopped, *run)
    wait_until(lambda: logged(stopped) >= 3, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    (_, first), (_, second) = [finish(process, 75) for process in processes]
    step = logged(stopped)
    assert (first, second) == (f"preempted at step {step}; run again to continue\n", "")
    assert 3 <= step < 20
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == [str(step)]

    for directory in (tmp_path / "four", tmp_path / "one"):
        shutil.copytree(stopped, directory)
    script = subprocess.run(
        [ROOT / "scripts" / "local-processes", "4", *map(str, (*tiny(tmp_path / "four"), *run))],
        env={**os.environ, **ENVIRONMENT, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (script.returncode, script.stderr) == (0, "")
    train_job(1, tmp_path / "one", *run)
    train_job(2, stopped, *run)
    for directory in (tmp_path / "four", tmp_path / "one", stopped):
        assert_learnt_as(directory, alone)


def test_many_processes_begin_from_one_folder(corpus: tuple[str, Path], tmp_path: Path) -> None:
    """Each reads what its own devices hold."""
    sizes = {name.removeprefix("model.").replace("-", "_"): value for name, value in TINY.items() if "model." in name}
    model = ModelConfig(**sizes | {"pattern": (sizes["pattern"],)})
    path = folders.folder(tmp_path / "model", model)
    # So slow that nothing changes.
    still = ("--optimizer.learning-rate", 1e-30, "--optimizer.weight-decay", 0, "--training.steps", 1)
    train_job(2, tmp_path / "run", *MESH, *corpus, "--model.pretrained", path, *still)
    jax.tree.map(np.testing.assert_array_equal, checkpoint(tmp_path / "run", 1)["masters"], folders.params(model))


WAITS = """
import sys, time
from jaxopt_llm import errors
from jaxopt_llm.parallel import distributed
from jaxopt_llm.parallel.launchers import DistributedConfig, Job

def main():
    with distributed.joined(Job(sys.argv[1], 2, int(sys.argv[2])), DistributedConfig(timeout_seconds=8), {}):
        sys.stderr.write("joined\\n")
        if sys.argv[3:]:
            raise errors.InputError("no batch")
        time.sleep(1000)

errors.run(main)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("to", [0, 1])
def test_the_loss_of_one_ends_the_others(sent: signal.Signals, to: int) -> None:
    address = free_address()
    processes = [start_python("-c", WAITS, address, index) for index in range(2)]
    for process in processes:
        assert process.stderr.readline() == "joined\n"
    assert listens_on(processes[0].pid) == {"0100007F"}  # 127.0.0.1, and no other interface
    assert_ends_the_other(processes, sent, to, timeout=8)


def listens_on(pid: int) -> set[str]:
    """The IPv4 addresses, in the kernel's hexadecimal."""
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return {each[1].split(":")[0][-8:] for each in sockets if each[3] == "0A" and f"socket:[{each[9]}]" in links}


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_ends_all_with_its_line(failing: int) -> None:
    address = free_address()
    processes = [start_python("-c", WAITS, address, index, *["fail"] * (index == failing)) for index in range(2)]
    for index, process in enumerate(processes):
        whose = "" if index == failing else f"process {failing}: "
        assert f"error: {whose}no batch" in finish(process, 2)[1].splitlines()


def assert_ends_the_other(processes: list[subprocess.Popen[str]], sent: signal.Signals, to: int, timeout: int) -> None:
    lost, left = processes[to], processes[1 - to]
    lost.send_signal(sent)
    try:
        _, stderr = left.communicate(timeout=60)
    finally:
        lost.kill()
        left.kill()
    if (sent, to) == (signal.SIGKILL, 0):
        # JAX's own coordinator has died with it, and JAX may abort while the watch says so.
        assert left.returncode in (5, -signal.SIGABRT)
        return
    how = "has died" if sent == signal.SIGKILL else f"has not answered for {timeout} s"
    told = f"error: process {to} of 2 {how}; run again to continue from the last checkpoint"
    assert told in stderr.splitlines()
    assert left.returncode == 5


def test_a_save_that_fails_on_one_is_given_up_by_all_and_tried_again(corpus: tuple[str, Path], tmp_path: Path) -> None:
    """And the death of one in the middle of a step ends the other."""
    run = (*RUN, *corpus, "--training.steps", 100000, "--checkpoint.every", 20)
    processes = start_job(2, tmp_path, *run, timeout=30)
    limits = resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE)
    wait_until(lambda: logged(tmp_path) >= 2, processes[0])
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (100, limits[1]))
    told = next(line for line in processes[0].stdout if "could not be saved" in line)
    assert "what it wrote is freed" in told
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, limits)
    wait_until(lambda: any(path.name.isdigit() for path in (tmp_path / "checkpoints").iterdir()), processes[0])
    assert_ends_the_other(processes, signal.SIGKILL, 1, timeout=30)
    assert command("checkpoint", "verify", tmp_path).returncode == 0


def test_a_directory_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    job = ("--distributed.coordinator", free_address(), "--distributed.processes", 2, "--mesh.fsdp", 2)
    processes = []
    for index in range(2):
        (tmp_path / str(index)).mkdir()
        overrides = (*job, "--distributed.process-id", index, "--run.directory", "run")
        processes.append(start_training(tmp_path, *overrides, folder=tmp_path / str(index)))
    for process in processes:
        assert "run.directory run is not shared: process 1 does not see" in finish(process, 2)[1]


def test_processes_with_other_settings_are_refused(tmp_path: Path) -> None:
    job = ("--distributed.coordinator", free_address(), "--distributed.processes", 2, "--mesh.fsdp", 2)
    settings = [("--distributed.process-id", index, "--training.steps", 10 + index) for index in range(2)]
    for process in [start_training(tmp_path / "run", *job, *each) for each in settings]:
        _, stderr = finish(process, 2)
        assert stderr.endswith("must be equal: training.steps is 11 on process 1 and 10 on process 0\n")
    assert not list(tmp_path.iterdir())
