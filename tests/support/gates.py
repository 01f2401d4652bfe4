"""Commands that wait at a chosen function until the test lets them continue, however slow either of them is."""

import fcntl
import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from commands import start_python, tiny

DEADLINE = 300  # seconds after which a test stops waiting for an event

# Program that runs the command `jaxopt_llm.<name>`. Its arguments: gates as JSON, the name, arguments of the command.
GATED = """
import fcntl, functools, importlib, json, sys
from pathlib import Path
from jaxopt_llm.core import errors

def put(function, call, path):
    module, names = function.split(":")
    *owners, name = names.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original, calls = getattr(owner, name), 0

    def gated(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == call:
            with open(path) as file:
                Path(f"{path}.reached").touch()
                fcntl.flock(file, fcntl.LOCK_SH)
        return original(*arguments, **options)

    setattr(owner, name, gated)

for gate in json.loads(sys.argv.pop(1)):
    put(*gate)
errors.run_command(importlib.import_module(f"jaxopt_llm.{sys.argv.pop(1)}").main)
"""


class Gate:
    """Gate before a call of a function: the command waits there until the test opens the gate.

    function: "module:name" or "module:class.name". call: number of the call, from 1. The file is locked while the gate
    is closed, so the end of the test opens it.
    """

    def __init__(self, path: Path, function: str, call: int = 1) -> None:
        self.told = function, call, str(path)
        self._reached = Path(f"{path}.reached")
        self._lock = path.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def reached(self) -> bool:
        return self._reached.exists()

    def open(self) -> None:
        self._lock.close()


def after_step(path: Path, step: int) -> Gate:
    """Return a gate at which a process stops after its `step`-th step, before it looks for signals."""
    return Gate(path, "jaxopt_llm.observe.progress:ProgressLine.advance", 1 + step)


def start_gated(
    directory: Path, gates: Sequence[Gate], *overrides: object, **environment: str
) -> subprocess.Popen[str]:
    """Start a tiny training run with these gates."""
    told = json.dumps([gate.told for gate in gates])
    return start_python("-c", GATED, told, "train", *tiny(directory), *overrides, **environment)


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Return what the process wrote to standard output and to standard error."""
    try:
        stdout, stderr = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it did not end in {DEADLINE} s: {process.communicate()}") from None
    finally:
        process.kill()
    assert process.returncode == code, stderr
    return stdout, stderr


def wait_until(happens: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for an event. The process must not end before it."""
    deadline = time.monotonic() + DEADLINE
    while not happens():
        assert process.poll() is None, process.communicate()
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"what is waited for did not happen in {DEADLINE} s: {process.communicate()}")
        time.sleep(0.002)


def line_with(part: str, process: subprocess.Popen[str], stream: str = "stdout") -> str:
    """Return the next line of a stream of the process that contains a text."""
    lines = getattr(process, stream)
    timer = threading.Timer(DEADLINE, process.kill)
    timer.start()
    try:
        line = next((line for line in lines if part in line), None)
    finally:
        timer.cancel()
    assert line is not None, f"no line with {part!r}: {process.communicate()}"
    return line
