"""Faults injected into a job under supervisors: it ends by itself, equal to the bit to a run without faults."""

import contextlib
import errno
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import chaos
import chaos_elastic
import chaos_faults
import chaos_peers
import chaos_ports
import pytest
from chaos_disk import Disk
from chaos_job import ChaosJob, Watcher
from commands import ROOT, start, start_python, start_training, tiny
from gates import finish


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
    assert all(chaos_faults.KINDS[burst[0].kind].may_be_followed for burst in bursts if len(burst) > 1)
    assert all(len(burst) == 1 for burst in chaos.plan_bursts(kinds, 50, 4, chance, probability=0.0))


def watch(folder: Path, *checkpoints: str) -> Watcher:
    """Return a watcher of a job that does not run."""
    for name in checkpoints:
        (folder / "run" / "checkpoints" / name).mkdir(parents=True)
    job = ChaosJob(folder / "run", 0, {}, None)
    return Watcher(job)


@pytest.mark.parametrize(
    ("checkpoints", "resumed_from", "spare"),
    [
        (("10",), 0, False),
        (("10", "20"), 0, True),
        (("10", "20"), 10, True),
        (("10", "20"), 20, False),
        (("10", "20.damaged.1"), 0, False),
    ],
)
def test_the_only_whole_checkpoint_is_never_damaged(
    checkpoints: tuple[str, ...], resumed_from: int, spare: bool, tmp_path: Path
) -> None:
    watcher = watch(tmp_path, *checkpoints)
    watcher._resumed_from = resumed_from
    expected = contextlib.nullcontext() if spare else pytest.raises(SystemExit, match="did not save another checkpoint")
    with expected:
        watcher.wait_for_spare_checkpoint(seconds=0)


def test_steps_that_are_lost_are_those_since_the_last_whole_checkpoint(tmp_path: Path) -> None:
    watcher = watch(tmp_path, "10", "20", "30", "40.orbax-checkpoint-tmp")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 35}\n')
    watcher.begin(restarts=True, in_burst=False)
    assert [watcher.count_unsaved(damaged) for damaged in range(4)] == [5, 15, 25, 35]
    kept, lost = {"repeated": 5, "allowed": 5}, {"repeated": 6, "allowed": 5}
    assert chaos.list_losses([kept, lost]) == [lost]
    told = {"equal": True, "hangs": 0, "uncoded": 0}
    assert chaos.is_good(told | {"faults": [kept]}) and not chaos.is_good(told | {"faults": [kept, lost]})


MOUNTS = pytest.mark.skipif(not Disk.is_possible(), reason="mounts need Linux and root")


@MOUNTS
def test_a_disk_is_full_then_read_only_then_whole(tmp_path: Path) -> None:
    folder, mounts = tmp_path / "run", Path("/proc/self/mounts")
    with Disk(folder) as disk:
        file = folder / "file"
        file.write_bytes(bytes(10000))
        for spoil, number in ((disk.fill, errno.ENOSPC), (disk.make_read_only, errno.EROFS)):
            spoil()
            with pytest.raises(OSError) as failed:
                (folder / "new").write_bytes(bytes(10000))
            assert failed.value.errno == number
            assert file.read_bytes() == bytes(10000)
            disk.heal()
        (folder / "new").write_bytes(b"whole")
        disk.make_read_only()  # the end of the context comes in the middle of a fault
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert {path.name for path in folder.iterdir()} == {"file", "new"}
    assert str(tmp_path) not in mounts.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="the ports of another process are listed by Linux only")
def test_garbage_goes_to_the_ports_of_a_process_and_its_children() -> None:
    listens = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {listens + '; sys.stdin.read()'!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        port = int(process.stdout.readline())
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert chaos_ports.find_ports(process.pid) == {port}
            assert {port, server.getsockname()[1]} <= chaos_ports.find_ports(os.getpid())
    finally:
        process.stdin.close()  # the end of its input ends the child, and with it the parent
        process.wait(60)


def test_an_elastic_job_must_change_its_hosts_and_agree() -> None:
    def make(kind: str, away: list[int], hosts: list[int]) -> dict[str, object]:
        return {"kind": kind, "away": away, "hosts": hosts}

    assert chaos_elastic.has_changed(make("host away", [1], [2, 3]), 3)
    assert not chaos_elastic.has_changed(make("host away", [1], []), 3)
    assert not chaos_elastic.has_changed(make("host away", [1], [2]), 3)
    assert chaos_elastic.has_changed(make("back while the smaller mesh starts", [1], []), 3)
    assert chaos_elastic.has_changed(make("two hosts away", [1, 2], [1, 2, 3]), 3)
    told = {"processes": 3, "exit_code": 75, "hangs": 0, "uncoded": 0, "tracebacks": 0}
    told |= {"differences": dict(chaos_elastic.LARGEST_DIFFERENCE), "faults": [make("host away", [1], [2, 3])]}
    assert chaos_elastic.is_good(told)
    assert not chaos_elastic.is_good(told | {"differences": told["differences"] | {"loss": 1e-3}})
    assert not chaos_elastic.is_good(told | {"faults": [make("host away", [1], [1, 3])]})
    assert not chaos_elastic.is_good(told | {"tracebacks": 1})


# The command train, which leaves out the batch of the first step after it has continued.
SKIPS = """
import sys
from jaxopt_llm import train
from jaxopt_llm.core import errors
from jaxopt_llm.run.divergence import SkippedBatches
batch_after = SkippedBatches.batch_after
SkippedBatches.batch_after = lambda self, step: batch_after(self, step) + (step > 0)
errors.run_command(train.main)
"""


@pytest.mark.slow
def test_a_batch_that_is_left_out_fails_the_check_of_an_elastic_job(tmp_path: Path) -> None:
    """The mesh of the part after the continuation alone does not."""
    run = ("--training.batch_size=4", "--precision.compute_dtype=float32", "--schedule.kind=constant")
    run += ("--logging.tensorboard=False", "--training.steps=60", "--checkpoint.every=30")
    whole = tmp_path / "whole"
    finish(start_training(whole, *run))
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    for name in ("moved", "skipped"):
        directory = shutil.copytree(whole, tmp_path / name)
        shutil.rmtree(directory / "checkpoints/60")  # it continues from step 30
        words = [*tiny(directory), *run, "--mesh.fsdp=2"]
        finish(start("train", *words, **two) if name == "moved" else start_python("-c", SKIPS, *words, **two))
    moved, skipped = (chaos_elastic.compare(tmp_path / name, whole, 60) for name in ("moved", "skipped"))
    largest = chaos_elastic.LARGEST_DIFFERENCE
    assert all(moved[name] < largest[name] / 10 for name in largest), moved
    assert all(skipped[name] > 10 * largest[name] for name in largest), skipped


@pytest.mark.slow
def test_a_job_shrinks_and_grows(tmp_path: Path) -> None:
    told = inject(tmp_path, "--only", "elastic", "--processes", 3, "--faults", 1)
    (fault,) = told["faults"]  # type: ignore[misc]
    assert fault["hosts"] == [2, 3]


@pytest.mark.slow
@MOUNTS
def test_disks_that_fail_and_garbage_on_all_ports(tmp_path: Path) -> None:
    kinds = [name for name, fault in chaos_faults.KINDS.items() if fault.needs_disk]
    told = inject(tmp_path, "--processes", 2, "--faults", 5, "--bursts", 0, "--only", *kinds, "garbage on all ports")
    assert [fault["kind"] for fault in told["faults"]] == [*kinds, "garbage on all ports"]  # type: ignore[index]


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
    faults = 2 * len(chaos_faults.KINDS)
    told = inject(tmp_path, "--processes", 2, "--hours", 1 / 6, "--faults", faults)
    assert chaos.is_good(told)
    assert len(told["faults"]) == faults or told["seconds"] >= 600
