"""Disk of a run that can be full or read-only: a small file system in memory (Linux, as root)."""

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType

MEGABYTES = 64
BLOCK = 4096


class Disk:
    """File system over a folder, which all hosts see. At the end of the context the folder has its files.

    When it is full, nothing that needs a new block can be written (ENOSPC). When it is read-only, a mount of it that
    can only be read lies over it (EROFS): files that are open stay so, as on a disk whose export has changed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filling, self._aside = folder / "filling", folder.with_name(folder.name + ".read-only")
        self._timers: list[threading.Timer] = []

    @staticmethod
    def is_possible() -> bool:
        """Return whether this process may mount file systems."""
        if shutil.which("mount") is None:
            return False
        with tempfile.TemporaryDirectory(prefix="chaos-try-") as folder:
            made = subprocess.run(["mount", "-t", "tmpfs", "chaos", folder], capture_output=True).returncode == 0
            return made and subprocess.run(["umount", folder], capture_output=True).returncode == 0

    def __enter__(self) -> "Disk":
        self.folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "chaos", self.folder)
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(_run, "umount", self.folder)
            # The hosts have mounts of their own, which follow those of this process if they are shared.
            _run("mount", "--make-shared", self.folder)
            unless_made.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join()
        kept = self.folder.with_name(self.folder.name + ".kept")
        try:
            self.heal()
            shutil.copytree(self.folder, kept)
        finally:
            _run("umount", "--lazy", self.folder)
        self.folder.rmdir()
        kept.rename(self.folder)

    def fill(self) -> None:
        with self._filling.open("wb", buffering=0) as file:
            for size in (2**20, BLOCK):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def empty(self) -> None:
        self._filling.unlink(missing_ok=True)

    def make_read_only(self) -> None:
        self._aside.mkdir()
        _run("mount", "--bind", self.folder, self._aside)
        _run("mount", "--make-private", self._aside)  # otherwise what is mounted on the folder is mounted here, too
        _run("mount", "-o", "remount,bind,ro", self._aside)
        _run("mount", "--bind", self._aside, self.folder)

    def make_writable(self) -> None:
        if self._aside.exists():
            _run("umount", "--lazy", self.folder)
            _run("umount", "--lazy", self._aside)
            self._aside.rmdir()

    def heal(self) -> None:
        """Make the disk writable, with room."""
        self.make_writable()
        self.empty()

    def heal_after(self, seconds: float) -> threading.Timer:
        """Return the timer after which the disk is healed."""
        timer = threading.Timer(seconds, self.heal)
        self._timers.append(timer)
        timer.start()
        return timer


def _run(*words: str | os.PathLike[str]) -> None:
    subprocess.run(words, check=True)
