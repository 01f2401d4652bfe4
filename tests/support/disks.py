"""Simulated full disks, by a limit on the size of files."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Make larger writes of this process fail as on a full disk. Python ignores the signal that the kernel sends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
