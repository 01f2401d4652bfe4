"""Supervisors of several hosts, each a process of this machine with a folder of its own, and one run directory."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import checkpoint, metrics, start_training, tiny
from gates import DEADLINE, finish
from ports import free_address
from test_supervisor import NEXT_LINE, faults, journal, start_supervisor, starts

# Part of a program: note its place in the job.
NOTE = "echo $RANK of $WORLD_SIZE >> places; "
# Part of a program: note the token of the job.
NOTE_TOKEN = 'echo "$JAXOPT_LLM_TOKEN" >> tokens; '
# Part of a program: say that the steps begin, as train does.
BEGIN = 'echo "{{\\"event\\": \\"start\\", \\"time\\": {}}}" >> ../run/events.jsonl; '


class Hosts:
    """Hosts of a job.

    Attributes:
        run: the run directory.
        running: supervisors by the index of their host.
    """

    def __init__(self, folder: Path, count: int, *options: object) -> None:
        self.folder, self.run, self.count, self._options = folder, folder / "run", count, options
        self.address = free_address()
        self.running: dict[int, subprocess.Popen[str]] = {}
        self.run.mkdir()

    @property
    def elastic_seconds(self) -> float:
        return float(str(self._options[self._options.index("--elastic") + 1]))

    def home(self, index: int) -> Path:
        return self.folder / f"host{index}"

    def plan(self, index: int, *lines: str) -> None:
        """Set what the program does on a host at each start, as shell programs."""
        self.home(index).mkdir(exist_ok=True)
        (self.home(index) / "plan").write_text("\n".join(lines) + "\n")

    def start(self, index: int, *program: object) -> subprocess.Popen[str]:
        """Start the supervisor of a host. program: by default the one that does what is planned."""
        address, port = self.address.split(":")
        job = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": str(self.count), "RANK": str(index)}
        options = ("--run-directory", self.run, "--backoff", 0.01, *self._options)
        self.home(index).mkdir(exist_ok=True)
        words = program or ("sh", "-c", NEXT_LINE)
        self.running[index] = start_supervisor(self.home(index), *options, "--", *words, **job)
        return self.running[index]

    def lose(self, index: int) -> None:
        """Kill the supervisor of a host, with which its program dies."""
        self.running[index].kill()
        self.running[index].wait(DEADLINE)

    def places(self, index: int) -> list[str]:
        path = self.home(index) / "places"
        return path.read_text().splitlines() if path.exists() else []

    def tokens(self, index: int) -> list[str]:
        return (self.home(index) / "tokens").read_text().splitlines()

    def finish(self, code: int = 0) -> None:
        for process in self.running.values():
            finish(process, code)


@pytest.fixture
def make_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hosts]]:
    monkeypatch.delenv("JAXOPT_LLM_TOKEN", raising=False)
    with contextlib.ExitStack() as scope:

        def make(count: int, *options: object) -> Hosts:
            hosts = Hosts(tmp_path, count, *options)
            scope.callback(lambda: [process.kill() for process in hosts.running.values()])
            return hosts

        yield make


def await_that(happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(*files: str) -> str:
    """Return a part of a program that waits for files in the run directory."""
    return "".join(f"while [ ! -e ../run/{file} ]; do sleep 0.05; done; " for file in files)


def test_all_hosts_start_again_together(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(3)
    # Each needs the others in its second round: none may begin before all programs of the first have ended.
    for index in range(3):
        end = "echo shot >&2; kill -9 $$" if index == 1 else f"sleep 0.{index}; echo process 1 has died >&2; exit 5"
        second = f"touch ../run/second{index}; " + wait_for("second0", "second1", "second2") + "exit 0"
        hosts.plan(index, end, second)
    for index in (2, 1, 0):
        hosts.start(index)
    hosts.finish()
    assert [starts(hosts.home(index)) for index in range(3)] == [2, 2, 2]
    (fault,) = faults(hosts.run)
    assert (fault["fault"], fault["process"], fault["what"], fault["restart"]) == ("SIGKILL", 1, "shot", 1)


@pytest.mark.parametrize(("own", "others"), [(2, 2), (3, 5)])
def test_an_error_ends_the_job_on_all_hosts(own: int, others: int, make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2)
    hosts.plan(0, f"exit {others}", "exit 0")
    hosts.plan(1, f"exit {own}", "exit 0")
    hosts.start(0)
    hosts.start(1)
    hosts.finish(own)


def test_a_missing_host_is_waited_for(make_hosts: Callable[..., Hosts]) -> None:
    """Check also that an exit code 2, which is final by itself, does not end the job while a host is lost."""
    hosts = make_hosts(2)
    hosts.plan(0, wait_for("lost") + "exit 2", "exit 0")
    hosts.plan(1, "touch ../run/here; while :; do sleep 0.05; done", "exit 0")
    hosts.start(0)
    hosts.start(1)
    await_that((hosts.run / "here").exists)
    hosts.lose(1)
    (hosts.run / "lost").touch()
    await_that(lambda: journal(hosts.run))
    time.sleep(1)
    assert starts(hosts.home(0)) == 1
    hosts.start(1)
    hosts.finish()
    assert [starts(hosts.home(index)) for index in range(2)] == [2, 2]
    assert [fault["fault"] for fault in journal(hosts.run)] == ["host lost"]


def test_a_host_that_was_lost_between_two_rounds_is_not_lost_in_the_next(make_hosts: Callable[..., Hosts]) -> None:
    """Otherwise its program would be left running beside that of the round after it, with the same index."""
    hosts = make_hosts(2, "--backoff", 2)
    hosts.plan(0, "exit 5", NOTE + "sleep 1; exit 0")
    hosts.plan(1, "exit 1", NOTE + "sleep 1; exit 0")
    hosts.start(0)
    hosts.start(1)
    await_that(lambda: journal(hosts.run))
    hosts.lose(1)
    hosts.start(1)
    hosts.finish()
    assert [starts(hosts.home(index)) for index in range(2)] == [2, 2]
    assert [fault["fault"] for fault in faults(hosts.run)] == ["exit code 1"]


def test_a_lost_host_is_left_out_and_taken_in_again(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(3, "--elastic", 3)
    stop = "trap 'touch ../run/stop; exit 75' TERM; "
    hosts.plan(
        0,
        NOTE + BEGIN.format(1) + wait_for("lost") + "exit 5",
        stop + NOTE + BEGIN.format(2) + "while :; do sleep 0.05; done",
        NOTE + "exit 0",
    )
    hosts.plan(1, NOTE + "touch ../run/here; while :; do sleep 0.05; done", NOTE + "exit 0")
    hosts.plan(2, NOTE + wait_for("lost") + "exit 5", NOTE + wait_for("stop") + "exit 75", NOTE + "exit 0")
    for index in (2, 1, 0):  # the others wait for host 0
        hosts.start(index)
    await_that((hosts.run / "here").exists)
    hosts.lose(1)
    (hosts.run / "lost").touch()
    await_that(lambda: len(hosts.places(0)) == 2)
    hosts.start(1)
    hosts.finish()
    assert hosts.places(0) == ["0 of 3", "0 of 2", "0 of 3"]
    assert hosts.places(1) == ["1 of 3", "1 of 3"]
    assert hosts.places(2) == ["2 of 3", "1 of 2", "2 of 3"]
    assert [entry["hosts"] for entry in journal(hosts.run) if "hosts" in entry] == [[0, 2], [0, 1, 2]]
    assert [fault["fault"] for fault in faults(hosts.run)] == ["host lost"]  # that it grows is none


def test_another_host_leads_if_the_first_is_lost(make_hosts: Callable[..., Hosts]) -> None:
    """Check also that each leader draws a token, which the programs of its rounds share."""
    hosts = make_hosts(3, "--elastic", 3)
    hosts.plan(0, NOTE + "touch ../run/here; while :; do sleep 0.05; done", NOTE + "exit 0")
    for index in (1, 2):
        hosts.plan(index, NOTE + NOTE_TOKEN + wait_for("lost") + "exit 5", NOTE + NOTE_TOKEN + "exit 0")
    for index in (2, 1, 0):  # the others wait for host 0
        hosts.start(index)
    await_that((hosts.run / "here").exists)
    hosts.lose(0)
    (hosts.run / "lost").touch()
    del hosts.running[0]
    hosts.finish()
    assert (hosts.places(1), hosts.places(2)) == (["1 of 3", "0 of 2"], ["2 of 3", "1 of 2"])
    assert hosts.tokens(1) == hosts.tokens(2) and len({*hosts.tokens(1)} - {""}) == 2
    assert [entry["hosts"] for entry in journal(hosts.run) if "hosts" in entry] == [[1, 2]]


def test_a_spare_takes_the_place_of_a_lost_host(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(3, "--hosts", 2)
    hosts.plan(0, NOTE + wait_for("lost") + "exit 5", NOTE + "exit 0")
    hosts.plan(1, NOTE + "touch ../run/here; while :; do sleep 0.05; done")
    hosts.plan(2, NOTE + "exit 0")
    hosts.start(0)
    hosts.start(1)
    await_that((hosts.run / "here").exists)
    hosts.start(2)
    hosts.lose(1)
    (hosts.run / "lost").touch()
    del hosts.running[1]
    hosts.finish()
    assert [hosts.places(index) for index in range(3)] == [["0 of 2", "0 of 2"], ["1 of 2"], ["1 of 2"]]


def children(supervisor: subprocess.Popen[str]) -> list[int]:
    """Return the ids of the processes that a supervisor has started, by Linux's table."""
    listed = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text()
    return [int(each) for each in listed.split()]


def count_members(hosts: Hosts) -> int:
    """Return the number of supervisors that are connected with the leader, by Linux's table of connections."""
    path = hosts.run / "supervisors"
    port = json.loads(path.read_text())["port"] if path.exists() else 0
    connections = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(own.endswith(f":{port:04X}") and state == "01" for own, _, state in connections)


CORRUPTION = 'echo "{\\"event\\": \\"corruption\\", \\"processes\\": [1]}" >> ../run/events.jsonl; '


@pytest.mark.parametrize(
    ("ends", "rounds"),
    [(("exit 5", "exit 1"), 3), (("exit 5", "exit 74"), 3), ((CORRUPTION + "exit 9", "sleep 0.6; exit 9"), 1)],
    ids=["crashes", "disk", "wrong bits"],
)
def test_a_spare_takes_the_place_of_a_host_that_causes_faults(
    ends: tuple[str, str], rounds: int, make_hosts: Callable[..., Hosts]
) -> None:
    """A host that crashes is tried three times; one that computes wrongly is not tried again."""
    hosts = make_hosts(3, "--hosts", 2, "--restarts", 10)
    begin = NOTE + wait_for("spare")
    hosts.plan(0, *[begin + f"sleep 0.2; {ends[0]}"] * rounds, NOTE + "exit 0")
    hosts.plan(1, *[begin + ends[1]] * rounds, NOTE + "exit 0")
    hosts.plan(2, NOTE + "exit 0")
    hosts.start(0)
    hosts.start(1)
    await_that(lambda: hosts.places(1))
    hosts.start(2)
    await_that(lambda: count_members(hosts) == 2)
    (hosts.run / "spare").touch()
    hosts.finish()
    assert hosts.places(1) == ["1 of 2"] * rounds
    assert (hosts.places(0), hosts.places(2)) == (["0 of 2"] * (rounds + 1), ["1 of 2"])
    blamed = [(entry["blamed"], entry["strikes"]) for entry in journal(hosts.run) if "blamed" in entry]
    assert blamed == ([(1, 1)] * 3 if rounds == 3 else [(1, 3)])


def test_an_elastic_job_leaves_out_a_host_that_causes_faults(make_hosts: Callable[..., Hosts]) -> None:
    hosts = make_hosts(2, "--elastic", 1, "--restarts", 10)
    hosts.plan(0, *[NOTE + "sleep 0.2; exit 5"] * 3, NOTE + "exit 0")
    hosts.plan(1, *[NOTE + "exit 1"] * 4)
    hosts.start(0)
    hosts.start(1)
    hosts.finish()
    assert hosts.places(0) == ["0 of 2"] * 3 + ["0 of 1"] and hosts.places(1) == ["1 of 2"] * 3


@pytest.mark.slow
def test_a_process_that_waits_for_a_dead_one_at_the_start_is_told_to_stop(make_hosts: Callable[..., Hosts]) -> None:
    """It would wait for distributed.timeout_seconds, and be killed before."""
    hosts = make_hosts(2)
    run = ("--mesh.data", 2, "--training.steps", 4, "--logging.tensorboard", False)
    for index in (1, 0):
        hosts.start(index, "train", *tiny(hosts.run), *run)
    await_that(lambda: children(hosts.running[1]))
    os.kill(children(hosts.running[1])[0], signal.SIGKILL)
    hosts.finish()
    (fault,) = faults(hosts.run)
    assert (fault["process"], fault["codes"]) == (1, {"1": 137, "0": 75})


def lose_host_1_for_some_time(hosts: Hosts, *run: object) -> list[tuple[list[int], list[str]]]:
    """Train on three hosts, of which one is lost after the first checkpoint and comes back when the others go on.

    Returns:
        The hosts and the flags of the rounds after the first.
    """
    program = ("train", *tiny(hosts.run), *run)
    for index in (2, 1, 0):  # the others wait for host 0
        hosts.start(index, *program)
    await_that((hosts.run / "checkpoints/10").exists)  # before it, a restart would begin at step 0
    hosts.lose(1)
    await_that(lambda: any(entry.get("hosts") == [0, 2] for entry in journal(hosts.run)))
    hosts.start(1, *program)  # it has been there for long when the others train again
    hosts.finish()
    (lost,) = faults(hosts.run)
    events = [json.loads(line) for line in (hosts.run / "events.jsonl").read_text().splitlines()]
    shrunk = next(event for event in events if event["event"] == "resume")
    assert shrunk["time"] - lost["time"] > hosts.elastic_seconds  # before, host 1 could have come back
    return [(entry["hosts"], entry["flags"]) for entry in journal(hosts.run) if "hosts" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("then", ["they give way", "one fails"])
def test_the_other_hosts_prepare_while_a_lost_one_is_waited_for(then: str, make_hosts: Callable[..., Hosts]) -> None:
    """When it comes back in time, all hosts train again, and the prepared programs have not made a step.

    If one of these fails, that is no fault of the job, which waits on.
    """
    run = ("--mesh.fsdp", 3, "--training.batch-size", 12, "--training.steps", 100, "--evaluation.every", 100)
    run += ("--checkpoint.every", 10, "--logging.tensorboard", False)
    hosts = make_hosts(3, "--elastic", 90)
    program = ("train", *tiny(hosts.run), *run)
    for index in (2, 1, 0):  # the others wait for host 0
        hosts.start(index, *program)
    await_that((hosts.run / "checkpoints/10").exists)
    hosts.lose(1)
    told = hosts.running[0].stdout
    assert told is not None
    assert any("ready; waits" in line for line in told)  # compiled for two hosts, and restored
    reached = len(metrics(hosts.run))
    if then == "one fails":
        (prepared,) = children(hosts.running[2])
        os.kill(prepared, signal.SIGKILL)
        await_that(lambda: not children(hosts.running[0]))
    hosts.start(1, *program)
    hosts.finish()
    assert not [entry for entry in journal(hosts.run) if "hosts" in entry]  # two hosts have never trained
    assert [fault["fault"] for fault in faults(hosts.run)] == ["host lost"]
    assert reached < 100
    assert [entry["step"] for entry in metrics(hosts.run)] == [*range(1, 101)]


@pytest.mark.slow
def test_a_run_shrinks_and_grows_with_the_losses_of_an_undisturbed_one(
    make_hosts: Callable[..., Hosts], tmp_path: Path
) -> None:
    steps = 200
    run = ("--mesh.fsdp", 3, "--training.batch-size", 12, "--precision.compute-dtype", "float32")
    run += ("--training.steps", steps, "--evaluation.every", 100, "--checkpoint.every", 10)
    run += ("--logging.tensorboard", False)
    whole = tmp_path / "whole"
    finish(start_training(whole, *run))

    hosts = make_hosts(3, "--elastic", 5)
    assert [each for each, _ in lose_host_1_for_some_time(hosts, *run)] == [[0, 2], [0, 1, 2]]
    records = [{entry["step"]: entry for entry in metrics(directory)} for directory in (hosts.run, whole)]
    assert [*records[0]] == [*records[1]] == [*range(1, steps + 1)]
    losses = [[entry["loss"] for entry in run.values()] for run in records]
    np.testing.assert_allclose(*losses, rtol=2e-6)


@pytest.mark.slow
def test_groups_of_local_steps_go_on_without_a_lost_host(make_hosts: Callable[..., Hosts], tmp_path: Path) -> None:
    """Until a host is lost, the losses are those of an undisturbed run. Then two groups train, later three again."""
    steps, local = 120, 4
    run = ("--mesh.data", 3, "--training.batch-size", 12, "--training.local-steps", local)
    run += ("--training.steps", steps, "--evaluation.every", 60, "--checkpoint.every", 10)
    run += ("--precision.compute-dtype", "float32", "--logging.tensorboard", False)
    whole = tmp_path / "whole"
    finish(start_training(whole, *run))

    hosts = make_hosts(3, "--elastic", 5)
    rounds = lose_host_1_for_some_time(hosts, *run)
    assert rounds == [([0, 2], ["--mesh.data=2"]), ([0, 1, 2], [])]
    records = [{entry["step"]: entry["loss"] for entry in metrics(directory)} for directory in (hosts.run, whole)]
    assert [*records[0]] == [*records[1]] == [*range(1, steps + 1)]
    early = [[losses[step] for step in range(1, 11)] for losses in records]
    np.testing.assert_allclose(*early, rtol=2e-6)
    assert records[0][steps] == pytest.approx(records[1][steps], rel=0.1)
    groups = checkpoint(hosts.run, steps, ("groups",))["groups"]
    assert {len(leaf) for leaf in jax.tree.leaves(groups)} == {3}
