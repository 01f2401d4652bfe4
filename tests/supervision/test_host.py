"""The program on a host, and the signals that reach it."""

import signal
import subprocess
import sys

import pytest

# A program that does not handle signals, as one whose imports have not begun.
STOP = """
import os, signal, sys, time
from jaxopt_llm.supervision.host import Host

host, signum = Host(0), int(sys.argv[2])
host.start(["sleep", "60"], {})
if sys.argv[1] == "leader":
    host.send(signum)
else:
    os.kill(os.getpid(), signum)
while (end := host.poll()) is None:
    host.wait(1)
print(end.code)
"""


@pytest.mark.parametrize(
    ("sender", "sent", "code"),
    [
        ("leader", signal.SIGTERM, 75),
        ("leader", signal.SIGKILL, 128 + signal.SIGKILL),
        ("user", signal.SIGTERM, 128 + signal.SIGTERM),
    ],
)
def test_a_program_that_the_leader_stops_at_its_start_counts_as_stopped(
    sender: str, sent: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-c", STOP, sender, str(sent.value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (str(code), "")


FROZEN = """
import signal, time
from jaxopt_llm.supervision import host as module

module.FROZEN_LOOKS, module.LOOK_SECONDS = 4, 0.05
host = module.Host(0)
host.start(["sleep", "60"], {})
time.sleep(1)
host.send(signal.SIGSTOP)
end = None
for _ in range(100):
    host.wait(0.05)
    end = end or host.poll()
print(end and end.code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that a process is stopped")
def test_a_program_that_stays_frozen_is_killed() -> None:
    """If the programs of all hosts are frozen, no other program notices it."""
    done = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(128 + signal.SIGKILL), done.stderr
