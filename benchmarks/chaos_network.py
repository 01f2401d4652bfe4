"""Network of a job whose hosts can be cut off: a network namespace for each, joined by a bridge (Linux, as root)."""

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path
from types import TracebackType

_ALIASES = Path("/etc/netns")  # `ip netns exec NAME` puts the files of /etc/netns/NAME over those of /etc


class Network:
    """Hosts 10.77.0.1, 10.77.0.2, ... As a context manager it removes them at the end.

    In each of them the name of this machine is the host's own address, which JAX's collectives listen on.
    """

    def __init__(self, count: int) -> None:
        self._names = [f"chaos{os.getpid()}-{index}" for index in range(count)]
        self._switch = f"chaos{os.getpid()}-switch"

    @staticmethod
    def is_possible() -> bool:
        return os.geteuid() == 0 and shutil.which("ip") is not None and _run("netns", "list") == 0

    def address(self, index: int) -> str:
        return f"10.77.0.{index + 1}"

    def command(self, index: int) -> list[str]:
        """Return the words that run a command on a host."""
        return ["ip", "netns", "exec", self._names[index]]

    def __enter__(self) -> "Network":
        self._make(self._switch)
        _do("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _do("-n", self._switch, "link", "set", "bridge", "up")
        for index, name in enumerate(self._names):
            folder = _ALIASES / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address(index)} {socket.gethostname()}\n")
            self._make(name)
            _do(
                "link",
                "add",
                "wire",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                f"host{index}",
                "netns",
                self._switch,
            )
            _do("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "wire")
            _do("-n", name, "link", "set", "wire", "up")
            _do("-n", self._switch, "link", "set", f"host{index}", "master", "bridge", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name in (*self._names, self._switch):
            _run("netns", "delete", name)
            shutil.rmtree(_ALIASES / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # others have files there
            _ALIASES.rmdir()

    def cut(self, index: int) -> None:
        """Drop all that a host sends and receives."""
        _do("-n", self._switch, "link", "set", f"host{index}", "down")

    def join(self, index: int) -> None:
        """Connect a host again."""
        _do("-n", self._switch, "link", "set", f"host{index}", "up")

    def _make(self, name: str) -> None:
        _do("netns", "add", name)
        _do("-n", name, "link", "set", "lo", "up")


def _run(*words: str) -> int:
    return subprocess.run(["ip", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def _do(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
