"""Files: atomic and durable writes, the lock of a directory, and the folder of caches."""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxopt_llm.core.errors import InputError, StorageFailed, may_pass

_LFS_POINTER = b"version https://git-lfs"
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def cache_home() -> Path:
    """Return the folder for files that can be made again, such as compiled programs and downloaded data."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxopt_llm"


def check_is_regular(file: Path) -> None:
    """Raise InputError for a pipe, a socket or a device, also behind a link: to open one can block without end."""
    mode = file.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a regular file")
        raise InputError(f"{file}: {kind}, which is not read; name a regular file")


def read_file(file: Path, limit: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        InputError: it is a pipe, a socket or a device.
        ValueError: it has more than `limit` bytes.
    """
    check_is_regular(file)
    with file.open("rb") as stream:
        # read(limit) would allocate `limit` bytes for the smallest file.
        size = os.fstat(stream.fileno()).st_size
        content = stream.read(min(size, limit) + 1)
        if len(content) > size:  # it grows, or its system does not know its size
            content += stream.read(limit + 1 - len(content))
    if len(content) > limit:
        raise ValueError(f"more than {limit:,} bytes")
    return content


def check_is_no_pointer(file: Path) -> None:
    """Raise InputError for the pointer that git leaves in place of a large file if Git LFS is not installed."""
    check_is_regular(file)
    with file.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            remedy = f"run git lfs pull in {file.parent}, or hf download NAME --local-dir DIR"
            raise InputError(f"{file}: a pointer of Git LFS instead of the file; {remedy}")


def measure_files(folders: Iterable[Path]) -> tuple[int, int, int]:
    """Return the number of the files below folders, their bytes and the sum of their times: a write changes it.

    Other threads and processes may write and remove files meanwhile.
    """
    count = size = times = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    status = os.stat(os.path.join(parent, name))
                except OSError:  # it has just been removed
                    continue
                count, size, times = count + 1, size + status.st_size, times + status.st_mtime_ns
    return count, size, times


def replace_durably(path: Path, text: str) -> None:
    """Write a file atomically: if the process or the machine dies, the file has its old content or its new one.

    Raises:
        OSError: it could not be written. The error names the file.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            sync_file(file)
    except OSError as error:
        error.filename = error.filename or str(path)  # an error of a write names no file
        raise
    temporary.replace(path)
    sync_directory(path.parent)


def sync_file(file: IO[Any]) -> None:
    """Flush a file to disk. Otherwise a power failure could leave a file name without its contents."""
    file.flush()
    os.fsync(file.fileno())


def hash_file(path: Path, sync: bool = False) -> str:
    """Return the SHA-256 of a file. sync: flush it to disk first."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_tree(folder: Path) -> None:
    """Flush a folder with all that is in it to disk."""
    for path in (folder, *folder.rglob("*")):
        sync_directory(path)


def sync_directory(directory: Path) -> None:
    """Flush the entries of a directory to disk, so that files created, renamed or deleted in it stay so."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
