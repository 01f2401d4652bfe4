"""Jobs of several processes, through the real command on one machine: they train, save and stop together."""

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import folders
import jax
import numpy as np
import pytest
from commands import ENVIRONMENT, ROOT, TINY, checkpoint, command, logged, metrics, start_python, start_training, tiny
from gates import DEADLINE, Gate, after_step, finish, line_with, start_gated, wait_until
from marks import slow
from ports import free_address

from jaxopt_llm.config import DistributedConfig, ModelConfig
from jaxopt_llm.distributed import process_group
from jaxopt_llm.distributed.launchers import HOLD_VARIABLE

# Two rows of devices that split the batch, and two columns that split the matrices.
MESH = ("--mesh.fsdp", 2, "--mesh.tensor", 2, "--training.accumulation", 2)
STEPS = 10
RUN = (
    *MESH,
    "--training.steps",
    STEPS,
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


def start_job(
    count: int, directory: Path, *overrides: object, gates: Sequence[Gate] = ()
) -> list[subprocess.Popen[str]]:
    """Start processes that find each other through torchrun's variables."""
    address, port = free_address().split(":")
    job = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    start = functools.partial(start_gated, directory, gates) if gates else functools.partial(start_training, directory)
    return [start(*overrides, RANK=str(index), **job) for index in range(count)]


def train_job(count: int, directory: Path, *overrides: object) -> None:
    outputs = [finish(process) for process in start_job(count, directory, *overrides)]
    assert all(stderr == "" for _, stderr in outputs)
    assert all(stdout == "" for stdout, _ in outputs[1:])  # only process 0 prints


def assert_learnt_as(directory: Path, other: Path) -> None:
    for name in ("loss", "grad_norm", "eval_loss"):
        values = [[record[name] for record in metrics(run) if name in record] for run in (directory, other)]
        np.testing.assert_allclose(*values, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("then", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_many_processes_learn_and_stop_as_one(then: int, corpus: tuple[str, Path], tmp_path: Path) -> None:
    """Check that a signal to one of two processes stops both after the same step.

    Another number of processes then continues from their checkpoint, and ends like an undisturbed run of one process.
    """
    run = (*RUN, *corpus, "--evaluation.samples", 2, "--evaluation.sample-tokens", 8)
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    train_job(1, alone, *run)

    gate = after_step(tmp_path / "gate", STEPS - 3)  # the result of a vote comes one step later
    processes = start_job(2, stopped, *run, gates=[gate])
    wait_until(lambda: logged(stopped) >= 3, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    gate.open()
    (_, first), (_, second) = [finish(process, 75) for process in processes]
    step = logged(stopped)
    assert (first, second) == (f"preempted at step {step}; run again to continue\n", "")
    assert 3 <= step < STEPS
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == [str(step)]

    script = subprocess.run(
        [ROOT / "scripts" / "local-processes", str(then), *map(str, (*tiny(stopped), *run))],
        env={**os.environ, **ENVIRONMENT, "PYTHON": sys.executable},
        cwd=tmp_path,  # the script does not leave the folder of its user
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert (script.returncode, script.stderr) == (0, "")
    assert_learnt_as(stopped, alone)
    assert (stopped / "samples.jsonl").read_text() == (alone / "samples.jsonl").read_text()


@pytest.mark.slow
def test_a_stop_of_one_process_before_the_first_step_stops_all(corpus: tuple[str, Path], tmp_path: Path) -> None:
    """Process 0 holds, as in an elastic job, while process 1 waits for its vote."""
    address, port = free_address().split(":")
    job = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": "2"}
    holding = {HOLD_VARIABLE: "1e9"}
    variables = [{"RANK": "0", **job, **holding}, {"RANK": "1", **job}]
    processes = [start_training(tmp_path / "run", *RUN, *corpus, **each) for each in variables]
    line_with("ready; waits", processes[0])
    processes[0].send_signal(signal.SIGTERM)
    (_, first), (_, second) = [finish(process, 75) for process in processes]
    assert (first, second) == ("preempted at step 0; run again to continue\n", "")
    assert not (tmp_path / "run/events.jsonl").exists()  # nothing has begun


def test_many_processes_begin_from_one_folder(corpus: tuple[str, Path], tmp_path: Path) -> None:
    """Check that processes read a pretrained model together: each reads the parts of its own devices."""
    sizes = {name.removeprefix("model.").replace("-", "_"): value for name, value in TINY.items() if "model." in name}
    model = ModelConfig(**sizes | {"pattern": (sizes["pattern"],)})
    path = folders.folder_with_tokenizer(tmp_path / "model", model)
    # The learning rate is so small that nothing changes.
    still = ("--optimizer.learning-rate", 1e-30, "--optimizer.weight-decay", 0, "--training.steps", 1)
    train_job(2, tmp_path / "run", *MESH, *corpus, "--model.pretrained", path, *still)
    jax.tree.map(np.testing.assert_array_equal, checkpoint(tmp_path / "run", 1)["masters"], folders.params(model))


# Program of a process that waits until its gate opens. It then ends with an error, or its clock passes four timeouts
# within seconds and stops.
WAITS = """
import ctypes, errno, fcntl, itertools, os, sys, time, types
from jaxopt_llm.core import errors
from jaxopt_llm.distributed import process_group, rendezvous
from jaxopt_llm.config import DistributedConfig
from jaxopt_llm.distributed.launchers import Job

address, index, gate, *failing = sys.argv[1:]
config, make_client = DistributedConfig(), process_group._jax.get_distributed_runtime_client

def slower(*arguments, heartbeat_timeout, **options):
    assert heartbeat_timeout > config.timeout_seconds, "JAX would abort before the watch reports the reason"
    return make_client(*arguments, heartbeat_timeout=heartbeat_timeout, **options)

def main():
    process_group._jax.get_distributed_runtime_client = slower
    with process_group.join_job(Job(address, 2, int(index)), config, {}) as processes:
        processes.note_checkpoint(0)
        sys.stderr.write("joined\\n")
        sys.stderr.flush()
        with open(gate) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
        if failing and failing[0] == "abort":
            ctypes.CDLL(None).abort()  # without the GIL, as native code does
        if failing:
            kind, notice = failing
            rendezvous.EXIT_SECONDS = 100
            if notice:
                process_group._DEATH_NOTICE_SECONDS = float(notice)
            else:
                process_group.time = types.SimpleNamespace(sleep=lambda seconds: os._exit(99))
            sys.stderr.write("fails\\n")
            sys.stderr.flush()
            failures = {
                "input": errors.InputError, "checkpoint": errors.CheckpointError, "diverged": errors.TrainingDiverged,
                "corrupted": errors.StateCorrupted, "disk": lambda text: OSError(errno.EIO, text), "bug": RuntimeError,
            }
            raise failures[kind]("no batch")
        now, looks = time.monotonic(), itertools.count()
        look = lambda: now + config.timeout_seconds * min(next(looks) / 3, 4)
        rendezvous.time = types.SimpleNamespace(monotonic=look, sleep=time.sleep)
        time.sleep(1000)

errors.run_command(main)
"""


def start_waiting(
    folder: Path, failing: int | None = None, kind: str = "input", notice: object = ""
) -> tuple[list[subprocess.Popen[str]], list[Gate]]:
    """Start two processes that join a job, and return them with the gates at which they wait.

    failing: the process that then ends with an error. kind: "abort", or a key of `failures`. notice: seconds that the
        process waits for the news of a death; by default it must not wait.
    """
    address, gates = free_address(), [Gate(folder / str(index), "") for index in range(2)]
    processes = [
        start_python("-c", WAITS, address, index, folder / str(index), *[kind, notice] * (index == failing))
        for index in range(2)
    ]
    for process in processes:
        line_with("joined", process, "stderr")
    return processes, gates


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("to", [0, 1])
def test_the_loss_of_one_ends_the_others(sent: signal.Signals, to: int, tmp_path: Path) -> None:
    processes, gates = start_waiting(tmp_path)
    service = service_of(processes[0])
    assert listens_on(service) == {"0100007F"}  # 127.0.0.1, and no other interface
    assert_ends_the_other(processes, sent, to, gates[1 - to] if sent == signal.SIGSTOP else None)
    # JAX would abort the others without its service, so it outlives process 0 for a while.
    assert "jax_service" in Path(f"/proc/{service}/cmdline").read_text()


def service_of(process: subprocess.Popen[str]) -> int:
    """Return the id of the child process with JAX's coordination service."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def listens_on(pid: int) -> set[str]:
    """Return the IPv4 addresses that a process listens on, in the kernel's hexadecimal notation."""
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return {each[1].split(":")[0][-8:] for each in sockets if each[3] == "0A" and f"socket:[{each[9]}]" in links}


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_ends_all_with_its_line(failing: int, tmp_path: Path) -> None:
    processes, gates = start_waiting(tmp_path, failing)
    gates[failing].open()
    for index, process in enumerate(processes):
        whose = "" if index == failing else f"process {failing}: "
        assert f"error: {whose}no batch" in finish(process, 2)[1].splitlines()


@pytest.mark.parametrize(
    ("kind", "code", "line"), [("bug", 1, "RuntimeError: no batch"), ("disk", 74, "error: no batch")]
)
def test_an_error_that_a_restart_may_repair_ends_the_others_with_5(
    kind: str, code: int, line: str, tmp_path: Path
) -> None:
    processes, gates = start_waiting(tmp_path, 0, kind, notice=0)
    gates[0].open()
    assert line in finish(processes[0], code)[1].splitlines()
    (other,) = (each for each in finish(processes[1], 5)[1].splitlines() if each.startswith("error: "))
    assert other.startswith("error: process 0: ") and "no batch" in other


@pytest.mark.parametrize(("kind", "code"), [("checkpoint", 4), ("diverged", 3), *slow(("corrupted", 9))])
def test_an_error_that_others_may_cause_ends_all_with_its_code(kind: str, code: int, tmp_path: Path) -> None:
    processes, gates = start_waiting(tmp_path, 0, kind, notice=0.5)
    gates[0].open()
    for index, process in enumerate(processes):
        whose = "process 0: " if index else ""
        assert f"error: {whose}no batch" in finish(process, code)[1].splitlines()


@pytest.mark.parametrize("kind", ["checkpoint", "diverged", "bug", *slow("corrupted", "disk")])
def test_the_news_of_a_death_comes_before_an_error_that_it_has_caused(kind: str, tmp_path: Path) -> None:
    processes, gates = start_waiting(tmp_path, 0, kind, notice=process_group._DEATH_NOTICE_SECONDS)
    gates[0].open()
    line_with("fails", processes[0], "stderr")
    time.sleep(0.5)  # the process would by now have decided to end with the code of its own error
    assert_ends_the_other(processes, signal.SIGKILL, 1)


def test_the_news_of_a_death_comes_before_an_abort(tmp_path: Path) -> None:
    """Let native code of process 0 abort, as Gloo's does, just before process 1 dies."""
    processes, gates = start_waiting(tmp_path, 0, "abort")
    gates[0].open()
    assert_ends_the_other(processes, signal.SIGKILL, 1)


def assert_ends_the_other(
    processes: list[subprocess.Popen[str]],
    sent: signal.Signals,
    to: int,
    gate: Gate | None = None,
    remedy: str = "there is no checkpoint yet: run again to start at step 0",
) -> None:
    """Send a signal to one process, and check that the other one ends.

    gate: opened after the signal; the clock of the other process then runs fast.
    remedy: what the other process says about the last checkpoint.
    """
    lost, left = processes[to], processes[1 - to]
    lost.send_signal(sent)
    if gate is not None:
        gate.open()
    try:
        _, stderr = left.communicate(timeout=DEADLINE)
    finally:
        lost.kill()
        left.kill()
    how = "has died" if sent == signal.SIGKILL else f"has not answered for {DistributedConfig().timeout_seconds} s"
    assert f"error: process {to} of 2 {how}; {remedy}" in stderr.splitlines()
    assert left.returncode == 5


@pytest.mark.slow
def test_a_save_that_fails_in_one_process_is_abandoned_and_tried_again(
    corpus: tuple[str, Path], tmp_path: Path
) -> None:
    """Check this, and that the later death of one process in the middle of a step ends the other."""

    def saved() -> set[str]:
        return {path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()}

    run = (*RUN, *corpus, "--training.steps", 100000, "--checkpoint.every", 5)
    processes = start_job(2, tmp_path, *run)
    limits = resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE)
    wait_until(lambda: logged(tmp_path) >= 2, processes[0])
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (100, limits[1]))
    assert "its partial files are deleted" in line_with("could not be saved", processes[0])
    before = saved()
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, limits)
    wait_until(lambda: saved() - before, processes[0])
    assert_ends_the_other(processes, signal.SIGKILL, 1, remedy="run again to continue from the last checkpoint")
    assert command("checkpoint", "verify", tmp_path).returncode == 0


def test_a_directory_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    job = ("--distributed.coordinator", free_address(), "--distributed.processes", 2, "--mesh.fsdp", 2)
    processes = []
    for index in range(2):
        (tmp_path / str(index)).mkdir()
        overrides = (*job, "--distributed.process-id", index, "--run.directory", "run")
        processes.append(start_training(tmp_path, *overrides, folder=tmp_path / str(index)))
    for process in processes:
        assert "run.directory=run is not shared: process 1 does not see" in finish(process, 2)[1]


def test_processes_with_other_settings_are_refused(tmp_path: Path) -> None:
    job = ("--distributed.coordinator", free_address(), "--distributed.processes", 2, "--mesh.fsdp", 2)
    settings = [("--distributed.process-id", index, "--training.steps", 10 + index) for index in range(2)]
    for process in [start_training(tmp_path / "run", *job, *each) for each in settings]:
        _, stderr = finish(process, 2)
        assert stderr.endswith("must be equal: training.steps is 11 on process 1 and 10 on process 0\n")
    assert not list(tmp_path.iterdir())
