"""A directory that is written belongs to one process at a time."""

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

from jaxopt_llm.errors import InputError


@contextlib.contextmanager
def sole_owner(directory: Path, setting: str = "run.directory") -> Iterator[None]:
    """Makes the directory that a setting names and holds it against other processes. The kernel lets go when this one
    dies.

    Raises InputError where it cannot be written, or another process holds it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("a")
    except OSError as error:
        raise InputError(f"{setting} {directory} cannot be written: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{setting} {directory} is in use: another process writes there; wait for its end or choose another"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):  # shared storage without locks
                raise
        yield
