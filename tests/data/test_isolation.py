"""What a process can no longer do after `isolate`, and what it still can."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxopt_llm.data import isolation

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux"),
]

PROGRAM = """
import ctypes, os, runpy, signal, socket, subprocess, sys, threading
isolate = runpy.run_path(sys.argv[1])["isolate"]
open_file = open(sys.argv[2], "a")
isolate()

def attempt():
    {attempt}

try:
    attempt()
except PermissionError:
    print("refused")
else:
    print("done")
"""
REFUSED = {
    "read a file": "open(sys.argv[1])",
    "write a file": "open(sys.argv[2] + 'x', 'w')",
    "delete": "os.unlink(sys.argv[2])",
    "rename": "os.rename(sys.argv[2], sys.argv[2] + 'x')",
    "truncate": "os.truncate(sys.argv[2], 0)",
    "connect": "socket.create_connection(('127.0.0.1', 9))",
    "listen": "socket.create_server(('127.0.0.1', 0))",
    "run a program": "os.execv('/bin/true', ['true'])",
    "signal another process": "os.kill(os.getppid(), 0)",
}
ALLOWED = {
    "write to an open file": "open_file.write('more'); open_file.flush()",
    "memory": "bytearray(2**28)",
    "a thread": "thread = threading.Thread(target=print); thread.start(); thread.join()",
}


def run(attempt: str, folder: Path) -> str:
    (folder / "file").write_text("text")
    program = PROGRAM.replace("{attempt}", attempt)
    arguments = [sys.executable, "-c", program, isolation.__file__, str(folder / "file")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    assert run(REFUSED[name], tmp_path) == "refused"
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed(name: str, tmp_path: Path) -> None:
    assert run(ALLOWED[name], tmp_path) == "done"
