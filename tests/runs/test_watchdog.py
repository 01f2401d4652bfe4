"""Jobs that make no progress: they end with exit code 5, and name the process that the others wait for."""

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest
from commands import logged, some_text, start_python
from gates import Gate, finish, start_gated
from ports import free_address

from jaxopt_llm.run.directory import check_directory_is_free

LIMIT = 2  # seconds
DEADLINE = 60  # seconds after which a process ends in good order although it hangs

# Program of a process that runs phases as a run does, and exchanges messages in place of collectives. Its arguments:
# address, number of processes, index, run directory, and how process 1 hangs.
PHASES = f"""
import os, sys, threading, time
import jax
from jaxopt_llm.config import Config, DistributedConfig, RunConfig, WatchdogConfig
from jaxopt_llm.core import errors
from jaxopt_llm.data.tokens import pieces
from jaxopt_llm.data.reading.source import Document
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer
from jaxopt_llm.distributed import process_group
from jaxopt_llm.distributed.launchers import Job
from jaxopt_llm.distributed.watchdog import Watchdog

address, count, index, directory, hangs = sys.argv[1:]
config = Config(
    run=RunConfig(directory=directory),
    watchdog=WatchdogConfig(
        floor_seconds={LIMIT}, long_floor_seconds={LIMIT},
        factor=0 if hangs == "nothing, unwatched" else 1,
    ),
)

def stick(where):
    if hangs == where and index == "1":
        time.sleep(1000)

def read_slowly():
    for number in range({4 * LIMIT}):
        time.sleep(0.5)  # twice the limit in all
        yield Document("", bytes(pieces._BATCH_BYTES), b"")

def save(processes):
    processes.saving.enter("save", 3)
    stick("save")
    processes.channel("saved", processes.saving).exchange("")
    processes.saving.leave()

def main():
    with process_group.join_job(Job(address, int(count), int(index)), DistributedConfig(), {{}}) as processes:
        processes.note_checkpoint(0)
        end = threading.Timer({DEADLINE}, os._exit, [0])
        end.daemon = True
        end.start()
        channel = processes.channel("step")
        with Watchdog(config, processes) as watchdog:
            stick("prepare")
            if hangs == "nothing, prepared slowly" and index == "1":
                pieces.tokenize("", read_slowly(), ByteTokenizer(), processes.main)
            channel.exchange("")
            watchdog.name_slow(print)
            for step in range(1, 10):
                processes.main.enter("data", step)
                if step == 3:
                    stick("data")
                processes.main.enter("step")
                if step == 3:
                    stick("step")
                    if hangs == "nothing, slowly" and index == "1":
                        for _ in range({4 * LIMIT}):
                            time.sleep(0.5)  # twice the limit in all
                            processes.main.beat()
                    if hangs == "nothing, unwatched" and index == "1":
                        time.sleep({3 * LIMIT})
                    if hangs == "save":
                        threading.Thread(target=save, args=[processes]).start()
                channel.exchange("")
                if step == 3 and hangs == "collective":
                    with processes.main.wait():  # as for a device
                        time.sleep(1000)
            goes_on = hangs.startswith("nothing")
            for step in range(10, 400 if goes_on else 10**9):
                processes.main.enter("data", step)
                time.sleep(0 if index == "0" and goes_on else 0.02)
                processes.main.enter("step")
                if goes_on:
                    channel.exchange("")

errors.run_command(main)
"""


def start_phases(directory: Path, hangs: str, count: int = 3) -> list[subprocess.Popen[str]]:
    address = free_address()
    return [start_python("-c", PHASES, address, count, index, directory, hangs) for index in range(count)]


HOST = socket.gethostname()
REMEDY = "there is no checkpoint yet: run again to start at step 0"


@pytest.mark.parametrize(
    ("hangs", "named", "doing", "at"),
    [
        ("prepare", f"process 1 ({HOST}) of 3", "it is in", "phase prepare of step 0"),
        ("data", f"process 1 ({HOST}) of 3", "it is in", "phase data of step 3"),
        ("step", f"process 1 ({HOST}) of 3", "it is in", "phase step of step 3"),
        ("save", f"process 1 ({HOST}) of 3", "it is in", "phase save of step 3"),
        (
            "collective",
            ", ".join(f"process {index} ({HOST})" for index in range(3)) + " of 3",
            "it waits for a device or a collective in",
            "phase step of step 3",
        ),
    ],
    ids=["prepare", "data", "step", "save", "collective"],
)
def test_a_job_without_progress_ends_and_names_who_is_behind(
    hangs: str, named: str, doing: str, at: str, tmp_path: Path
) -> None:
    processes = start_phases(tmp_path, hangs)
    for index, process in enumerate(processes):
        _, stderr = finish(process, 5)
        line = next(line for line in stderr.splitlines() if line.startswith("error: "))
        found = re.fullmatch(
            r"error: (.*) makes no progress: (.*) (phase .*) for (\d+) s, over its limit .*; (.*)", line
        )
        assert found, stderr
        assert found.group(1, 2, 3, 5) == (named, doing, at, REMEDY)
        assert f"the Python stacks are in {tmp_path}/stacks.*.txt, or on standard error" in line
        assert int(found[4]) >= LIMIT
        stacks = (tmp_path / f"stacks.{index}.{HOST}.txt").read_text()
        assert line.removeprefix("error: ") in stacks
        assert "most recent call first" in stacks
        assert ("in stick" in stacks) == (index == 1 and hangs != "collective")


@pytest.mark.parametrize("hangs", ["nothing", "nothing, prepared slowly", "nothing, slowly", "nothing, unwatched"])
def test_a_job_that_advances_goes_on_and_its_slow_process_is_named(hangs: str, tmp_path: Path) -> None:
    """Check this with a job that lasts longer than its limits, and whose process 1 needs 20 ms for its data.

    In one phase, process 1 may take longer than the limit if it notes progress, as the tokenizer of a run does for its
    data, or if watchdog.factor is 0.
    """
    (stdout, _), _ = [finish(process) for process in start_phases(tmp_path, hangs, 2)]
    assert "process 1 is slow: in the last 50 steps or more" in stdout
    assert not list(tmp_path.iterdir())


def test_other_flags_of_xla_are_refused(tmp_path: Path) -> None:
    address = free_address()
    start = [
        start_python("-c", PHASES, address, 2, index, tmp_path, "nothing", XLA_FLAGS=flags)
        for index, flags in enumerate(("", "--xla_cpu_enable_fast_math=true"))
    ]
    for process in start:
        assert "XLA_FLAGS is --xla_cpu_enable_fast_math=true on process 1" in finish(process, 2)[1]


RUN_LIMIT = 10  # seconds; other tests may slow a step down to seconds


def start_run(
    directory: Path, gate: Gate | None, *overrides: object, gated: int = 1, **environment: str
) -> list[subprocess.Popen[str]]:
    """Start a training of two processes. gate: of process `gated`. environment: of process 1."""
    job = ("--distributed.coordinator", free_address(), "--distributed.processes", 2, "--mesh.fsdp", 2)
    run = (
        *job,
        *some_text(directory.parent / "documents.jsonl"),
        "--training.steps",
        10**6,
        "--evaluation.every",
        10**6,
    )
    run = (*run, "--watchdog.floor-seconds", RUN_LIMIT, "--watchdog.long-floor-seconds", 4 * RUN_LIMIT)
    run = (*run, *overrides)
    gates: list[list[Gate]] = [[], []]
    gates[gated] += [gate] if gate else []
    first = start_gated(directory, gates[0], *run, "--distributed.process-id", 0)
    return [first, start_gated(directory, gates[1], *run, "--distributed.process-id", 1, **environment)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "call", "phase", "step"),
    [
        ("jaxopt_llm.data.rows.loader:_poll", 6, "data", 6),
        ("jaxopt_llm.run.workload:DecoderWorkload.step", 6, "step", 6),
        (
            "jaxopt_llm.parallel.mesh:LocalRows.make_global",
            8,
            "evaluate",
            6,
        ),  # the second batch, after those of 6 steps
        ("jaxopt_llm.train:compile_fitting", 1, "compile", 0),
        ("jaxopt_llm.run.workload:DecoderWorkload.restore", 1, "restore", 0),
    ],
    ids=["data", "step", "evaluate", "compile", "restore"],
)
def test_a_run_ends_if_one_process_stops(function: str, call: int, phase: str, step: int, tmp_path: Path) -> None:
    run, gate = tmp_path / "run", Gate(tmp_path / "gate", function, call)
    evaluation = ("--evaluation.every", 6, "--evaluation.batches", 2)
    processes = start_run(run, gate, *evaluation)
    for index, process in enumerate(processes):
        _, stderr = finish(process, 5)
        assert f"process 1 ({HOST}) of 2 makes no progress: it is in phase {phase} of step {step} for" in stderr
        assert "in gated" in (run / f"stacks.1.{HOST}.txt").read_text()
        assert (run / f"stacks.{index}.{HOST}.txt").exists()
    records = logged(run)
    assert records >= step - 2


PREPARE_LIMIT = 20  # seconds, in which nothing else than the gate may keep a process


@pytest.mark.slow
def test_a_run_ends_if_one_process_stops_while_it_opens_its_data_and_can_be_started_again(tmp_path: Path) -> None:
    run, gate = tmp_path / "run", Gate(tmp_path / "gate", "jaxopt_llm.data.tokens.corpus:_open_file")
    for index, process in enumerate(start_run(run, gate, "--watchdog.long-floor-seconds", PREPARE_LIMIT)):
        _, stderr = finish(process, 5)
        assert f"error: process 1 ({HOST}) of 2 makes no progress: it is in phase prepare of step 0 for" in stderr
        assert "run again to continue from the last checkpoint, if there is one" in stderr
        assert ("in gated" in (run / f"stacks.{index}.{HOST}.txt").read_text()) == (index == 1)
    check_directory_is_free(run)


@pytest.mark.slow
def test_the_stacks_are_printed_if_the_run_directory_hangs(tmp_path: Path) -> None:
    run, gate = tmp_path / "run", Gate(tmp_path / "gate", "jaxopt_llm.train:lock_directory")
    processes = start_run(run, gate, "--watchdog.long-floor-seconds", PREPARE_LIMIT, gated=0)
    for index, process in enumerate(processes):
        _, stderr = finish(process, 5)
        assert f"error: process 0 ({HOST}) of 2 makes no progress: it is in phase prepare of step 0 for" in stderr
        assert f"stacks.{index}.{HOST}.txt could not be written; the stacks of this process:" in stderr
        assert ("in gated" in stderr) == (index == 0)
    assert not run.exists()


@pytest.mark.slow
def test_a_run_goes_on_while_a_save_is_slow_and_ends_if_it_never_returns(tmp_path: Path) -> None:
    run = tmp_path / "run"
    gate = Gate(tmp_path / "gate", "jaxopt_llm.checkpoint.native.integrity:sync_and_hash")
    processes = start_run(run, gate, "--checkpoint.every", 2)
    (stdout, stderr), _ = [finish(process, 5) for process in processes]
    assert f"process 1 ({HOST}) of 2 makes no progress: it is in phase save of step 2 for" in stderr
    assert stdout.count("the save of step 2 is slow") == 1
    assert stdout.count("is not saved: the saves before are still being written") == 1
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(records) > 10
    assert {len(record["process_seconds/waited"]) for record in records if "process_seconds/step" in record} == {2}


@pytest.mark.slow
def test_a_run_of_one_process_is_watched_if_asked(tmp_path: Path) -> None:
    run, gate = tmp_path / "run", Gate(tmp_path / "gate", "jaxopt_llm.data.rows.loader:_poll", 6)
    watched = ("--watchdog.single-process", True, "--watchdog.floor-seconds", RUN_LIMIT)
    _, stderr = finish(start_gated(run, [gate], "--training.steps", 10, *watched), 5)
    assert f"process 0 ({HOST}) of 1 makes no progress: it is in phase data of step 6" in stderr
    assert "in gated" in (run / f"stacks.0.{HOST}.txt").read_text()


@pytest.mark.slow
def test_other_settings_of_jax_are_refused_before_the_first_step(tmp_path: Path) -> None:
    for process in start_run(tmp_path / "run", None, JAX_DEFAULT_MATMUL_PRECISION="highest"):
        _, stderr = finish(process, 2)
        assert "jax_default_matmul_precision is highest on process 1 and None on process 0" in stderr
        assert "hash of the lowered step is" in stderr
    assert not logged(tmp_path / "run")
