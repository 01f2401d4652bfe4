"""Files that are whole, or not there, whatever dies while they are written."""

import os
from pathlib import Path


def replace_durably(path: Path, text: str) -> None:
    """Writes a file whole or, if the process or the machine dies, not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes durable which names the directory has."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
