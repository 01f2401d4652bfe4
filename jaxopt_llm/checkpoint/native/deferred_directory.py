"""Directory for Orbax to write into, which is created after the arrays were copied off the devices.

Several threads of Orbax share the object that describes an array. Each thread waits for the directory, and then
replaces two attributes of the object: first the directory, then the path of the array. Another thread may read the
object between the two. With the classes here, every such state is valid.
"""

import asyncio
from concurrent.futures import Future
from pathlib import Path

from etils import epath


class CreatedDirectory(type(epath.Path(""))):  # type: ignore[misc]
    """Path of a directory that exists."""

    async def await_creation(self) -> epath.Path:
        """Return the path, to a thread that has just seen that it has to wait."""
        return self


class DeferredDirectory:
    """Directory that may not exist yet; the methods of Orbax's `PathAwaitingCreation`.

    Orbax copies the arrays at once. The threads that write them wait until `set_created` or `give_up` is called.
    """

    def __init__(self, path: Path, created: Future[None] | None = None) -> None:
        self.path = epath.Path(path)
        if created is None:
            created = Future()
            created.set_running_or_notify_cancel()  # one thread that ends early must not cancel the wait of the others
        self._created = created

    def __truediv__(self, name: str | Path) -> epath.Path:
        """Return the path of a file or an array in the directory, which nothing uses before the directory is there."""
        return self.path / name

    def subdirectory(self, name: str) -> "DeferredDirectory":
        """Return a directory that is created together with this one."""
        return DeferredDirectory(Path(self.path / name), self._created)

    async def await_creation(self) -> epath.Path:
        """Return the path once the directory exists. Raise the error of `give_up` if it will not."""
        await asyncio.wrap_future(self._created)
        return CreatedDirectory(self.path)

    def set_created(self) -> None:
        """Let the writes begin: the directory exists."""
        self._created.set_result(None)

    def give_up(self, error: BaseException) -> None:
        """Let the writes fail if they have not begun."""
        if not self._created.done():
            self._created.set_exception(error)
