"""Experiment `chaos.py --only peers`: kill one process of a job, and look at how the others end.

All must end with exit code 5, within LONGEST seconds.

Each trial starts a real job of several local processes, waits for a moment (compile, step, evaluate, save), and sends
one process SIGKILL, SIGSEGV, or SIGTERM twice. Moments, signals, victims and delays are drawn from the seed.
"""

import collections
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from chaos_job import environment, free_port, join_variables

LONGEST = 30  # seconds that the others may take to end
DEADLINE = 300  # seconds from the start of a job to the moment, and from the signal to the end of the others
RUN = {
    **{"model.width": 16, "model.layers": 2, "model.pattern": "global", "model.heads": 2, "model.kv_heads": 1},
    **{"model.head_dim": 8, "model.mlp_width": 16, "training.sequence_length": 32, "schedule.warmup_steps": 0},
    **{"training.steps": 100000, "logging.every": 1, "logging.tensorboard": False},
}
# Settings with which a random moment of the run is probably of a kind, and the longest delay until the signal.
MOMENTS: dict[str, tuple[dict[str, object], float]] = {
    "compile": ({}, 1.5),
    "step": ({"evaluation.every": 100000, "checkpoint.every": 100000}, 1.0),
    "evaluate": ({"evaluation.every": 1, "evaluation.batches": 40, "checkpoint.every": 100000}, 1.0),
    "save": ({"evaluation.every": 100000, "checkpoint.every": 1}, 0.02),
}
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGTERM twice")


@dataclass(frozen=True)
class Trial:
    """A death and its consequences.

    codes: exit codes of the survivors, negative for signals. seconds: from the signal to the end of the last survivor.
    lines: last line on standard error of each survivor.
    """

    moment: str
    signal: str
    victim: int
    codes: list[int]
    seconds: float
    lines: list[str]


def main(count: int, processes: int, seed: int, file: Path | None) -> None:
    """Run `count` trials, print a table, and write the figures into a file."""
    chance, trials = random.Random(seed), list[Trial]()
    for number in range(count):
        moment, sent = tuple(MOMENTS)[number % len(MOMENTS)], chance.choice(SIGNALS)
        trials.append(run_trial(moment, sent, processes, chance))
        print(trials[-1], flush=True)
    lines = make_table(trials)
    print("\n".join(lines))
    if file:
        told = {"jax": jax.__version__, "processes": processes, "seed": seed}
        file.write_text(json.dumps(told | {"trials": [asdict(trial) for trial in trials]}, indent=1) + "\n")
        file.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    if any(set(trial.codes) != {5} or trial.seconds > LONGEST for trial in trials):
        raise SystemExit(1)


def run_trial(moment: str, sent: str, count: int, chance: random.Random) -> Trial:
    """Start a job of `count` processes, kill one of them, and wait for the others."""
    settings, delay = MOMENTS[moment]
    victim = chance.randrange(count)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        with start_job(directory, count, settings) as processes:
            wait_for(lambda: has_come(moment, directory), processes)
            time.sleep(chance.uniform(0, delay))
            began = time.monotonic()
            send(sent, processes[victim])
            others = [each for index, each in enumerate(processes) if index != victim]
            ended = [each.communicate(timeout=DEADLINE)[1] for each in others]
            seconds = time.monotonic() - began
    codes = [each.returncode for each in others]
    return Trial(moment, sent, victim, codes, round(seconds, 2), [(text.splitlines() or [""])[-1] for text in ended])


@contextlib.contextmanager
def start_job(directory: Path, count: int, settings: dict[str, object]) -> Iterator[Sequence[subprocess.Popen[str]]]:
    """Start the processes of a job. At the end, those that are left are killed."""
    flags = [f"--{name}={value}" for name, value in (RUN | settings).items()]
    shape = [f"--mesh.fsdp={count}", f"--training.batch_size={2 * count}", f"--run.directory={directory}"]
    program = [sys.executable, "-m", "jaxopt_llm.train", "--config", "quickstart.py", *flags, *shape]
    variables, port = environment(), free_port()
    output = directory.parent / "output"
    with output.open("w") as file:
        processes = [
            subprocess.Popen(
                program,
                env=variables | join_variables(port, count, rank),
                stdout=file,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def has_come(moment: str, directory: Path) -> bool:
    """Return whether the moment has come: the compilation has begun, steps are recorded, or a save has begun."""
    if moment == "compile":
        return "parameters" in (directory.parent / "output").read_text()
    if moment == "save":
        return any((directory / "checkpoints").glob("*.writing*"))
    log = directory / "metrics.jsonl"
    return log.exists() and log.read_text().count("\n") > 2


def wait_for(condition: Callable[[], bool], processes: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            codes = [process.poll() for process in processes]
            raise SystemExit(f"the job did not reach its moment; exit codes so far: {codes}")
        time.sleep(0.001)


def send(sent: str, process: subprocess.Popen[str]) -> None:
    process.send_signal(getattr(signal, sent.split()[0]))
    if sent.endswith("twice"):
        while process.poll() is None and _catches(process.pid, signal.SIGTERM):  # until then it is the same request
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)


def _catches(process: int, signum: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signum - 1) & 1)


def make_table(trials: Sequence[Trial]) -> list[str]:
    lines = [f"{'moment':10}{'trials':>8}{'exit 5 on all':>15}{'median s':>10}{'longest s':>11}   other exits"]
    for moment in (*MOMENTS, "all"):
        of_kind = [trial for trial in trials if moment in (trial.moment, "all")]
        if not of_kind:
            continue
        seconds = sorted(trial.seconds for trial in of_kind)
        good = sum(set(trial.codes) == {5} for trial in of_kind)
        others = collections.Counter(code for trial in of_kind for code in trial.codes if code != 5)
        lines.append(
            f"{moment:10}{len(of_kind):8}{good:15}{seconds[len(seconds) // 2]:10.1f}{seconds[-1]:11.1f}   "
            f"{', '.join(f'{count} x {code}' for code, count in others.items()) or 'none'}"
        )
    return lines
