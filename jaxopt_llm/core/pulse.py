"""Threads beside the main work: calls that they repeat, and the pulse that tells a watchdog that work goes on."""

import contextlib
import threading
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def repeat(call: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """Call a function in a thread again and again, first after `seconds`, until the context ends.

    name: of the thread.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
