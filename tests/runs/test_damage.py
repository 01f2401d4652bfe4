"""Damaged checkpoints and disks without room, through the real commands."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from chaos_disk import Disk
from commands import checkpoint, command, metrics, train
from damages import DAMAGES, flip, largest
from gates import DEADLINE, after_step, line_with, start_gated, wait_until
from marks import slow

EVERY_TWO = ("--evaluation.every", 2, "--checkpoint.every", 2, "--checkpoint.keep", 3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps that nothing disturbs."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    done = train(directory, *EVERY_TWO, "--training.steps", 8)
    assert (done.returncode, done.stderr) == (0, "")
    return directory


@pytest.mark.slow
def test_from_the_checkpoint_before_a_damaged_one_the_run_ends_equal_to_the_bit(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    file = largest(run / "checkpoints" / "8")
    name, _ = file.name, flip(file)
    written = command("generate", "--checkpoint", run, "--prompt", "def ", "--tokens", 3)
    assert written.returncode == 0 and written.stdout.startswith("def ")
    assert name in written.stderr and "/6 is intact" in written.stderr and written.stderr.count("\n") == 2
    resumed = train(run, *EVERY_TWO, "--training.steps", 8)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert name in resumed.stdout and "8.damaged.1" in resumed.stdout and "continues from step 6" in resumed.stdout
    assert metrics(run) == metrics(whole)
    jax.tree.map(np.testing.assert_array_equal, checkpoint(run, 8), checkpoint(whole, 8))


@pytest.mark.slow
def test_of_many_damaged_checkpoints_each_is_named_and_the_last_whole_one_is_used(tmp_path: Path) -> None:
    """Whatever the damage: step 2 alone is whole."""
    steps = 2 + len(DAMAGES)
    every = ("--checkpoint.every", 1, "--checkpoint.keep", steps, "--training.steps", steps)
    run = tmp_path / "run"
    assert train(run, *every).returncode == 0
    logged, last = metrics(run), checkpoint(run, steps)
    found = {step: damage(run / "checkpoints" / str(step)) for step, damage in enumerate(DAMAGES.values(), start=3)}
    resumed = train(run, *every)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    for step, what in found.items():
        (line,) = [line for line in resumed.stdout.splitlines() if f"/{step} is damaged" in line]
        assert what in line and os.path.lexists(run / "checkpoints" / f"{step}.damaged.1")
    assert "continues from step 2" in resumed.stdout
    assert metrics(run) == logged
    jax.tree.map(np.testing.assert_array_equal, checkpoint(run, steps), last)


def test_verify_and_list_and_a_run_without_a_whole_checkpoint(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    verified = command("checkpoint", "verify", run)
    assert verified.returncode == 0
    assert verified.stdout.splitlines()[:3] == ["4: intact", "6: intact", "8: intact"]
    listed = command("checkpoint", "list", run).stdout.splitlines()[1:]
    losses = {record["step"]: record["eval_loss"] for record in metrics(run) if "eval_loss" in record}
    for line, step in zip(listed, (4, 6, 8), strict=True):
        assert line.split()[0] == str(step) and f"{losses[step]:.4f}" in line and line.endswith("newest")

    files = [largest(run / "checkpoints" / step) for step in ("4", "6", "8")]
    names = [file.name for file in files if flip(file)]
    verified = command("checkpoint", "verify", run)
    assert verified.returncode == 4
    assert all(name in line for name, line in zip(names, verified.stdout.splitlines(), strict=True))
    assert verified.stderr.startswith("error: ") and "4, 6, 8" in verified.stderr
    before = (run / "metrics.jsonl").read_text()
    for _ in range(2):
        refused = train(run, *EVERY_TWO, "--training.steps", 10)
        assert refused.returncode == 4
        assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
        assert "no intact checkpoint" in refused.stderr
    assert (run / "metrics.jsonl").read_text() == before
    assert command("checkpoint", "list", run).stdout.count("set aside") == 3


@pytest.mark.parametrize("arguments", [(), ("mend", "."), ("verify", "/nowhere")])
def test_bad_arguments(arguments: tuple[str, ...]) -> None:
    refused = command("checkpoint", *arguments)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1


@pytest.mark.parametrize("room_again", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_full_disk_costs_the_saves_that_it_lasts(room_again: bool, tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    run = tmp_path / "run"
    full, room = after_step(tmp_path / "full", 7), after_step(tmp_path / "room", 11)
    process = start_gated(run, [full, room], *EVERY_TWO, "--training.steps", 14)
    try:
        wait_until(full.reached, process)
        wait_until((run / "checkpoints/6").exists, process)  # saves go on in the background
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        full.open()
        failed = line_with("could not be saved", process)
        whole_then = [path.name for path in (run / "checkpoints").iterdir() if path.name.isdecimal()]
        if room_again:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        room.open()
        _, stderr = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert "its partial files are deleted" in failed
    logged = [record["step"] for record in metrics(run)]
    assert logged == list(range(1, len(logged) + 1))  # whole lines: what has no room waits
    left = {path.name for path in (run / "checkpoints").iterdir()}
    if room_again:
        assert (process.returncode, stderr) == (0, "")
        assert logged[-1] == 14
        assert "14" in left and len(left) == 3
    else:
        assert process.returncode == 74
        assert f"the last checkpoint is step {max(whole_then, key=int)}" in stderr and stderr.count("\n") == 1
        assert left == set(whole_then)


@pytest.mark.skipif(not Disk.is_possible(), reason="mounts need Linux and root")
@pytest.mark.parametrize(("spoil", "what"), [(Disk.make_read_only, "Read-only"), *slow((Disk.fill, "No space left"))])
def test_a_disk_that_stays_bad_ends_the_run_with_one_line(
    spoil: Callable[[Disk], None], what: str, tmp_path: Path
) -> None:
    """Check also the next start on it, and that the run continues when the disk is good again."""
    run = tmp_path / "run"
    gate = after_step(tmp_path / "gate", 3)
    settings = (*EVERY_TWO, "--training.steps", 5, "--logging.tensorboard", False)
    with Disk(run) as disk:
        process = start_gated(run, [gate], *settings)
        try:
            wait_until(gate.reached, process)
            wait_until((run / "checkpoints/2").exists, process)
            spoil(disk)
            gate.open()
            _, stderr = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
        assert (process.returncode, stderr.count("\n")) == (74, 1), stderr
        assert stderr.startswith("error: step 5 could not be saved") and what in stderr
        assert f"{run}/checkpoints" in stderr and "the last checkpoint is step 2" in stderr
        refused = train(run, *settings)
        assert (refused.returncode, refused.stderr.count("\n")) == (74, 1), refused.stderr
        assert refused.stderr.startswith("error: ") and str(run) in refused.stderr and what in refused.stderr
    resumed = train(run, *settings)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert [record["step"] for record in metrics(run)] == [*range(1, 6)]


@pytest.mark.slow
def test_a_run_directory_that_is_deleted_ends_the_run_with_one_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    gate = after_step(tmp_path / "gate", 7)
    process = start_gated(run, [gate], *EVERY_TWO, "--training.steps", 10)
    try:
        wait_until(gate.reached, process)
        while run.exists():  # a save is still writing there
            shutil.rmtree(run, ignore_errors=True)
        gate.open()
        _, stderr = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == 4, stderr
    *others, last = stderr.splitlines()
    assert last.startswith("error: step 10 could not be saved") and str(run) in last
    assert all("OCDBT" in line for line in others)  # Orbax misses the files of the save that was going on
    # A write that was going on may have made the directories again.
    assert not any(path.name.isdigit() for path in run.glob("checkpoints/*"))
