"""Read mutated inputs of every kind with the functions that a run reads them with, and count how each attempt ends.

    python benchmarks/fuzz.py [--inputs 10000] [--seed 0] [--only KIND ...] [--workers 2] [--json FILE]

Each input is a small valid sample with a mutation: flipped bits, a truncation, extreme or negative numbers, deep
nesting, wrong types, repeated keys, NaN, nothing at all. It depends only on the seed, its kind and its number. An
attempt ends as `read` (the mutation does no harm), `refused` (InputError or CheckpointError, one line that names the
file), `unnamed` (another message), `traceback` (any other exception), `abort` (a signal, or more than the memory of a
worker) or `hang`. The exit code is 1 if any attempt ends in one of the last four ways.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import fuzz_inputs
from fuzz_inputs import KINDS, Outcome

from jaxopt_llm.core import errors

GOOD, BAD = ("read", "refused"), ("unnamed", "traceback", "abort", "hang")
MEMORY = 2**32  # bytes of data that a worker may hold; JAX and the package take less than 1 GiB
SECONDS = 60.0  # for one input

Task = tuple[str, int]


def mutate(kind: str, seed: int, number: int, sample: bytes) -> bytes:
    """Return the content of an input. Most have one mutation."""
    source = random.Random(f"{seed}/{kind}/{number}")
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        change = source.choice(KINDS[kind].changes)
        try:
            sample = change(source, sample)
        except (LookupError, RecursionError, TypeError, ValueError):
            continue  # the mutation before it left no JSON, or nothing to change
    return sample


def read_input(task: Task, seed: int, folder: Path) -> Outcome:
    """Write an input and read it. A sample is written once into a folder."""
    name, number = task
    kind, own = KINDS[name], folder / name.replace(" ", "_")
    fresh = own / "sample"
    if not fresh.exists():
        content = fuzz_inputs.copy_sample(kind, own / "files")
        fresh.write_bytes(content)
    elif kind.damages:
        fuzz_inputs.copy_sample(kind, own / "files")
    return fuzz_inputs.read_mutated(kind, own / "files", mutate(name, seed, number, fresh.read_bytes()))


def work(connection: Connection, seed: int, folder: Path) -> None:
    """Read the inputs that arrive, in a process of its own."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, hard))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    with contextlib.suppress(EOFError):  # the end of the parent
        while True:
            connection.send(read_input(connection.recv(), seed, folder))


class Worker:
    """Process that reads inputs, and the one that it reads now."""

    def __init__(self, seed: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, seed, folder))
        self._process.start()
        theirs.close()
        self.task: Task | None = None
        self.deadline = 0.0

    def start(self, task: Task, first: bool) -> None:
        """Send a task. The first one of a process waits for its imports."""
        self.task, self.deadline = task, time.monotonic() + SECONDS + 120 * first
        self.connection.send(task)

    def collect(self) -> Outcome | None:
        """Return the outcome of the task; None while it runs. Whatever ends the process is an outcome, too."""
        if self.connection.poll():
            try:
                return self.connection.recv()
            except (EOFError, OSError):
                self._process.join()
                return Outcome("abort", f"exit code {self._process.exitcode}")
        return Outcome("hang", f"more than {SECONDS:g} s") if time.monotonic() > self.deadline else None

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def attempt_all(tasks: Sequence[Task], seed: int, workers: int, folder: Path) -> Iterator[tuple[Task, Outcome]]:
    """Yield how each attempt ends. A worker that an input has ended is replaced."""
    left, running = deque(tasks), dict[int, Worker]()
    try:
        while left or running:
            for place in range(workers):
                if left and place not in running:
                    running[place] = Worker(seed, folder / f"{place}")
                    running[place].start(left.popleft(), first=True)
            wait([worker.connection for worker in running.values()], timeout=1)
            for place, worker in list(running.items()):
                if (outcome := worker.collect()) is None:
                    continue
                assert worker.task is not None
                yield worker.task, outcome
                if left and outcome.verdict not in ("abort", "hang"):
                    worker.start(left.popleft(), first=False)
                else:
                    worker.end()
                    del running[place]
    finally:
        for worker in running.values():
            worker.end()


def make_tasks(inputs: int, kinds: Sequence[str]) -> list[Task]:
    return [(kinds[number % len(kinds)], number // len(kinds)) for number in range(inputs)]


def table(counts: dict[str, Counter[str]]) -> list[str]:
    verdicts = (*GOOD, *BAD)
    rows = {**counts, "all": sum(counts.values(), Counter())}
    head = f"{'':22}" + "".join(f"{verdict:>10}" for verdict in verdicts)
    return [head, *(f"{name:22}" + "".join(f"{row[each]:10,}" for each in verdicts) for name, row in rows.items())]


def main() -> int:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=tuple(KINDS), metavar="KIND")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="file for the counts; the table is written next to it as .txt")
    asked = parser.parse_args()
    counts = {name: Counter[str]() for name in asked.only}
    bad: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        tasks = make_tasks(asked.inputs, asked.only)
        for (name, number), outcome in attempt_all(tasks, asked.seed, asked.workers, Path(folder)):
            counts[name][outcome.verdict] += 1
            if outcome.verdict in BAD:
                detail = outcome.detail.replace(folder, "FOLDER")
                bad.append({"kind": name, "number": number, "verdict": outcome.verdict, "detail": detail})
                print(f"{name} {number}: {outcome.verdict}: {detail}", file=sys.stderr, flush=True)
    said = [f"{asked.inputs:,} mutated inputs, seed {asked.seed}", *table(counts)]
    print("\n".join(said))
    if asked.json:
        report = {"inputs": asked.inputs, "seed": asked.seed, "counts": counts, "bad": bad}
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
        asked.json.with_suffix(".txt").write_text("\n".join(said) + "\n")
    return bool(bad)


if __name__ == "__main__":
    errors.run_command(main)
