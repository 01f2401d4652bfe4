"""The command supervise with programs that end in chosen ways, and with a real run that is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, RUN, SAVES_EVERY_STEP, assert_ended_as, start_training, tiny
from gates import DEADLINE, finish, wait_until

pytestmark = pytest.mark.core

# A program that does the next line of the file `plan` at each start.
NEXT_LINE = """
echo >> starts
eval "$(sed -n "$(wc -l < starts)p" plan)"
"""


def supervise(
    folder: Path, plan: Sequence[str], *options: object, backoff: float = 0.01, **environment: str
) -> subprocess.Popen[str]:
    """Start the supervisor of a program that does one line of a shell program at each start; it runs in a folder."""
    (folder / "plan").write_text("\n".join(plan) + "\n")
    arguments = ("--run-directory", folder, "--backoff", backoff, *options, "--", "sh", "-c", NEXT_LINE)
    return start_supervisor(folder, *arguments, **environment)


def start_supervisor(folder: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jaxopt_llm.supervise", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def starts(folder: Path) -> int:
    path = folder / "starts"
    return path.read_text().count("\n") if path.exists() else 0


def journal(folder: Path) -> list[dict[str, Any]]:
    path = folder / "faults.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_program_is_started_again_until_it_is_done(tmp_path: Path) -> None:
    plan = [
        "echo one >&2; exit 5",
        "echo two >&2; exit 1",
        "exit 75",
        "echo four >&2; kill -9 $$",
        "exit 134",
        "exit 0",
    ]
    _, stderr = finish(supervise(tmp_path, plan))
    assert starts(tmp_path) == len(plan)
    faults = journal(tmp_path)
    assert [fault["fault"] for fault in faults] == ["exit code 5", "exit code 1", "exit code 75", "SIGKILL", "SIGABRT"]
    assert [fault["what"] for fault in faults] == ["one", "two", "", "four", ""]
    assert [fault["restart"] for fault in faults] == [1, 2, 3, 4, 5]
    assert stderr.splitlines()[:2] == ["one", "supervise: exit code 5; restart 1 in 0.01 s"]


@pytest.mark.parametrize("code", [2, 3, 4])
def test_what_a_restart_does_not_repair_is_final(code: int, tmp_path: Path) -> None:
    finish(supervise(tmp_path, [f"exit {code}", "exit 0"]), code)
    assert starts(tmp_path) == 1
    assert [(fault["code"], fault["restart"]) for fault in journal(tmp_path)] == [(code, 0)]


def test_restarts_without_a_new_checkpoint_are_limited(tmp_path: Path) -> None:
    """Check that a new checkpoint resets the count, and that what is being written is none."""
    (tmp_path / "checkpoints/4").mkdir(parents=True)
    plan = [*["exit 5"] * 2, "mkdir checkpoints/5; exit 5", "mkdir checkpoints/9.writing; exit 5", "exit 5", "exit 0"]
    _, stderr = finish(supervise(tmp_path, plan, "--restarts", 2), 5)
    assert starts(tmp_path) == 5
    assert [(fault["checkpoint"], fault["restart"]) for fault in journal(tmp_path)] == [
        (4, 1),
        (4, 2),
        (5, 1),
        (5, 2),
        (5, 0),
    ]
    assert "no new checkpoint after 2 restarts" in stderr


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_is_passed_on(sent: signal.Signals, tmp_path: Path) -> None:
    """Check that the program gets the signal once, and that the supervisor waits for it and ends with its code."""
    name = sent.name.removeprefix("SIG")
    plan = [f"trap 'echo told >&2; sleep 0.3; exit 75' {name}; touch ready; while :; do sleep 0.05; done", "exit 0"]
    process = supervise(tmp_path, plan)
    wait_until((tmp_path / "ready").exists, process)
    process.send_signal(sent)
    assert finish(process, 75)[1].count("told\n") == 1
    assert starts(tmp_path) == 1 and not journal(tmp_path)


def test_a_stop_during_a_pause_ends_the_supervisor(tmp_path: Path) -> None:
    process = supervise(tmp_path, ["exit 5", "exit 0"], backoff=DEADLINE)
    wait_until(lambda: journal(tmp_path), process)
    process.send_signal(signal.SIGTERM)
    finish(process, 75)
    assert starts(tmp_path) == 1


def test_pauses_double() -> None:
    from jaxopt_llm.supervision.faults import RestartBudget

    budget, pauses = RestartBudget(limit=100, first_pause=1), []
    for _ in range(9):
        budget = budget.after_fault(0)
        pauses.append(budget.pause_seconds)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert budget.after_fault(1).pause_seconds == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal after the death of a parent is Linux's")
def test_the_program_dies_with_a_killed_supervisor(tmp_path: Path) -> None:
    process = supervise(tmp_path, ["trap '' TERM INT HUP; echo $$ > pid; touch ready; while :; do sleep 0.05; done"])
    wait_until((tmp_path / "ready").exists, process)
    pid = int((tmp_path / "pid").read_text())
    assert os.getpgid(pid) != os.getpgid(process.pid)  # a terminal's Ctrl-C reaches it only through the supervisor
    process.kill()
    process.wait(DEADLINE)
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process runs: not one that has ended and that nobody has waited for."""
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_the_journal_says_when_the_run_is_back(tmp_path: Path) -> None:
    event = json.dumps({"time": 0, "step": 7, "event": "start"})
    later = json.dumps({"time": 9, "step": 7, "event": "resume"})
    wait = "while ! grep -q recovered faults.jsonl; do sleep 0.05; done"
    plan = [f"echo '{event}' > events.jsonl; exit 5", f"sleep 0.2; echo '{later}' >> events.jsonl; {wait}"]
    finish(supervise(tmp_path, plan))
    fault, recovery = journal(tmp_path)
    assert fault["fault"] == "exit code 5" and 0.2 <= recovery["recovered_after"] < DEADLINE


def test_it_does_not_need_jax() -> None:
    program = "import sys, jaxopt_llm.supervise; print({'jax', 'numpy', 'tyro'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("set()\n", 0)


PAIR = ("train", "--run.directory=r", *("--distributed.coordinator", "a:1", "--distributed.processes", "2"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no program is given"),
        (["--", "train"], "the run directory is unknown"),
        (["--run-directory", "run", "--", "no-such-program"], "there is no program no-such-program"),
        (["--restarts", "-1", "--", "train"], "--restarts: -1: must be 0 or a larger whole number"),
        (["--backoff", "nan", "--", "train"], "--backoff: nan: must be a number of seconds"),
        (["--restart", "1", "--", "train"], "did you mean --restarts?"),
        (["--", *PAIR, "--distributed.coordinator", "a" * 64 + ":1"], ":1: must be host:port"),
        (["--", "train", "--run.directory=r", "--distributed.processes", "two"], "--distributed.* is not a number"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    _, stderr = finish(start_supervisor(tmp_path, *arguments), 2)
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and message in stderr


@pytest.mark.slow
def test_a_supervised_run_that_is_killed_many_times_ends_equal_to_the_bit(tmp_path: Path) -> None:
    whole, run, chance = tmp_path / "whole", tmp_path / "run", random.Random(0)
    finish(start_training(whole, *RUN))
    arguments = [*tiny(run), *RUN, *SAVES_EVERY_STEP]
    process = start_supervisor(tmp_path, "--backoff", 0, "--", "train", *arguments)
    for kill in range(4):
        wait_until(lambda kill=kill: recoveries(run) >= kill and (run / "metrics.jsonl").exists(), process)
        time.sleep(chance.uniform(0, 0.3))
        os.kill(child_of(process.pid), signal.SIGKILL)
        wait_until(lambda kill=kill: len(faults(run)) > kill, process)
    finish(process)
    assert_ended_as(whole, run)
    assert [fault["fault"] for fault in faults(run)] == ["SIGKILL"] * 4


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def faults(run: Path) -> list[dict[str, Any]]:
    return [entry for entry in journal(run) if "fault" in entry]


def recoveries(run: Path) -> int:
    return sum("recovered_after" in entry for entry in journal(run))
