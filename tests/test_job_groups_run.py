"""Groups that are jobs of their own, as commands: with an outer server, lost groups, and a lost server."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from commands import checkpoint, metrics, some_text, start, start_training, train
from gates import DEADLINE, Gate, after_step, finish, line_with, start_gated, wait_until
from ports import free_address

from jaxopt_llm.checkpoint.native.step_directories import read_record

SETTINGS = (
    *("--training.local-steps", 3, "--optimizer.outer-learning-rate", 0.7, "--optimizer.outer-momentum", 0.9),
    *("--optimizer.learning-rate", 1e-2, "--optimizer.epsilon", 1e-3, "--schedule.decay-steps", 9),
    *("--precision.compute-dtype", "float32", "--checkpoint.every", 3, "--logging.tensorboard", "False"),
)


class Job:
    """Two groups and their servers, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.addresses = folder, [free_address()]
        (folder / "token").write_text("a secret of this test")
        self.data = some_text(folder / "a.jsonl")
        self.processes: list[subprocess.Popen[str]] = []

    def serve(self, wait: float = DEADLINE, number: int = 0) -> subprocess.Popen[str]:
        directory = self.folder / f"server{number}"
        arguments = ("--listen", self.addresses[number], "--directory", directory, "--groups", 2, "--wait", wait)
        server = start("outer_server", *arguments, "--token-file", self.folder / "token")
        self.processes.append(server)
        line_with("listens at", server, "stderr")
        return server

    def arguments(self, index: int, steps: int) -> tuple[object, ...]:
        return (
            *("--training.steps", steps, "--training.batch-size", 6, *SETTINGS, *self.data),
            *("--groups.server", *self.addresses, "--groups.count", 2, "--groups.index", index),
            *("--groups.token-file", self.folder / "token"),
        )

    def directory(self, index: int) -> Path:
        return self.folder / f"group{index}"

    def start(self, index: int, steps: int, gates: tuple[Gate, ...] = (), *more: object) -> subprocess.Popen[str]:
        arguments = (*self.arguments(index, steps), *more)
        if gates:
            process = start_gated(self.directory(index), gates, *arguments)
        else:
            process = start_training(self.directory(index), *arguments)
        self.processes.append(process)
        return process

    def start_pair(self, index: int, steps: int) -> list[subprocess.Popen[str]]:
        """Start a group of two processes, which share the masters."""
        job = ("--distributed.coordinator", free_address(), "--distributed.processes", 2, "--distributed.process-id")
        return [self.start(index, steps, (), "--mesh.fsdp", 2, *job, process) for process in range(2)]

    def rounds(self, number: int = 0) -> list[dict[str, Any]]:
        path = self.folder / f"server{number}" / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def masters(self, index: int, step: int) -> Any:
        return checkpoint(self.directory(index), step, ("masters",))["masters"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_learnt_as_one_program(job: Job) -> None:
    """Check that two groups have learnt in 6 steps what one program with local steps learns."""
    one = job.folder / "one"
    done = train(one, "--training.steps", 6, "--training.batch-size", 12, "--mesh.data", 2, *SETTINGS, *job.data)
    assert done.returncode == 0, done.stderr
    losses = [[record["loss"] for record in metrics(job.directory(index))] for index in range(2)]
    np.testing.assert_allclose(np.mean(losses, axis=0), [record["loss"] for record in metrics(one)], rtol=1e-4)
    assert_equal(job.masters(0, 6), job.masters(1, 6))
    expected = checkpoint(one, 6, ("masters",))["masters"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), job.masters(0, 6), expected)


def test_two_groups_learn_what_one_program_with_local_steps_learns(job: Job) -> None:
    job.serve()
    outputs = [finish(process) for process in [job.start(index, 6) for index in range(2)]]
    assert all("trains by itself" not in "".join(output) for output in outputs)
    assert_learnt_as_one_program(job)
    assert [(line["step"], line["contributed"]) for line in job.rounds()] == [(3, [0, 1]), (6, [0, 1])]


def test_a_killed_group_stops_nobody_and_comes_back(job: Job, tmp_path: Path) -> None:
    job.serve()
    killed, held = after_step(tmp_path / "killed", 4), after_step(tmp_path / "held", 13)
    stays, goes = job.start(0, 15, (held,)), job.start(1, 15, (killed,))
    wait_until(killed.reached, goes)
    events = job.directory(1) / "events.jsonl"
    wait_until(lambda: '"event": "checkpoint"' in events.read_text(), goes)
    goes.kill()
    wait_until(held.reached, stays)  # after the round of step 12
    assert [line["absent"] for line in job.rounds()] == [[], [1], [1], [1]]
    again = job.start(1, 15)
    line = line_with("takes the outer masters", again)
    assert "step      3  takes the outer masters of step 12" in line
    wait_until(lambda: '"step": 13' in (job.directory(1) / "metrics.jsonl").read_text(), again)
    held.open()
    finish(stays)
    finish(again)
    assert [(line["step"], line["contributed"]) for line in job.rounds()][-1] == (15, [0, 1])
    assert_equal(job.masters(0, 15), job.masters(1, 15))
    steps = [record["step"] for record in metrics(job.directory(1))]
    assert steps[:3] == [1, 2, 3] and [step for step in steps if step > 4] == [13, 14, 15]


def test_a_group_that_is_late_at_the_end_saves_the_masters_of_the_others(job: Job, tmp_path: Path) -> None:
    job.serve(wait=1)
    gate = after_step(tmp_path / "gate", 2)
    late = job.start(1, 6, (gate,))
    wait_until(gate.reached, late)
    finish(job.start(0, 6))
    gate.open()
    assert "step      3  takes the outer masters of step 6" in "".join(finish(late))
    assert_equal(job.masters(0, 6), job.masters(1, 6))
    prompt, last = metrics(job.directory(0))[-1], metrics(job.directory(1))[-1]
    assert last["step"] == 6 and {name: last[name] for name in ("tokens", "eval_loss")} == {
        name: prompt[name] for name in ("tokens", "eval_loss")
    }
    assert read_record(job.directory(1) / "checkpoints" / "6")["tokens"] == last["tokens"]
    assert [(line["contributed"], line["late"]) for line in job.rounds()] == [([0], [1])] * 2


def test_a_late_group_saves_and_measures_what_was_due_where_it_jumps(job: Job, tmp_path: Path) -> None:
    job.serve(wait=1)
    gate, held = after_step(tmp_path / "gate", 2), after_step(tmp_path / "held", 7)
    late = job.start(1, 8, (gate,), "--evaluation.every", 5)
    wait_until(gate.reached, late)
    prompt = job.start(0, 8, (held,), "--evaluation.every", 5)
    wait_until(held.reached, prompt)
    gate.open()
    assert "step      3  takes the outer masters of step 6" in "".join(finish(late))
    held.open()
    finish(prompt)
    assert_equal(job.masters(0, 6), job.masters(1, 6))
    records = metrics(job.directory(1))
    assert [record["step"] for record in records] == [1, 2, 6, 7, 8]
    assert [record["step"] for record in records if "eval_loss" in record] == [6, 8]


def test_groups_go_on_without_a_server_that_was_killed(job: Job, tmp_path: Path) -> None:
    server = job.serve()
    gates = [after_step(tmp_path / f"gate{index}", 4) for index in range(2)]
    later = [after_step(tmp_path / f"later{index}", 7) for index in range(2)]
    groups = [job.start(index, 9, (gates[index], later[index])) for index in range(2)]
    for gate, group in zip(gates, groups, strict=True):
        wait_until(gate.reached, group)
    server.kill()
    server.communicate()
    for gate in gates:
        gate.open()
    for gate, group in zip(later, groups, strict=True):
        wait_until(gate.reached, group)
    assert [line["step"] for line in job.rounds()] == [3]
    job.serve()
    for gate in later:
        gate.open()
    for group in groups:
        output = "".join(finish(group))
        assert output.count("trains by itself, and asks again every round") == 1
        assert "step      9  the outer server answers again" in output
    # The change of the last round covers both.
    assert [(line["step"], line["contributed"]) for line in job.rounds()] == [(3, [0, 1]), (9, [0, 1])]
    assert_equal(job.masters(0, 9), job.masters(1, 9))


def test_a_server_that_refuses_a_group_in_the_middle_of_a_run_ends_it(job: Job, tmp_path: Path) -> None:
    server = job.serve(wait=0)
    gate = after_step(tmp_path / "gate", 4)
    group = job.start(0, 9, (gate,), "--checkpoint.every", 9)  # alone: another group could take it to a later step
    wait_until(gate.reached, group)
    server.kill()
    server.communicate()
    arguments = ("--listen", job.addresses[0], "--directory", job.folder / "server0", "--groups", 3)
    job.processes.append(start("outer_server", *arguments, "--token-file", job.folder / "token"))
    line_with("listens at", job.processes[-1], "stderr")
    gate.open()
    _, stderr = finish(group, 2)
    assert "groups.count is 2 here, and the outer server has --groups 3: make them equal" in stderr
    job.masters(0, 6)


def test_a_wrong_token_file_is_found_before_the_run_directory_exists(job: Job) -> None:
    process = job.start(0, 6, (), "--groups.token-file", job.folder / "missing")
    _, stderr = finish(process, 2)
    assert "groups.token_file=" in stderr and "it cannot be read" in stderr and not job.directory(0).exists()


def test_a_stop_does_not_wait_for_the_other_groups(job: Job) -> None:
    job.serve()
    alone = job.start(0, 6)
    line_with("step 2/6", alone)
    wait_until(lambda: (job.directory(0) / "metrics.jsonl").exists(), alone)
    time.sleep(1)  # it waits for group 1 now, which does not come
    clock = time.monotonic()
    alone.terminate()
    _, stderr = alone.communicate(timeout=DEADLINE)
    assert alone.returncode == 75, stderr
    assert time.monotonic() - clock < DEADLINE / 2 and "preempted at step 3" in stderr


@pytest.mark.slow
def test_two_groups_of_two_processes_learn_what_one_program_learns(job: Job) -> None:
    """Each process has half of the masters, and a server of its own."""
    job.addresses.append(free_address())
    for number in range(2):
        job.serve(number=number)
    outputs = [finish(process) for pair in [job.start_pair(index, 6) for index in range(2)] for process in pair]
    assert all("trains by itself" not in "".join(output) for output in outputs)
    assert_learnt_as_one_program(job)
    for number in range(2):
        assert [(line["step"], line["contributed"]) for line in job.rounds(number)] == [(3, [0, 1]), (6, [0, 1])]
        assert all(line["process"] == number and line["bytes"] for line in job.rounds(number))


@pytest.mark.slow
def test_a_stop_of_one_process_ends_the_wait_of_its_group(job: Job) -> None:
    job.serve()
    first, second = job.start_pair(0, 6)
    line_with("step 2/6", first)
    wait_until(lambda: (job.directory(0) / "metrics.jsonl").exists(), first)
    time.sleep(2)  # both wait for group 1 now, which does not come
    clock = time.monotonic()
    second.terminate()
    for process in (first, second):
        _, stderr = process.communicate(timeout=DEADLINE / 3)
        assert process.returncode == 75, stderr
    assert time.monotonic() - clock < DEADLINE / 2
