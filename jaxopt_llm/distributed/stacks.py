"""Python stacks of this process, written while the process hangs."""

import faulthandler
import os
import socket
import sys
import threading
import time
from pathlib import Path

WRITE_SECONDS = 5  # after which the stacks go to standard error: the disk may be what hangs


def stacks_path(directory: Path, process: int) -> Path:
    """Return the file of a process, in the run directory."""
    return directory / f"stacks.{process}.{socket.gethostname()}.txt"


def write_stacks(path: Path, reason: str) -> None:
    """Append the Python stacks of all threads to a file, or print them if it cannot be written in time."""
    written = threading.Event()

    def write() -> None:
        try:
            with path.open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {reason}\n")
                file.flush()
                faulthandler.dump_traceback(file)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            return  # the stacks are printed instead
        written.set()

    thread = threading.Thread(target=write, name="stacks", daemon=True)
    thread.start()
    thread.join(WRITE_SECONDS)
    if not written.is_set():
        print(f"{path} could not be written; the stacks of this process:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
