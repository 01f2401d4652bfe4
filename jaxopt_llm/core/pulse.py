"""Pulse of a thread: what it tells a watchdog during work that takes long."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager


class Pulse:
    """Pulse of a thread that nobody watches: nothing is noted. That of a watched thread is an `Activity`."""

    def beat(self) -> None:
        """Note progress."""

    def wait_for_lock(self) -> AbstractContextManager[None]:
        """Note that the thread waits until another process releases a lock."""
        return contextlib.nullcontext()

    def follow(self, measure: Callable[[], object]) -> AbstractContextManager[None]:
        """Note progress whenever a value changes, during a call that notes none of its own.

        measure: reads the value, such as the size of the files that the call writes. Another thread calls it.
        """
        return contextlib.nullcontext()


UNWATCHED = Pulse()
