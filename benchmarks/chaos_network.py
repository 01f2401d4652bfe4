"""Network of a job whose hosts can be cut off: a network namespace for each, joined by a bridge (Linux, as root)."""

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType

_ALIASES = Path("/etc/netns")  # `ip netns exec NAME` puts the files of /etc/netns/NAME over those of /etc


class Network:
    """Hosts 10.77.0.1, 10.77.0.2, ..., which are removed at the end of the context.

    On each host the name of this machine resolves to the host's own address, because JAX's collectives listen on it.
    """

    def __init__(self, count: int) -> None:
        self._names = [f"chaos{os.getpid()}-{index}" for index in range(count)]
        self._switch = f"chaos{os.getpid()}-switch"
        self._cut_until = dict[int, float]()

    @staticmethod
    def is_possible() -> bool:
        """Return whether this process may make network namespaces."""
        if shutil.which("ip") is None:
            return False
        name = f"chaos{os.getpid()}-try"
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
        return made and subprocess.run(["ip", "netns", "delete", name], capture_output=True).returncode == 0

    def find_address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def prefix_command(self, index: int) -> list[str]:
        """Return the words before a command that run it on a host."""
        return ["ip", "netns", "exec", self._names[index]]

    def __enter__(self) -> "Network":
        with contextlib.ExitStack() as scope:
            scope.callback(self._remove)
            self._make(self._switch)
            _ip(f"-n {self._switch} link add bridge type bridge")
            _ip(f"-n {self._switch} link set bridge up")
            for index, name in enumerate(self._names):
                folder = _ALIASES / name
                folder.mkdir(parents=True)
                own = f"{self.find_address(index)} {socket.gethostname()}"
                (folder / "hosts").write_text(f"127.0.0.1 localhost\n{own}\n")
                self._make(name)
                _ip(f"link add wire netns {name} type veth peer name host{index} netns {self._switch}")
                _ip(f"-n {name} addr add {self.find_address(index)}/24 dev wire")
                _ip(f"-n {name} link set wire up")
                _ip(f"-n {self._switch} link set host{index} master bridge up")
            scope.pop_all()  # all is made: __exit__ removes it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)  # it may not have been made
            shutil.rmtree(_ALIASES / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # others have files there
            _ALIASES.rmdir()

    def cut(self, index: int, seconds: float) -> threading.Timer:
        """Drop all that a host sends and receives for some time. Return the timer that connects it again."""
        self._cut_until[index] = max(self._cut_until.get(index, 0.0), time.monotonic() + seconds)
        _ip(f"-n {self._switch} link set host{index} down")
        timer = threading.Timer(seconds, self._connect, [index])
        timer.start()
        return timer

    def _connect(self, index: int) -> None:
        """Connect a host again, unless a longer cut of it has not ended."""
        if time.monotonic() >= self._cut_until[index]:
            _ip(f"-n {self._switch} link set host{index} up")

    def _make(self, name: str) -> None:
        _ip(f"netns add {name}")
        _ip(f"-n {name} link set lo up")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
