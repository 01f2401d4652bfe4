"""Saves that are not on disk yet, and the room for another one.

Each holds a copy of the state in host memory. A save without room is left out and does not wait: the devices would idle
until the storage is done, and again at each later checkpoint. Waiting would gain hardly any checkpoints, because the
storage writes as fast as it can in both cases.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxopt_llm.checkpoint.native.deferred_directory import DeferredDirectory

MAX_COPIES = 2
SMALL_BYTES = 2**28  # copies that are not larger together may be more, up to MAX_SMALL_COPIES
MAX_SMALL_COPIES = 16


@dataclass(frozen=True)
class Save:
    """A save of a checkpoint.

    Attributes:
        directory: its working directory.
        contents: the record of the checkpoint.
        sync: see `Checkpoints.save`.
        writes: Orbax's writes of the arrays, which are copied; None if this process left the save out.
    """

    directory: DeferredDirectory
    contents: dict[str, Any]
    sync: Callable[[], None]
    writes: list[Any] | None

    @property
    def step(self) -> int:
        return self.contents["step"]


class PendingSaves:
    """Saves that are not known to be on disk. Only the thread that adds them uses the object."""

    def __init__(self) -> None:
        self._saves: list[tuple[int, Future[None]]] = []  # bytes of the copy, and the end of the save; oldest first

    def add(self, size: int, future: Future[None]) -> None:
        """Add a save. size: bytes of its copy; 0 for one that is left out."""
        self._saves.append((size, future))

    def has_room(self, size: int, wait: bool) -> bool:
        """Return whether there is room for another copy.

        Args:
            size: bytes of the copy.
            wait: wait until there is.
        """
        while self._saves and self._saves[0][1].done():
            self._end_oldest()
        while self._saves:
            sizes = [each for each, _ in self._saves if each]
            small = len(sizes) < MAX_SMALL_COPIES and sum(sizes) + size <= SMALL_BYTES
            if len(sizes) < MAX_COPIES or small:
                return True
            if not wait and not self._saves[0][1].done():
                return False
            self._end_oldest()
        return True

    def wait(self) -> None:
        """Wait until each save is on disk or has failed. Raise the error of one that ended with an error."""
        while self._saves:
            self._end_oldest()

    def _end_oldest(self) -> None:
        self._saves.pop(0)[1].result()
