"""Exclusive lock on a directory: only one process writes to it at a time."""

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

from jaxopt_llm.core.errors import InputError, StorageFailed, may_pass


@contextlib.contextmanager
def lock_directory(directory: Path, setting: str = "run.directory") -> Iterator[None]:
    """Create a directory and lock it against other processes.

    The kernel releases the lock when this process dies. At the end a directory that was created here and is still empty
    is removed, so that a command that refuses its input leaves nothing.

    Args:
        directory: the directory to lock.
        setting: the field or flag that names the directory, for error messages.

    Raises:
        InputError: the directory cannot be written, or another process holds the lock.
        StorageFailed: the directory could be written earlier, and now its disk is full, read-only or fails.
    """
    is_new, path = not directory.exists(), directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        if path.exists() and may_pass(error):
            raise StorageFailed(
                f"{setting} {directory} cannot be written: {error}; mend its disk, then run again to continue"
            ) from error
        raise InputError(
            f"{setting} {directory} cannot be written: {error}; fix its permissions or choose another directory"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{setting} {directory} is in use by another process; wait until it ends or choose another directory"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):  # shared storage without locks
                raise
        try:
            yield
        finally:
            # It may have been deleted, which must not hide the error that ends the command.
            if is_new and directory.is_dir() and [*directory.iterdir()] == [path]:
                path.unlink()
                directory.rmdir()
