"""Disks without room, for which a limit on the size of files stands."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Of this process: what goes beyond fails as on a full disk. Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
