"""Atomic and durable file writes."""

import os
from pathlib import Path


def replace_durably(path: Path, text: str) -> None:
    """Write a file atomically: if the process or the machine dies, the file has its old content or its new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Flush the entries of a directory to disk, so that files created, renamed or deleted in it stay so."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
