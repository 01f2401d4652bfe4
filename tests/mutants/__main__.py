"""Break the package on purpose, one small change at a time, and check that the test named for each change fails.

The changes are data: see the `*.toml` files beside this one and `mutation.py`. Each is applied in a copy of the working
tree, never in the tree itself.
"""

import argparse
import contextlib
import fnmatch
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from mutation import Mutant, load

ROOT = Path(__file__).parent.parent.parent
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=short")
TIMEOUT_SECONDS = 960  # more than pytest's faulthandler_timeout, after which it shows where a test hangs
PASSED, FAILED, HUNG = 0, 1, -1  # exit codes of pytest and, the last, ours; others mean that it could not run the test
KILLED, SURVIVED, NOT_RUN, SKIPPED = "killed", "SURVIVED", "NOT RUN", "skipped"  # its test cannot run here


_running: set[int] = set()  # process groups of tests


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try, * and ? match (default: all)")
    parser.add_argument("--list", action="store_true", help="print the mutants and their reasons, and try none")
    parser.add_argument("--sample", type=int, metavar="N", help="try N of them, chosen by --seed")
    parser.add_argument("--seed", default="", metavar="TEXT", help="for --sample, as a commit's hash")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="mutants tried at once")
    given = parser.parse_args()
    if given.jobs < 1 or (given.sample is not None and given.sample < 1):
        parser.error("--jobs and --sample take a number from 1")
    try:
        chosen = choose(load(), given.names)
        if given.sample is not None:
            chosen = random.Random(given.seed).sample(chosen, min(given.sample, len(chosen)))
        if given.list:
            print(*(f"{each.name}: {each.why}" for each in chosen), sep="\n")
            return 0
        problems = [f"{each.name}: {problem}" for each in chosen for problem in each.problems(ROOT)]
        if problems:
            raise ValueError("\n".join(problems))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [copy_tree(Path(folder, str(number))) for number in range(given.jobs)]
        tests = sorted({each.node_id(ROOT) for each in chosen})
        print(f"{len(chosen)} mutants; first their {len(tests)} tests on the package as it is", flush=True)
        unbroken = run_tests(copies[0], tests, "--numprocesses", str(given.jobs), "--dist", "worksteal")
        if unbroken.returncode != PASSED:
            print(unbroken.stdout[-6000:], "error: a test fails without any change", sep="\n", file=sys.stderr)
            return 1
        verdicts = try_all(chosen, copies)
    print(*(f"{count} {verdict}" for verdict, count in Counter(verdicts).items()), sep=", ")
    alive = [each.name for each, verdict in zip(chosen, verdicts, strict=True) if verdict in (SURVIVED, NOT_RUN)]
    if alive:
        print("not killed:", *alive)
    return 1 if alive else 0


def choose(mutants: Sequence[Mutant], patterns: Sequence[str]) -> list[Mutant]:
    """Return the mutants whose names match a pattern, all if there is no pattern.

    Raises:
        ValueError: a pattern matches no mutant.
    """
    unknown = [each for each in patterns if not fnmatch.filter([mutant.name for mutant in mutants], each)]
    if unknown:
        raise ValueError(f"no mutant is named {' or '.join(unknown)}: scripts/mutants --list prints the names")
    return [each for each in mutants if not patterns or any(fnmatch.fnmatch(each.name, name) for name in patterns)]


def copy_tree(folder: Path) -> Path:
    """Copy the files that git knows or would add, so that no run directory or environment comes along."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():  # deleted and not yet committed
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return folder


def run_tests(copy: Path, tests: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy, whose package comes before the installed one. The exit code is HUNG if they take longer than
    TIMEOUT_SECONDS each."""
    process = subprocess.Popen(
        [sys.executable, *PYTEST, *options, *tests],
        cwd=copy,
        # No bytecode: a file that is changed twice within a second would be read from the first change's.
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _running.add(process.pid)
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS * len(tests))
        code = process.returncode
    except subprocess.TimeoutExpired:
        stop(process.pid)
        output, code = process.communicate()[0], HUNG
    finally:
        stop(process.pid)  # the commands that a test started and left
        _running.discard(process.pid)
    return subprocess.CompletedProcess(process.args, code, output)


def stop(group: int) -> None:
    """Kill a process group, if there still is one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def try_all(mutants: Sequence[Mutant], copies: Sequence[Path]) -> list[str]:
    """Return the verdict on each. One mutant at a time in each copy."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def attempt(mutant: Mutant) -> str:
        copy = free.get()
        try:
            return try_one(mutant, copy)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as threads:
        try:
            return list(threads.map(attempt, mutants))
        except BaseException:  # Ctrl-C, SIGTERM
            threads.shutdown(wait=False, cancel_futures=True)
            for group in tuple(_running):
                stop(group)
            raise


def try_one(mutant: Mutant, copy: Path) -> str:
    """Return the verdict on a mutant, and print what happened."""
    clock = time.perf_counter()
    file, broken = mutant.apply(copy)
    whole = file.read_text()
    try:
        file.write_text(broken)
        run = run_tests(copy, [mutant.node_id(copy)], "-x")
    finally:
        file.write_text(whole)
    code, output = run.returncode, run.stdout
    seconds = f"{time.perf_counter() - clock:6.1f} s"
    if code == FAILED and re.search(r"^\d+ failed", output, re.MULTILINE):  # not "1 error": the set-up did not run
        reason = " ".join(word for line in output.splitlines() if line.startswith("E ") for word in line.split()[1:])
        print(f"{KILLED:8} {seconds}  {mutant.name}: {reason[:120]}", flush=True)
        return KILLED
    verdict = NOT_RUN if code != PASSED else SURVIVED if " passed" in output else SKIPPED
    print(f"{verdict:8} {seconds}  {mutant.name}: {mutant.test}\n{output[-3000:]}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
