"""What a process can no longer do after `isolate`, and what it still can."""

import re
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
    "make a file": "os.mknod(sys.argv[2] + 'x')",
    "change a time": "os.utime(sys.argv[2])",
    "change the time of an open file": "os.utime(open_file.fileno())",
    "set an attribute": "os.setxattr(sys.argv[2], 'user.name', b'')",
    "remove an attribute of an open file": "os.removexattr(open_file.fileno(), 'user.name')",
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


# The headers of the kernel for both processors: ARM64 has the numbers of the generic one.
HEADERS = ("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")


@pytest.mark.parametrize("column", [0, 1])
def test_the_numbers_are_those_of_the_kernel(column: int) -> None:
    header = Path("/usr/include", HEADERS[column])
    if not header.exists():
        pytest.skip(f"there is no {header}")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    refused = {name: each[column] for name, each in isolation._REFUSED.items()}
    # The header may be older than the calls with the largest numbers.
    known = {name: number for name, number in refused.items() if number is None or number < 450}
    assert known == {name: int(numbers[name]) if name in numbers else None for name in known}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed(name: str, tmp_path: Path) -> None:
    assert run(ALLOWED[name], tmp_path) == "done"
